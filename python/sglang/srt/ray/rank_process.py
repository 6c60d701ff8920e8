"""What a rank's actor does before anything else of the engine is imported in its process."""

from __future__ import annotations


def prepare_rank_process() -> None:
    """Load the plugins, as forked schedulers do: their hooks replace classes that the scheduler imports."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.ray.rank_requests import make_aborts_exact
    from sglang.srt.ray.weight_sessions import watch_sessions

    load_plugins()  # type: ignore[no-untyped-call]
    make_aborts_exact()
    watch_sessions()
