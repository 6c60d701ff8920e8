"""Bring engines to a version through their own loaders, out of refs: `update_weights_from_object_ref`.

For targets that are computed rather than copied, and for trainers that hold refs and no `WeightPublisher`. It is the
publisher's transaction with another middle: every rank fetches each ref and runs its loader, one ref after the other,
so an engine needs room for one ref and no plan. Nothing here goes over HTTP but control; refs travel by actor call.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import ray

from sglang.srt.ray.weight_sync.control import PAUSE_MODES, EngineControl, OpenRequest, PauseMode
from sglang.srt.ray.weight_sync.coverage import check_coverage, check_declared
from sglang.srt.ray.weight_sync.errors import WeightSyncError
from sglang.srt.ray.weight_sync.fleet import (
    RankAddress,
    abort_everywhere,
    on_every_engine,
    on_every_rank,
)
from sglang.srt.ray.weight_sync.ledger import PullReport
from sglang.srt.ray.weight_sync.manifest import WeightManifest
from sglang.srt.ray.weight_sync.report import PhaseClock, SyncReport, split_phases
from sglang.srt.ray.weight_sync.shards import ShardPlan

DEFAULT_DEADLINE_S = 60.0
_ANSWER_MARGIN_S = 2.0
Refs: TypeAlias = "ray.ObjectRef | Iterable[ray.ObjectRef]"


def load_object_refs(
    engines: Sequence[EngineControl],
    refs: Refs,
    *,
    version: str,
    manifest: WeightManifest | None = None,
    pause: PauseMode = "retract",
    partial: Sequence[str] | None = None,
    force: bool = False,
    deadline_s: float = DEFAULT_DEADLINE_S,
    ttl_s: float | None = None,
) -> SyncReport:
    """Bring every engine to the weights in `refs` and label them `version`: all of them, or none serves it.

    Args:
        engines: at least one, of different names.
        refs: one ref, a list, or a generator of refs, each to `{hf_name: tensor}` or pairs (name, tensor), in the
            object store or RDT. A generator is asked for the next ref when every rank has loaded the one before.
        version: what the engines report as `weight_version` afterwards.
        manifest: what all refs together hold (`WeightManifest.of` in the trainer). With it everything is checked before
            the pause and each tensor is proved by digest. Without it a list is looked at by the first rank before the
            pause, which is one more transfer; a generator is checked when it has ended. Both end unverified.
        pause, partial, force: as for `WeightPublisher.sync`.
        deadline_s: for each wait on an engine or rank, in seconds.
        ttl_s: an engine gives the transaction up after this long; 4 deadlines when None.

    Raises:
        ValueError: no engine, no refs, something that is no ref, or an unknown pause mode.
        WeightNameError: tensors that map to nothing, parameters that nobody sends, buffers that carry state.
        WeightSyncError: any other failure, naming engine, rank and phase. Engines whose weights were not touched serve
            their old version; the others are TORN.
    """
    if not engines:
        raise ValueError("there is no engine to load weights into")
    if pause not in PAUSE_MODES:
        raise ValueError(f"pause={pause!r} is unknown; choose one of {PAUSE_MODES!r}")
    load = _Load(engines, partial=partial, deadline_s=deadline_s)
    clock = PhaseClock()
    source: Sequence[ray.ObjectRef] | Iterator[ray.ObjectRef] = _as_refs(refs)
    with clock.measure("plan"):
        expected = manifest
        if expected is None and isinstance(source, list):
            expected = load.looked_at(source)
        if expected is not None:
            load.check(expected)
    states = on_every_engine(engines, "begin", lambda each: each.status(timeout_s=deadline_s))
    request = OpenRequest(
        transaction=uuid.uuid4().hex,
        sequence=max(int(state["last_sequence"]) for state in states) + 1,
        owner=f"{socket.gethostname()}:{os.getpid()}",
        version=version,
        pause=pause,
        ttl_s=ttl_s or 4 * deadline_s,
        force=force,
        partial=partial is not None,
    )
    with clock.measure("control"):
        reports, last_states = load.drive(request, source, expected, declared=manifest is not None)
    if len(engines) > 1:
        with clock.measure("resume"):
            on_every_engine(
                engines, "resume", lambda e: e.resume(request.transaction, timeout_s=deadline_s)
            )
    split_phases(clock, last_states, reports)
    return SyncReport(
        version=version,
        staging="loader",
        pause_mode=pause,
        partial=partial is not None,
        verified=all(report.verified for each in reports.values() for report in each),
        phase_seconds=clock.seconds,
        ranks=reports,
    )


class _Load:
    """One call's engines, ranks and limits."""

    def __init__(
        self,
        engines: Sequence[EngineControl],
        *,
        partial: Sequence[str] | None,
        deadline_s: float,
    ) -> None:
        self._engines = engines
        self._partial = partial
        self._deadline_s = deadline_s
        self._ranks = [
            RankAddress(engine=engine, rank=rank, actor=actor)
            for engine in engines
            for rank, actor in enumerate(engine.actors)
        ]

    def looked_at(self, refs: Sequence[ray.ObjectRef]) -> WeightManifest:
        """What the refs hold, as the first rank says that fetches them."""
        first = self._ranks[:1]
        parts = [
            on_every_rank(
                first,
                "describe_object_refs",
                [([ref], self._deadline_s)],
                timeout_s=self._deadline_s + _ANSWER_MARGIN_S,
                phase="plan",
            )[0]
            for ref in refs
        ]
        return WeightManifest.joined(parts)

    def check(self, manifest: WeightManifest) -> None:
        """Raises:
        WeightNameError: with the lists of what is lost, missing, or not sent.
        """
        check_declared([spec.name for spec in manifest.tensors], self._partial)
        plans = self._ask("plan_load", [(manifest.tensors,)] * len(self._ranks), "plan")
        by_engine: dict[str, list[ShardPlan]] = {}
        for address, plan in zip(self._ranks, plans, strict=True):
            by_engine.setdefault(address.engine.name, []).append(plan)
        check_coverage(
            by_engine,
            manifest.digests,
            partial=self._partial is not None,
            through_loader=True,
        )

    def drive(
        self,
        request: OpenRequest,
        refs: Iterable[ray.ObjectRef],
        expected: WeightManifest | None,
        *,
        declared: bool,
    ) -> tuple[dict[str, tuple[PullReport, ...]], list[Mapping[str, Any]]]:
        timeout, transaction = self._deadline_s, request.transaction
        try:
            on_every_engine(self._engines, "begin", lambda e: e.open(request, timeout_s=timeout))
            loaded = [
                self._load(transaction, index, ref, expected) for index, ref in enumerate(refs)
            ]
            self._check_sent(loaded, expected)
            reports = self._ask("finish_load", [(transaction, declared)] * len(self._ranks), "load")
            alone = len(self._engines) == 1
            states = on_every_engine(
                self._engines,
                "seal",
                lambda e: e.seal(transaction, resume=alone, timeout_s=timeout),
            )
        except BaseException as error:
            abort_everywhere(self._engines, transaction, error, timeout_s=timeout)
            raise
        by_engine: dict[str, tuple[PullReport, ...]] = {}
        for address, report in zip(self._ranks, reports, strict=True):
            name = address.engine.name
            by_engine[name] = (*by_engine.get(name, ()), report)
        return by_engine, states

    def _load(
        self, transaction: str, index: int, ref: Any, expected: WeightManifest | None
    ) -> WeightManifest:
        """One ref into every rank; returns what it held."""
        _check_ref(ref)
        arguments = ([ref], transaction, index, expected, self._deadline_s)
        loaded = self._ask("update_weights_from_object_ref", [arguments] * len(self._ranks), "load")
        return WeightManifest(tensors=loaded[0].tensors, digests=loaded[0].digests)

    def _check_sent(
        self, loaded: Sequence[WeightManifest], expected: WeightManifest | None
    ) -> None:
        """Hold what was sent against the manifest, or (for a generator without one) against the model."""
        sent = WeightManifest.joined(loaded)
        if expected is None:
            self.check(sent)
            return
        if absent := sorted(set(expected.digests) - set(sent.digests)):
            raise WeightSyncError(f"announced but not sent: {absent!r}", phase="load")

    def _ask(self, verb: str, arguments: Sequence[tuple[Any, ...]], phase: str) -> list[Any]:
        timeout = self._deadline_s + _ANSWER_MARGIN_S
        return on_every_rank(self._ranks, verb, arguments, timeout_s=timeout, phase=phase)


def _as_refs(refs: Refs) -> list[ray.ObjectRef] | Iterator[ray.ObjectRef]:
    if isinstance(refs, ray.ObjectRef):
        return [refs]
    if isinstance(refs, list | tuple):
        if not refs:
            raise ValueError("there is nothing to load: the list of refs is empty")
        for ref in refs:
            _check_ref(ref)
        return list(refs)
    if isinstance(refs, Iterator):
        return refs
    raise ValueError(
        f"refs must be an ObjectRef, a list or a generator of them, got {type(refs)!r}; put the tensors first "
        f"(ray.put), and hand refs to a remote method inside a list, or Ray resolves them on the way"
    )


def _check_ref(ref: Any) -> None:
    if not isinstance(ref, ray.ObjectRef):
        raise ValueError(f"expected an ObjectRef, got {type(ref)!r}")
