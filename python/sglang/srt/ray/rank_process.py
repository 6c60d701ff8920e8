"""What a rank's actor does before anything else of the engine is imported in its process."""

from __future__ import annotations


def prepare_rank_process() -> None:
    """Load the plugins, as forked schedulers do: their hooks replace classes that the scheduler imports."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # type: ignore[no-untyped-call]
