"""The tokenizer manager of an engine that takes part in weight syncs: its pauses reach the scheduler in every mode.

Upstream's default pause, `abort`, ends all requests but never tells the scheduler, so nothing there could know whether
bytes may land; here it is followed by a pause that does. Engines without `--enable-rdt-weight-sync` keep upstream's
pause.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.ray.hosted_tokenizer import HostedTokenizerManager
from sglang.srt.runtime_context import get_device


class WeightSyncTokenizerManager(HostedTokenizerManager):
    """Runs in the process that launched the engine, on its event loop."""

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        await super().pause_generation(obj)
        if obj.mode == "abort":
            # All requests are gone by now. `retract`, not `in_place`: it also lets go of the batch that ran last, which
            # would otherwise make every flush of the cache fail.
            async with self.is_pause_cond:
                await self._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))


def init_ray_tokenizer_manager(server_args: Any, port_args: Any) -> tuple[Any, Any]:
    """What RayEngine calls in place of upstream's `init_tokenizer_manager`."""
    chosen: Any = HostedTokenizerManager
    if get_device().enable_rdt_weight_sync:
        chosen = WeightSyncTokenizerManager
    return init_tokenizer_manager(server_args, port_args, chosen)
