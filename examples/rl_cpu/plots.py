"""Two pictures of a run: the reward over the log-probability gap, and where the sync time went.

Figures are drawn without pyplot, so no display and no global state is touched.  The palette is one
that colour-blind readers can tell apart; every axis names its unit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from summary import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#44AA99",
    "#999999",
    "#332288",
    "#882255",
)
REWARD_GOAL = 0.9
DOTS_PER_INCH = 150


def plot_reward(result: RunResult, path: Path) -> None:
    """Reward of each step against chance and goal; below, the gap against an update's shift."""
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_reward(top, result)
    _draw_gap(bottom, result)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_reward(axes: Axes, result: RunResult) -> None:
    steps = [step.step for step in result.steps]
    rewards = [step.reward for step in result.steps]
    chance = result.chance_reward
    axes.plot(steps, rewards, color=PALETTE[0], marker=".", label="reward")
    axes.axhline(REWARD_GOAL, color=PALETTE[2], linestyle="--", label=f"goal {REWARD_GOAL}")
    axes.axhline(chance, color=PALETTE[3], linestyle=":", label=f"chance {chance:.3f}")
    axes.set(ylim=(0, 1.03), ylabel="reward (share of tokens in the class)")
    model, seed = result.options["model_size"], result.options["seed"]
    axes.set_title(f"The policy learns ({model} model, seed {seed})")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _draw_gap(axes: Axes, result: RunResult) -> None:
    steps = [step.step for step in result.steps]
    shifts = [step.update.shift for step in result.steps]
    gaps = [step.update.gap for step in result.steps]
    limit = result.gap_tolerance
    axes.semilogy(steps, shifts, color=PALETTE[1], marker=".", label="shift by one update")
    axes.axhline(limit, color=PALETTE[3], linestyle="--", label=f"tolerance {limit:.0e}")
    axes.semilogy(steps, gaps, color=PALETTE[0], marker=".", label="gap, engine to trainer")
    axes.set(xlabel="step", ylabel="largest difference of\nlog-probabilities (nat)")
    axes.set_title("The weights arrive: the engine's log-probabilities are the trainer's")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.55), ncols=3, fontsize="small")
    axes.grid(alpha=0.3)


def plot_sync_phases(result: RunResult, path: Path) -> None:
    """One stacked bar a sync, cut off above the warm syncs when the first one towers over them."""
    syncs = result.syncs
    names = list(dict.fromkeys(name for sync in syncs for name in sync.phase_seconds))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    floor = [0.0] * len(syncs)
    for index, name in enumerate(names):
        heights = [sync.phase_seconds.get(name, 0.0) * 1e3 for sync in syncs]
        colour = PALETTE[index % len(PALETTE)]
        axes.bar(
            range(1, len(syncs) + 1), heights, bottom=floor, color=colour, width=0.9, label=name
        )
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    limit = 1.3 * max(floor[1:] or floor)
    if floor[0] > limit:
        axes.annotate(
            f"first sync, cut off: {floor[0]:.0f} ms",
            xy=(1, limit),
            xytext=(8, -14),
            textcoords="offset points",
        )
    axes.set(ylim=(0, limit), xlabel="sync", ylabel="time (ms)")
    megabytes = syncs[0].total_bytes / 1e6
    axes.set_title(f"Where the time of a weight sync goes ({megabytes:.1f} MB each)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="phase", reverse=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
