"""The trainer side of a weight sync: plan once, fill registered buckets, drive every engine to the next version.

The trainer hands over Hugging Face-named tensors; the plan of each rank (read out of the engine's own loader) says
which of their elements go where, so a bucket holds the rank's fused and sharded parameters byte for byte and the rank
reads it straight into place. `receiver.py` is the other side; engines are steered through `control.EngineControl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch

from sglang.srt.ray.weight_sync.buckets import RankBuckets
from sglang.srt.ray.weight_sync.control import PAUSE_MODES, EngineControl, PauseMode
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    WeightNameError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.layout import TensorSpec, WeightLayout, fingerprint_of
from sglang.srt.ray.weight_sync.receiver import PullReport
from sglang.srt.ray.weight_sync.report import SyncReport
from sglang.srt.ray.weight_sync.shards import ShardPlan

DEFAULT_DEADLINE_S = 60.0
DEFAULT_BUCKET_BYTES = 256 << 20
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclasses.dataclass(kw_only=True)
class _Rank:
    """One receiving rank: where it is, what it holds, and (once planned) the buckets that feed it."""

    engine: EngineControl
    rank: int
    actor: Any
    layout: WeightLayout
    buckets: RankBuckets | None = None


class WeightPublisher:
    """Publishes a trainer's weights to a fleet of engines. Not thread-safe: one sync at a time.

    ```python
    publisher = WeightPublisher.connect([HttpEngineControl(url, actors)])
    report = publisher.sync(model.state_dict(), version="7")
    ```
    Lives in the trainer's own process, a Ray actor made with `enable_tensor_transport=True` (or a driver).
    """

    def __init__(self, ranks: Sequence[_Rank], *, bucket_bytes: int, deadline_s: float) -> None:
        self._ranks = list(ranks)
        self._engines = list({id(rank.engine): rank.engine for rank in ranks}.values())
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._planned: str | None = None

    @classmethod
    def connect(
        cls,
        engines: Sequence[EngineControl],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> WeightPublisher:
        """Learn what every rank of every engine holds and have it pin its parameters.

        Args:
            engines: at least one; their order is kept in reports.
            bucket_bytes: the most that one registered bucket holds (a bigger tensor has its own).
            deadline_s: for each wait on an engine or rank, in seconds.

        Raises:
            ValueError: no engine, or two of one name.
            WeightSyncError: an engine can't take part, with its name and rank.
        """
        if not engines:
            raise ValueError("connect() needs at least one engine")
        names = [engine.name for engine in engines]
        if len(set(names)) != len(names):
            raise ValueError(f"engines must have different names, got {names!r}")
        ranks = []
        for engine in engines:
            handles = list(engine.actors)
            layouts = _ask(
                engine,
                "weight_layout",
                [(actor, ()) for actor in handles],
                deadline_s,
                phase="connect",
            )
            _ask(
                engine,
                "register_weight_for_rdt",
                [(actor, ()) for actor in handles],
                deadline_s,
                phase="connect",
            )
            ranks += [
                _Rank(engine=engine, rank=index, actor=actor, layout=layout)
                for index, (actor, layout) in enumerate(zip(handles, layouts, strict=True))
            ]
        return cls(ranks, bucket_bytes=bucket_bytes, deadline_s=deadline_s)

    def sync(
        self,
        named_tensors: NamedTensors,
        *,
        version: str,
        staging: str = "direct",
        pause: PauseMode = "retract",
    ) -> SyncReport:
        """Bring every engine to these weights and label them `version`.

        Args:
            named_tensors: all weights under their Hugging Face names, any dtype (converted as the loader
                would), contiguous or not.
            version: what the engines report as `weight_version` afterwards.
            staging: `direct` pulls into live parameters while generation is paused.
            pause: `retract` and `in_place` end no request, `abort` ends all.

        Raises:
            ValueError: an unknown staging or pause mode, or names given twice.
            WeightNameError: tensors that map to nothing, or parameters that nobody sends.
            WeightSyncError: any other failure, naming engine, rank, tensor and phase. Generation stays paused when
                bytes may have landed: nothing half-new is served.
        """
        if staging != "direct":
            raise ValueError(f"staging={staging!r} is unknown; this release has 'direct'")
        if pause not in PAUSE_MODES:
            raise ValueError(f"pause={pause!r} is unknown; choose one of {PAUSE_MODES!r}")
        phases = _PhaseClock()
        sources = _as_dict(named_tensors)
        with phases.measure("plan"):
            self._plan(sources)
        with phases.measure("stage"):
            for buckets in self._distinct_buckets():
                buckets.fill(list(sources.values()))
            sent = [
                (rank, rank.buckets.publish()) for rank in self._ranks if rank.buckets is not None
            ]
        reports = self._switch(sent, version, pause, phases)
        return SyncReport(
            version=version,
            staging=staging,
            pause_mode=pause,
            verified=all(report.verified for each in reports.values() for report in each),
            phase_seconds=phases.seconds,
            ranks=reports,
        )

    def close(self) -> None:
        """Let go of the buckets and their registrations. The engines are left as they are."""
        for buckets in self._distinct_buckets():
            buckets.release()
        for rank in self._ranks:
            rank.buckets = None
        self._planned = None

    # Planning

    def _plan(self, sources: Mapping[str, torch.Tensor]) -> None:
        manifest = tuple(TensorSpec.of(name, tensor) for name, tensor in sources.items())
        fingerprint = fingerprint_of(manifest)
        if fingerprint == self._planned:
            return
        self.close()
        for engine in self._engines:
            ranks = [rank for rank in self._ranks if rank.engine is engine]
            plans = _ask(
                engine,
                "plan_weights",
                [(rank.actor, (manifest,)) for rank in ranks],
                self._deadline_s,
                phase="plan",
            )
            for rank, plan in zip(ranks, plans, strict=True):
                _check_complete(plan, engine.name, rank.rank)
                rank.buckets = self._shared_buckets(rank.layout, plan)
        self._check_nothing_lost(manifest)
        self._planned = fingerprint

    def _shared_buckets(self, layout: WeightLayout, plan: ShardPlan) -> RankBuckets:
        """Ranks that hold the same elements (replicas, other engines) read the same buckets."""
        for rank in self._ranks:
            if rank.buckets is not None and rank.buckets.serves(layout, plan):
                return rank.buckets
        return RankBuckets(layout=layout, plan=plan, bucket_bytes=self._bucket_bytes)

    def _check_nothing_lost(self, manifest: Sequence[TensorSpec]) -> None:
        unused = {spec.name for spec in manifest}
        for buckets in self._distinct_buckets():
            unused &= set(buckets.plan.unused_sources)
        if unused:
            self.close()
            raise WeightNameError(
                f"no rank of any engine takes anything from these tensors: {sorted(unused)!r}; "
                f"leave them out or correct their names",
                phase="plan",
            )

    def _distinct_buckets(self) -> list[RankBuckets]:
        return list(
            {
                id(rank.buckets): rank.buckets for rank in self._ranks if rank.buckets is not None
            }.values()
        )

    # Driving the engines

    def _switch(
        self, sent: Sequence[tuple[_Rank, Any]], version: str, pause: PauseMode, phases: _PhaseClock
    ) -> dict[str, tuple[PullReport, ...]]:
        timeout = self._deadline_s
        with phases.measure("pause"):
            self._each_engine("pause", lambda engine: engine.pause(pause, timeout_s=timeout))
        with phases.measure("begin"):
            self._each_engine("begin", lambda engine: engine.begin(timeout_s=timeout))
        with phases.measure("control"):
            reports = self._commit(sent)
        slowest_wire = max(report.wire_seconds for each in reports.values() for report in each)
        slowest_verify = max(report.verify_seconds for each in reports.values() for report in each)
        phases.split("control", wire=slowest_wire, verify=slowest_verify)
        with phases.measure("end"):
            self._each_engine("end", lambda engine: engine.end(timeout_s=timeout))
        with phases.measure("flush"):
            if pause != "in_place":
                self._each_engine("flush", lambda engine: engine.flush(timeout_s=timeout))
        with phases.measure("version"):
            self._each_engine(
                "version", lambda engine: engine.set_version(version, timeout_s=timeout)
            )
        with phases.measure("resume"):
            self._each_engine("resume", lambda engine: engine.resume(timeout_s=timeout))
        return reports

    def _each_engine(self, phase: str, call: Any) -> None:
        for engine in self._engines:
            try:
                call(engine)
            except WeightSyncError as error:
                error.engine, error.phase = engine.name, phase
                raise

    def _commit(self, sent: Sequence[tuple[_Rank, Any]]) -> dict[str, tuple[PullReport, ...]]:
        reports: dict[str, tuple[PullReport, ...]] = {}
        for engine in self._engines:
            calls = [
                (rank.actor, (published.refs, published.names, published.digests, self._deadline_s))
                for rank, published in sent
                if rank.engine is engine
            ]
            reports[engine.name] = tuple(
                _ask(engine, "commit_weights", calls, self._deadline_s, phase="wire")
            )
        return reports


class _PhaseClock:
    """Seconds by phase, in the order in which they were measured."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def split(self, phase: str, **parts: float) -> None:
        """Take `parts` out of a measured phase."""
        self.seconds[phase] = max(self.seconds[phase] - sum(parts.values()), 0.0)
        self.seconds |= parts


