"""A replica whose first transfer from a peer fails after its bytes have landed; it says so in the file `FLAKY_LOG`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.ray.serve.joining import Joining
from sglang.srt.ray.serve.server import SGLangServer
from sglang.srt.ray.weight_sync.errors import TransferError


class FlakyJoining(Joining):
    """Every transfer is real; of the first one the replica does not learn that it succeeded."""

    _failed = False

    async def _receive(self, peer: Any, transaction: str) -> None:
        await super()._receive(peer, transaction)
        if not self._failed:
            self._failed = True
            with Path(os.environ["FLAKY_LOG"]).open("a") as log:
                log.write(f"{self._name} from {peer.replica}\n")
            raise TransferError("the answer got lost", phase="wire")


class FlakyServer(SGLangServer):
    joining_class = FlakyJoining
