"""Which memory a release or a resume really concerns, decided on the rank before anything moves.

Upstream asserts and raises in the scheduler's event loop: a second wake-up, or a release while a request runs, ends the
engine (fault F12). The seam in `weight_updater.py` asks here first and answers the caller with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES


class MemoryOccupationError(RuntimeError):
    """The engine refused to release or resume memory; nothing was changed."""


def unknown_tags(tags: Sequence[str] | None) -> str | None:
    """Why the tags can't be meant; None when they can."""
    if unknown := sorted(set(tags or ()) - set(GPU_MEMORY_ALL_TYPES)):
        return f"unknown memory tag(s) {unknown!r}; the tags are {sorted(GPU_MEMORY_ALL_TYPES)!r}"
    return None


def tags_to_release(updater: Any, tags: Sequence[str] | None) -> tuple[list[str], str | None]:
    """The tags that are still occupied, and why nothing may be released now (None: it may).

    Args:
        updater: the scheduler's `WeightUpdater`.
        tags: what was asked for; None and [] mean everything.
    """
    if refusal := unknown_tags(tags):
        return [], refusal
    wanted = [tag for tag in tags or GPU_MEMORY_ALL_TYPES if tag not in updater.offload_tags]
    scheduler = updater.scheduler
    paused = scheduler is not None and scheduler._engine_paused
    if wanted and not updater.is_fully_idle(ignore_waiting=paused):
        return [], "requests are running: pause generation in mode 'abort' or 'retract' first"
    return list(dict.fromkeys(wanted)), None


def tags_to_resume(updater: Any, tags: Sequence[str] | None) -> tuple[list[str], str | None]:
    """The tags that are released, in what was asked for; None and [] mean everything."""
    if refusal := unknown_tags(tags):
        return [], refusal
    wanted = [tag for tag in tags or GPU_MEMORY_ALL_TYPES if tag in updater.offload_tags]
    return list(dict.fromkeys(wanted)), None


def check_answers(what: str, answers: Sequence[Any]) -> None:
    """Raise what any rank refused.

    Raises:
        MemoryOccupationError: with each refusal's text.
    """
    if refused := sorted({answer.message for answer in answers if not answer.success}):
        raise MemoryOccupationError(f"{what} was refused: {'; '.join(refused)}")


def wait_for_device() -> None:
    """Wait for what the rank's accelerator has been given. Torch's default module is CUDA's even without a GPU."""
    import torch

    from sglang.srt.runtime_context import get_device

    if get_device().device != "cpu":
        torch.get_device_module().synchronize()