def _as_dict(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    sources = dict(pairs)
    if len(sources) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"tensor name(s) given more than once: {sorted({n for n in names if names.count(n) > 1})!r}"
        )
    if not sources:
        raise ValueError("there is nothing to sync: no tensors were given")
    return {name: tensor.detach() for name, tensor in sources.items()}


def _check_complete(plan: ShardPlan, engine: str, rank: int) -> None:
    if plan.missing_targets:
        raise WeightNameError(
            f"nobody sends (all of) these parameters: {list(plan.missing_targets)!r}",
            engine=engine,
            rank=rank,
            phase="plan",
        )
    if plan.computed_targets:
        raise WeightNameError(
            f"the loader computes (or pads) these parameters instead of copying them, so bytes can't be sent for "
            f"them; are the shapes right that were sent? {list(plan.computed_targets)!r}",
            engine=engine,
            rank=rank,
            phase="plan",
        )


def _ask(
    engine: EngineControl,
    verb: str,
    calls: Sequence[tuple[Any, tuple[Any, ...]]],
    timeout_s: float,
    *,
    phase: str,
) -> list[Any]:
    """Call one verb on several ranks at once and wait for all of them.

    Raises:
        DeadlineExceededError: naming the ranks that did not answer.
        WeightSyncError: the first failing rank's, with engine and rank filled in.
    """
    refs = [getattr(actor, verb).remote(*arguments) for actor, arguments in calls]
    _, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answers = []
    for rank, ref in enumerate(refs):
        if ref in late:
            continue
        try:
            answers.append(ray.get(ref))
        except WeightSyncError as error:
            cause = getattr(error, "cause", error)
            cause.engine, cause.rank, cause.phase = engine.name, rank, cause.phase or phase
            raise cause from error
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"{verb} failed: {error}", engine=engine.name, rank=rank, phase=phase
            ) from error
    if late:
        raise DeadlineExceededError(
            f"{verb}: rank(s) {[rank for rank, ref in enumerate(refs) if ref in late]!r} did not answer "
            f"within {timeout_s:g} s",
            engine=engine.name,
            phase=phase,
        )
    return answers
