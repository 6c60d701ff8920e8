"""Reinforcement learning on a plain CPU, with weights that reach the engine by RDT.

A trainer actor (transformers, AdamW) and an SGLang engine share one machine: each step syncs the
trainer's weights into the live engine, samples from it over HTTP, proves by log-probabilities that
the engine holds exactly these weights, and takes one GRPO update.  See ``--help``; ``out/`` keeps
plots and ``summary.json``.

The seed fixes both sets of initial weights, the prompts and the engine's random generator.  A run
usually repeats to the digit, but that is not promised: how the engine groups requests into batches
depends on timing, and with it which random numbers a sequence gets.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fleet import FleetConfig, running_fleet
from interrupts import ignore_interrupts, interrupt_once, interrupted_by
from local_ray import ray_session
from loop import Progress, TrainingLoop
from records import GAP_TOLERANCE
from report import LiveReport
from rich.console import Console
from rollout import BatchShape, HttpRollout, TokenClass
from summary import RunResult, summary_line, write_summary
from tiny_model import MODEL_SIZES, VOCAB_SIZE

DEVICES = ("cpu",)
EXIT_INTERRUPTED = 130


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A small policy learns on an SGLang engine that gets its weights by RDT.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=_positive, default=40, help="policy updates")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling")
    parser.add_argument(
        "--model-size",
        choices=tuple(MODEL_SIZES),
        default="tiny",
        help="1.4, 10 or 77 M parameters; medium shows bytes, give it few --steps",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="of engine and trainer")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--verbose", action="store_true", help="show the actors' logs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    interrupt_once()
    run = _Run(options)
    try:
        run.execute()
    except KeyboardInterrupt:
        run.write("interrupted")
        run.report.note(f"interrupted by {interrupted_by()}: everything that was started has ended")
        return EXIT_INTERRUPTED
    except BaseException:
        run.write("failed")
        raise
    run.write("completed")
    run.finish()
    return 0


class _Run:
    """One run from the start of Ray to the files in ``out/``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._started = time.monotonic()
        self._rewarded = TokenClass()
        self._chance = self._rewarded.chance(vocab_size=VOCAB_SIZE)
        self._progress = Progress()
        self.report = LiveReport(Console(), num_steps=options.steps)

    def execute(self) -> None:
        """Everything that needs processes; on return, or on any exception, none is left."""
        with ExitStack() as stack:
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl_cpu_")))
            self.report.note("starting Ray")
            session = stack.enter_context(ray_session(stream_logs=self._options.verbose))
            self.report.note(f"logs of the actors: {session.log_dir}")
            config = FleetConfig(
                size=MODEL_SIZES[self._options.model_size],
                seed=self._options.seed,
                device=self._options.device,
                workdir=workdir,
            )
            fleet = stack.enter_context(running_fleet(config, session, note=self.report.note))
            stack.callback(ignore_interrupts)  # runs first when the ending begins
            self._train(fleet.url, fleet.trainer)

    def _train(self, url: str, trainer: Any) -> None:
        shape = BatchShape()
        rollout = HttpRollout(url, shape)
        loop = TrainingLoop(
            rollout=rollout,
            trainer=trainer,
            listener=self.report,
            shape=shape,
            rewarded=self._rewarded,
            seed=self._options.seed,
        )
        self._progress = loop.progress
        self.report.note(
            f"reward: share of sampled tokens with id % {self._rewarded.modulus} == "
            f"{self._rewarded.remainder}; chance {self._chance:.3f}, maximum 1"
        )
        with rollout, self.report:
            loop.run(self._options.steps)

    def write(self, outcome: str) -> None:
        write_summary(self._result(outcome), self._options.out / "summary.json")

    def finish(self) -> None:
        """The last words and the plots of a completed run."""
        from plots import plot_reward, plot_sync_phases

        result = self._result("completed")
        assert result.evaluation is not None
        self.report.evaluation(result.evaluation, chance=self._chance)
        self.report.note(summary_line(result))
        plot_reward(result, self._options.out / "reward.png")
        plot_sync_phases(result, self._options.out / "sync_phases.png")
        self.report.note(f"wrote reward.png, sync_phases.png, summary.json to {self._options.out}/")

    def _result(self, outcome: str) -> RunResult:
        return RunResult(
            options=vars(self._options),
            outcome=outcome,
            chance_reward=self._chance,
            gap_tolerance=GAP_TOLERANCE,
            control_gap=self._progress.control_gap,
            steps=tuple(self._progress.steps),
            evaluation=self._progress.evaluation,
            seconds=time.monotonic() - self._started,
        )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
