"""The trainer side of a weight sync: plan once, fill registered buckets, drive every engine to the next version.

The trainer hands over Hugging Face-named tensors; the plan of each rank (read out of the engine's own loader) says
which of their elements go where, so a bucket holds the rank's fused and sharded parameters byte for byte and the rank
reads it straight into place. The engines move together: none resumes before every rank of all of them has proved the
new version. `receiver.py` is the other side; engines are steered through `control.EngineControl`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from sglang.srt.ray.weight_sync.buckets import Published, RankBuckets, bucket_device
from sglang.srt.ray.weight_sync.control import PAUSE_MODES, EngineControl, OpenRequest, PauseMode
from sglang.srt.ray.weight_sync.coverage import check_coverage, check_declared
from sglang.srt.ray.weight_sync.fleet import (
    RankAddress,
    abort_everywhere,
    on_every_engine,
    on_every_rank,
)
from sglang.srt.ray.weight_sync.lane_meter import measured_lanes
from sglang.srt.ray.weight_sync.lanes import Lane
from sglang.srt.ray.weight_sync.layout import TensorSpec, WeightLayout, fingerprint_of, repeated
from sglang.srt.ray.weight_sync.ledger import PullReport
from sglang.srt.ray.weight_sync.report import PhaseClock, SyncReport, split_phases
from sglang.srt.ray.weight_sync.shards import ShardPlan

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 60.0
STAGINGS = ("direct", "shadow")
DEFAULT_BUCKET_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""By where the buckets live: each ref costs 1-3 ms on both sides, in which a GPU moves a gigabyte."""
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
_ANSWER_MARGIN_S = 2.0
"""How much longer we wait for a rank than it was told to: its own error says more than a timeout here."""


