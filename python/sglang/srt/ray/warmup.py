"""The warm-up request of a server that lives in somebody else's process: a failed one stops the server, nothing else.

Upstream's function knows each kind of model, so it is kept, and ends in `kill_process_tree(os.getpid())`; that one name
is bound to an exception here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from sglang.srt.ray.liveness import EngineFailedError

_KILL = "kill_process_tree"


class WarmupFailedError(EngineFailedError):
    """The server came up, but its first request failed."""


def hosted_warmup(report: Callable[[EngineFailedError], None]) -> Callable[[Any], bool]:
    """What to give upstream's server as its warm-up. It runs on a thread of the server; `report` is called there."""

    def warm_up(server_args: Any) -> bool:
        try:
            return bool(_upstream_warmup()(server_args))
        except WarmupFailedError as failure:
            report(failure)
            return False

    return warm_up


def _upstream_warmup() -> Callable[[Any], Any]:
    """Upstream's function with its own globals of this moment, but for the one name."""
    from sglang.srt.entrypoints import http_server

    original = http_server._execute_server_warmup
    if _KILL not in original.__code__.co_names:
        raise RuntimeError(
            f"{original.__qualname__} no longer calls {_KILL}; warmup.py has to follow it"
        )

    def fail_instead(*args: Any, **kwargs: Any) -> None:
        raise WarmupFailedError("the warm-up request failed; the log above has the reason")

    scope = {**vars(http_server), _KILL: fail_instead}
    return types.FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
