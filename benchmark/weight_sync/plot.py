"""A picture of one or several runs: where the time of each way goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Stacked phases of every way, one panel for each run, in milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(runs), 1, figsize=(10, 1.2 + 2.6 * len(runs)), squeeze=False
    )
    names = list(
        dict.fromkeys(
            name for run in runs for row in run["ways"].values() for name in row["phases"]
        )
    )
    colours = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    for run, (panel,) in zip(runs, panels, strict=True):
        for way, row in reversed(run["ways"].items()):
            left = 0.0
            for name, seconds in row["phases"].items():
                panel.barh(way, seconds * 1e3, left=left, color=colours.get(name))
                left += seconds * 1e3
        panel.axvline(run["copy"] * 1e3, color="black", linestyle=":", linewidth=1)
        panel.set_title(
            f"{run['bytes'] / 1e6:.0f} MB, {run['engines']} engine(s), TP {run['tp']} (dotted: one copy)"
        )
        panel.set_xlabel("ms")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours.get(name)) for name in names]
    figure.legend(handles, names, loc="lower center", ncols=min(len(names), 8), fontsize="small")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