@dataclasses.dataclass(kw_only=True)
class _Rank:
    """One receiving rank: where it is, what it holds, and (once planned) the buckets that feed it."""

    address: RankAddress
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

    def __init__(
        self,
        engines: Sequence[EngineControl],
        ranks: Sequence[_Rank],
        *,
        owner: str,
        bucket_bytes: int | None,
        deadline_s: float,
        ttl_s: float,
        sequence: int,
        lanes: Sequence[Lane],
    ) -> None:
        """Use `connect`."""
        self.lanes = tuple(lanes)
        self._engines = list(engines)
        self._ranks = list(ranks)
        self.owner = owner
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._ttl_s = ttl_s
        self._sequence = sequence
        self._planned: tuple[str, bool, torch.device] | None = None

    @classmethod
    def connect(
        cls,
        engines: Sequence[EngineControl],
        *,
        owner: str | None = None,
        bucket_bytes: int | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        ttl_s: float | None = None,
        lane_floor_gigabytes_per_second: float | None = None,
    ) -> WeightPublisher:
        """Learn what every rank of every engine holds and have it pin its parameters.

        Args:
            engines: at least one; their order is kept in reports.
            owner: what engines tell others who find them busy; host, process and a random part when None.
            bucket_bytes: the most that travels in one go; a larger parameter is split. When None, 256 MiB on a CPU
                and 2 GiB on a GPU.
            deadline_s: for each wait on an engine or rank, in seconds.
            ttl_s: an engine gives a transaction up this many seconds after it began; 4 deadlines when None.
            lane_floor_gigabytes_per_second: what the path to each rank must give. When None, a share of what two
                processes reach for GPU memory on one host, and no floor elsewhere. `lanes` says what was found.

        Raises:
            ValueError: no engine, or two of one name.
            SlowLaneError: a path is slower than its floor, naming the lane and what degrades it.
            WeightSyncError: an engine can't take part, with its name and rank.
        """
        if not engines:
            raise ValueError("connect() needs at least one engine")
        names = [engine.name for engine in engines]
        if len(set(names)) != len(names):
            raise ValueError(f"engines must have different names, got {names!r}")
        states = on_every_engine(
            engines, "connect", lambda engine: engine.status(timeout_s=deadline_s)
        )
        addresses = [
            RankAddress(engine=engine, rank=rank, actor=actor)
            for engine in engines
            for rank, actor in enumerate(engine.actors)
        ]
        nothing: list[tuple[Any, ...]] = [()] * len(addresses)
        layouts = on_every_rank(
            addresses, "weight_layout", nothing, timeout_s=deadline_s, phase="connect"
        )
        registered = on_every_rank(
            addresses, "register_weight_for_rdt", nothing, timeout_s=deadline_s, phase="connect"
        )
        for address, answer in zip(addresses, registered, strict=True):
            for what in answer["not_reached"]:
                logger.warning(
                    "%s rank %d: no sync reaches %s", address.engine.name, address.rank, what
                )
        lanes = measured_lanes(
            addresses, floor=lane_floor_gigabytes_per_second, timeout_s=deadline_s
        )
        for lane in lanes:
            for warning in lane.warnings:
                logger.warning("%s rank %d: %s", lane.engine, lane.rank, warning)
            lane.check()
        return cls(
            engines,
            [
                _Rank(address=address, layout=layout)
                for address, layout in zip(addresses, layouts, strict=True)
            ],
            owner=owner or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}",
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            ttl_s=ttl_s or 4 * deadline_s,
            sequence=max(int(state["last_sequence"]) for state in states),
            lanes=lanes,
        )

    def sync(
        self,
        named_tensors: NamedTensors,
        *,
        version: str,
        staging: str = "direct",
        pause: PauseMode = "retract",
        partial: Sequence[str] | None = None,
        force: bool = False,
        shadow_bytes: int | None = None,
    ) -> SyncReport:
        """Bring every engine to these weights and label them `version`: all of them, or none serves it.

        Args:
            named_tensors: weights under their Hugging Face names, any dtype (converted as the loader would),
                contiguous or not.
            version: what the engines report as `weight_version` afterwards; of two numbers the smaller is refused.
            staging: `direct` pulls into live parameters while generation is paused; `shadow` into a second buffer of
                each rank while generation goes on, and pauses for one copy.
            pause: `retract` and `in_place` end no request (`in_place` also keeps what running ones have computed),
                `abort` ends all.
            partial: patterns (as in `fnmatch`) of the names that this sync is meant to send, when not all.
            force: take over from another owner whose transaction is open.
            shadow_bytes: with `shadow`, the most that a rank may hold a second time, in whole buckets
                (`connect(bucket_bytes=)`); the rest is pulled during the pause. No limit when None.

        Raises:
            ValueError: an unknown staging or pause mode, or names given twice.
            WeightNameError: tensors that map to nothing, parameters that nobody sends, buffers that carry state.
            WeightSyncError: any other failure, naming engine, rank, tensor and phase. Engines whose weights were not
                touched serve their old version; the others are TORN and serve nothing until a sync succeeds.
        """
        if staging not in STAGINGS:
            raise ValueError(f"staging={staging!r} is unknown; choose one of {STAGINGS!r}")
        if shadow_bytes is not None and (staging != "shadow" or shadow_bytes <= 0):
            raise ValueError(
                f"shadow_bytes={shadow_bytes!r} with staging={staging!r}: give a positive number, with 'shadow' only"
            )
        if pause not in PAUSE_MODES:
            raise ValueError(f"pause={pause!r} is unknown; choose one of {PAUSE_MODES!r}")
        clock = PhaseClock()
        sources = _as_dict(named_tensors)
        with clock.measure("plan"):
            check_declared(list(sources), partial)
            self._plan(sources, partial=partial is not None)
        with clock.measure("stage"):
            for buckets in self._distinct_buckets():
                buckets.fill(list(sources.values()))
            published = [rank.buckets.publish() for rank in self._ranks if rank.buckets is not None]
        self._sequence += 1
        request = OpenRequest(
            transaction=uuid.uuid4().hex,
            sequence=self._sequence,
            owner=self.owner,
            version=version,
            pause=pause,
            ttl_s=self._ttl_s,
            force=force,
            partial=partial is not None,
        )
        early: Sequence[Published | None] = [None] * len(published)
        if staging == "shadow":
            parts = [each.split(shadow_bytes) for each in published]
            early, published = [first for first, _ in parts], [rest for _, rest in parts]
            if not all(first.refs for first, _ in parts):
                smallest = max(rest.sizes[0] for first, rest in parts if not first.refs)
                raise ValueError(
                    f"shadow_bytes={shadow_bytes!r} is less than a rank's first bucket of {smallest} bytes; give more, "
                    f"or connect with smaller bucket_bytes"
                )
        reports = self._drive(request, early, published, clock)
        return SyncReport(
            version=version,
            staging=staging,
            pause_mode=pause,
            partial=partial is not None,
            verified=all(report.verified for each in reports.values() for report in each),
            phase_seconds=clock.seconds,
            ranks=reports,
        )

    def status(self) -> dict[str, Mapping[str, Any]]:
        """What each engine says of itself (`GET /weight_sync`), by engine name."""
        answers = on_every_engine(
            self._engines, "status", lambda engine: engine.status(timeout_s=self._deadline_s)
        )
        return {engine.name: answer for engine, answer in zip(self._engines, answers, strict=True)}

    def release_shadow(self) -> int:
        """Have every rank give back the buffer that `shadow` staging keeps for the next sync; returns their bytes."""
        addresses = [rank.address for rank in self._ranks]
        nothing: list[tuple[Any, ...]] = [()] * len(addresses)
        freed: list[int] = on_every_rank(
            addresses, "release_shadow", nothing, timeout_s=self._deadline_s, phase="release"
        )
        return sum(freed)

    def close(self) -> None:
        """Let go of the buckets and their registrations. The engines are left as they are."""
        for buckets in self._distinct_buckets():
            buckets.release()
        for rank in self._ranks:
            rank.buckets = None
        self._planned = None

    # Async twins: the same calls on a worker thread, for trainers that run an event loop.

    @classmethod
    async def connect_async(
        cls, engines: Sequence[EngineControl], **options: Any
    ) -> WeightPublisher:
        return await asyncio.to_thread(cls.connect, engines, **options)

    async def sync_async(self, named_tensors: NamedTensors, **options: Any) -> SyncReport:
        return await asyncio.to_thread(self.sync, named_tensors, **options)

    async def status_async(self) -> dict[str, Mapping[str, Any]]:
        return await asyncio.to_thread(self.status)

    async def close_async(self) -> None:
        await asyncio.to_thread(self.close)

    # Planning

    def _plan(self, sources: Mapping[str, torch.Tensor], *, partial: bool) -> None:
        manifest = tuple(TensorSpec.of(name, tensor) for name, tensor in sources.items())
        device = bucket_device([tensor.device for tensor in sources.values()])
        wanted = (fingerprint_of(manifest), partial, device)
        if wanted == self._planned:
            return
        self.close()
        addresses = [rank.address for rank in self._ranks]
        plans: list[ShardPlan] = on_every_rank(
            addresses,
            "plan_weights",
            [(manifest,)] * len(addresses),
            timeout_s=self._deadline_s,
            phase="plan",
        )
        by_engine: dict[str, list[ShardPlan]] = {}
        for address, plan in zip(addresses, plans, strict=True):
            by_engine.setdefault(address.engine.name, []).append(plan)
        check_coverage(by_engine, sources, partial=partial)
        for rank, plan in zip(self._ranks, plans, strict=True):
            rank.buckets = self._shared_buckets(rank.layout, plan, device)
        self._planned = wanted

    def _shared_buckets(
        self, layout: WeightLayout, plan: ShardPlan, device: torch.device
    ) -> RankBuckets:
        """Ranks that hold the same elements (replicas, other engines) read the same buckets."""
        for rank in self._ranks:
            if rank.buckets is not None and rank.buckets.serves(layout, plan):
                return rank.buckets
        bucket_bytes = (
            self._bucket_bytes or DEFAULT_BUCKET_BYTES["cpu" if device.type == "cpu" else "cuda"]
        )
        return RankBuckets(layout=layout, plan=plan, bucket_bytes=bucket_bytes, device=device)

    def _distinct_buckets(self) -> list[RankBuckets]:
        return list(
            {
                id(rank.buckets): rank.buckets for rank in self._ranks if rank.buckets is not None
            }.values()
        )

    # Driving the engines

    def _drive(
        self,
        request: OpenRequest,
        early: Sequence[Published | None],
        published: Sequence[Published],
        clock: PhaseClock,
    ) -> dict[str, tuple[PullReport, ...]]:
        timeout = self._deadline_s
        alone = len(self._engines) == 1
        try:
            if any(early):
                with clock.measure("prefetch"):
                    self._stage(request.transaction, early)
            with clock.measure("control"):
                on_every_engine(
                    self._engines, "begin", lambda engine: engine.open(request, timeout_s=timeout)
                )
                reports = self._commit(request.transaction, published, after_staged=any(early))
                states = on_every_engine(
                    self._engines,
                    "seal",
                    lambda engine: engine.seal(
                        request.transaction, resume=alone, timeout_s=timeout
                    ),
                )
        except BaseException as error:
            abort_everywhere(self._engines, request.transaction, error, timeout_s=timeout)
            raise
        if not alone:
            # Decided: every rank has proved the version. An engine that fails to resume serves nothing.
            with clock.measure("resume"):
                on_every_engine(
                    self._engines,
                    "resume",
                    lambda engine: engine.resume(request.transaction, timeout_s=timeout),
                )
        split_phases(clock, states, reports)
        return reports

    def _stage(self, transaction: str, early: Sequence[Published | None]) -> None:
        """Every rank fills its shadow buffer; no engine knows of the transaction yet."""
        arguments = [
            (transaction, rank.layout.fingerprint, sent.refs, sent.pieces, sent.digests)
            for rank, sent in zip(self._ranks, early, strict=True)
            if sent is not None
        ]
        on_every_rank(
            [rank.address for rank in self._ranks],
            "stage_weights",
            [(*each, self._deadline_s) for each in arguments],
            timeout_s=self._deadline_s + _ANSWER_MARGIN_S,
            phase="prefetch",
        )

    def _commit(
        self, transaction: str, published: Sequence[Published], *, after_staged: bool = False
    ) -> dict[str, tuple[PullReport, ...]]:
        addresses = [rank.address for rank in self._ranks]
        arguments = [
            (
                transaction,
                rank.layout.fingerprint,
                sent.refs,
                sent.pieces,
                sent.digests,
                self._deadline_s,
                after_staged,
            )
            for rank, sent in zip(self._ranks, published, strict=True)
        ]
        answers: list[PullReport] = on_every_rank(
            addresses,
            "commit_weights",
            arguments,
            timeout_s=self._deadline_s + _ANSWER_MARGIN_S,
            phase="wire",
        )
        reports: dict[str, tuple[PullReport, ...]] = {}
        for address, report in zip(addresses, answers, strict=True):
            reports[address.engine.name] = (*reports.get(address.engine.name, ()), report)
        return reports


def _as_dict(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    sources = dict(pairs)
    if len(sources) != len(pairs):
        twice = repeated(name for name, _ in pairs)
        raise ValueError(f"tensor name(s) given more than once: {twice!r}")
    if not sources:
        raise ValueError("there is nothing to sync: no tensors were given")
    return {name: tensor.detach() for name, tensor in sources.items()}
