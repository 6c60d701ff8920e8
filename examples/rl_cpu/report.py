"""What the user sees while it runs: a live table and a progress bar, or one line a step.

A terminal gets the table; anything else (CI, a pipe) gets lines, because a live display in a log is
noise.  Both show the same values of the same ``StepRecord``; the phases of a sync share one cell,
which keeps the largest few when the terminal is narrow.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from records import Evaluation, StepRecord
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

COLUMNS = ("step", "ver", "reward", "loss", "tok/s", "gap", "shift", "sync", "MB", "GB/s", "phases")
NUMBERS_WIDTH = 65
"""Terminal columns that every cell but the phases takes, gaps included."""

PHASE_WIDTH = 14
"""Terminal columns of one phase, roughly."""

HEAD_ROWS = 8
"""Terminal rows that the table leaves for its title, its head, its caption and the progress bar."""


def phase_text(phase_seconds: Mapping[str, float], *, keep: int | None = None) -> str:
    """``wire 12.3 verify 2.0``; with ``keep`` the largest phases, the rest summed as ``other``."""
    names = list(phase_seconds)
    if keep is not None and len(names) > keep:
        largest = set(sorted(names, key=lambda name: phase_seconds[name], reverse=True)[:keep])
        names = [name for name in names if name in largest]
    parts = [f"{name} {phase_seconds[name] * 1e3:.1f}" for name in names]
    if len(names) < len(phase_seconds):
        other = sum(phase_seconds.values()) - sum(phase_seconds[name] for name in names)
        parts.append(f"other {other * 1e3:.1f}")
    return " ".join(parts)


def table_row(record: StepRecord, *, keep_phases: int | None = None) -> tuple[str, ...]:
    """The cells of one step, in the order of ``COLUMNS``."""
    return (
        str(record.step),
        record.engine_version,
        f"{record.reward:.3f}",
        f"{record.update.loss:+.3f}",
        f"{record.tokens_per_second:,.0f}",
        f"{record.update.gap:.1e}",
        f"{record.update.shift:.1e}",
        f"{record.sync.total_seconds * 1e3:.1f}",
        f"{record.sync.total_bytes / 1e6:.1f}",
        f"{record.sync.wire_gigabytes_per_second:.2f}",
        phase_text(record.sync.phase_seconds, keep=keep_phases),
    )


def step_line(record: StepRecord, *, num_steps: int) -> str:
    """The same cells as one line of a log."""
    step, version, reward, loss, tokens, gap, shift, sync, megabytes, speed, phases = table_row(
        record
    )
    return (
        f"step {step:>3}/{num_steps}  version {version:<3} reward {reward}  loss {loss}  "
        f"{tokens:>6} tok/s  gap {gap}  shift {shift}  "
        f"sync {sync} ms, {megabytes} MB, {speed} GB/s ({phases})"
    )


class LiveReport:
    """Use as a context around the steps; ``note`` works before, inside and after it.

    Not thread-safe: the driver calls it from its main thread.
    """

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._started = time.monotonic()
        self._records: list[StepRecord] = []
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=num_steps, start=False)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._progress.start_task(self._task)
        if self._console.is_terminal:
            self._live = Live(
                self._view(), console=self._console, auto_refresh=True, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.update(Group(self._table(self._records), self._progress))
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """A line outside of the table, with the seconds since the start."""
        elapsed = time.monotonic() - self._started
        self._console.print(
            f"[{elapsed:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        self._progress.advance(self._task)
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
        else:
            line = step_line(record, num_steps=self._num_steps)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def evaluation(self, result: Evaluation, *, chance: float) -> None:
        self.note(
            f"final policy: reward {result.reward:.3f} (chance {chance:.3f}, maximum 1) "
            f"under weight version {result.engine_version}, gap {result.gap:.1e}"
        )

    def _view(self) -> Group:
        room = max(1, self._console.height - HEAD_ROWS)
        return Group(self._table(self._records[-room:]), self._progress)

    def _table(self, records: list[StepRecord]) -> Table:
        keep = max(1, (self._console.width - NUMBERS_WIDTH) // PHASE_WIDTH - 1)
        table = Table(
            title="Weights by Ray Direct Transport, step by step",
            caption="gap, shift: log-probabilities (nat); sync, phases: ms",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for name in COLUMNS[:-1]:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column(COLUMNS[-1])  # the one that gives way on a narrow terminal
        for record in records:
            *numbers, phases = table_row(record, keep_phases=keep)
            table.add_row(*numbers, Text(phases, no_wrap=True, overflow="ellipsis"))
        return table
