"""The verbs that a SchedulerActor gains: thin, each one calls `weight_sync.receiver`.

Mixed into upstream's actor class by a patch, because `@ray.remote` wraps it where it is defined. They run in
concurrency groups of their own, so none of them ever waits behind the event loop; without
`--enable-rdt-weight-sync` they refuse.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from sglang.srt.distributed.rank_parallelism import RankParallelismConfig
from sglang.srt.entrypoints.engine_info_server import RankKey
from sglang.srt.ray.message_queues import unlink_message_queues
from sglang.srt.ray.rank_requests import stages_of
from sglang.srt.ray.rank_state import rank_state
from sglang.srt.ray.weight_lending import send_weights
from sglang.srt.ray.weight_sessions import BOOK, note_loaded
from sglang.srt.ray.weight_sync.errors import WeightSyncDisabledError
from sglang.srt.ray.weight_sync.lanes import HostLoopback, Surroundings
from sglang.srt.ray.weight_sync.layout import TensorPiece, TensorSpec, WeightLayout
from sglang.srt.ray.weight_sync.ledger import PullReport, RankStatus
from sglang.srt.ray.weight_sync.loader import LoadedRef, look
from sglang.srt.ray.weight_sync.manifest import WeightManifest
from sglang.srt.ray.weight_sync.receiver import DEFAULT_PULL_DEADLINE_S, WeightReceiver
from sglang.srt.ray.weight_sync.shards import ShardPlan

# Ray takes both of these on the decorator only: `.options()` refuses concurrency groups, and with
# `.options(enable_tensor_transport=True)` the transport's own group is missing (ray 2.60, actor.py).
SCHEDULER_ACTOR_OPTIONS: dict[str, Any] = {
    "enable_tensor_transport": True,
    "concurrency_groups": {"event_loop": 1, "control": 4, "weights": 1},
}


def bind_rank_device(gpu_id: int) -> None:
    """Make this thread use the rank's device. CUDA's current device belongs to the thread; a CPU has none."""
    import torch

    from sglang.srt.runtime_context import get_device

    if get_device().device != "cpu":
        torch.get_device_module().set_device(gpu_id)


class SchedulerActorVerbs:
    """What a trainer calls on a rank. Every method may be called at any time, from any job of the cluster."""

    scheduler: Any
    _tp_rank: int
    _pp_rank: int
    _receiver_lock = threading.Lock()
    _receiver: WeightReceiver | None = None

    @ray.method(concurrency_group="control")
    def rank_registration(self) -> tuple[RankKey, RankParallelismConfig]:
        """Which rank this is, and where it stands: what the host serves at `/parallelism_config`."""
        from sglang.srt.entrypoints.rank_registration import this_rank

        return this_rank(), RankParallelismConfig.of_this_process()

    @ray.method(concurrency_group="control")
    def unlink_message_queues(self) -> list[str]:
        """Called once all ranks are ready, so that a killed rank leaves no shared memory; see `message_queues.py`."""
        return unlink_message_queues()

    @ray.method(concurrency_group="control")
    def engine_state(self) -> dict[str, Any]:
        """Whether this rank is paused or asleep, and how many requests it has; see `rank_state.py`."""
        return rank_state(self.scheduler)

    @ray.method(concurrency_group="control")
    def request_stages(self, ids: Sequence[str]) -> dict[str, str]:
        """Which of these requests this rank holds: id -> `queued` or `running`; see `rank_requests.py`."""
        return stages_of(self.scheduler, ids)

    @ray.method(concurrency_group="control")
    def weight_layout(self) -> WeightLayout:
        """Names, shapes and dtypes of this rank's parameters (`.entries`), and their `.fingerprint`."""
        return self._weight_receiver().layout()

    @ray.method(concurrency_group="control")
    def plan_weights(self, manifest: Sequence[TensorSpec]) -> ShardPlan:
        """Which elements of these Hugging Face tensors each parameter of this rank takes."""
        return self._weight_receiver().plan(manifest)

    @ray.method(concurrency_group="weights")
    def register_weight_for_rdt(self) -> dict[str, Any]:
        """Pin every parameter with NIXL, once. With the memory saver on it does nothing and says why.

        Returns:
            `{"registered": True, "tensors": n, "regions": n}` or `{"registered": False, "reason": text}`.
        """
        return self._weight_receiver().register()

    @ray.method(concurrency_group="weights")
    def pull_weights(self, refs: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        """Pull tensors straight into the parameters called `names`, unverified.

        Args:
            refs: RDT refs in a list (so that Ray hands them over unresolved), each to a list of contiguous tensors.
            names: parameter names over all refs, in order; any subset of the layout's.

        Returns:
            `{"bytes": n, "seconds": s}`.

        Raises:
            SessionNotOpenError, GenerationNotPausedError, WeightNameError, WeightMismatchError: nothing was written.
            DeadlineExceededError, TransferError: the named parameters must be taken as torn.
        """
        report = self._weight_receiver().pull(refs, names)
        return {"bytes": report.total_bytes, "seconds": report.wire_seconds}

    @ray.method(concurrency_group="weights")
    def commit_weights(
        self,
        transaction: str,
        layout_fingerprint: str,
        refs: Sequence[Any],
        pieces: Sequence[TensorPiece],
        digests: Mapping[str, str],
        deadline_s: float = DEFAULT_PULL_DEADLINE_S,
        after_staged: bool = False,
    ) -> PullReport:
        """What a `WeightPublisher` calls: pull as `pull_weights` does, and compare every tensor's digest.

        With `after_staged`, what `stage_weights` left for this transaction is copied into the parameters first.
        Repeating it with the same transaction returns the same report, or raises the same error, again.
        """
        return self._weight_receiver().pull(
            refs,
            pieces,
            transaction=transaction,
            layout_fingerprint=layout_fingerprint,
            digests=digests,
            deadline_s=deadline_s,
            after_staged=after_staged,
        )

    @ray.method(concurrency_group="control")
    def describe_object_refs(self, refs: Sequence[Any], deadline_s: float) -> WeightManifest:
        """What a ref (in a list) holds: fetched, described, and let go of. Generation goes on."""
        self._weight_receiver()  # refuses without weight sync
        (ref,) = refs
        return look(ref, timeout_s=deadline_s, rank=self._rank)

    @ray.method(concurrency_group="control")
    def plan_load(self, manifest: Sequence[TensorSpec]) -> ShardPlan:
        """What of these Hugging Face tensors this rank's loader takes, copied or computed."""
        return self._weight_receiver().plan_load(manifest)

    @ray.method(concurrency_group="weights")
    def update_weights_from_object_ref(
        self,
        refs: Sequence[Any],
        transaction: str | None = None,
        index: int = 0,
        expected: WeightManifest | None = None,
        deadline_s: float = DEFAULT_PULL_DEADLINE_S,
    ) -> LoadedRef:
        """Load the named tensors of one ref through the engine's own loader.

        `load_object_refs` calls it on every rank in its transaction. A client's own session may call it too, between
        begin and end, paused; it then has to reach every rank, and ends unverified.

        Args:
            refs: one ref in a list (so that Ray hands it over unresolved) to `{hf_name: tensor}` or pairs of them.
        """
        updater = self.scheduler.weight_updater
        loaded = self._weight_receiver().load(
            refs,
            load=self.scheduler.tp_worker.model_runner.weight_updater.load_weights_from_distributed,
            transaction=transaction,
            index=index,
            expected=expected,
            deadline_s=deadline_s,
        )
        note_loaded(updater)
        return loaded

    @ray.method(concurrency_group="weights")
    def finish_load(self, transaction: str, verified: bool) -> PullReport:
        """Called by `load_object_refs` when every ref was loaded on every rank."""
        return self._weight_receiver().finish_load(transaction, verified=verified)

    @ray.method(concurrency_group="weights")
    def stage_weights(
        self,
        transaction: str,
        layout_fingerprint: str,
        refs: Sequence[Any],
        pieces: Sequence[TensorPiece],
        digests: Mapping[str, str],
        deadline_s: float = DEFAULT_PULL_DEADLINE_S,
    ) -> PullReport:
        """Pull into the shadow buffer and compare every digest there, while generation goes on.

        No parameter is touched, whatever happens. Repeating it returns the same report, or raises the same error.
        """
        return self._weight_receiver().stage(
            refs,
            pieces,
            transaction=transaction,
            layout_fingerprint=layout_fingerprint,
            digests=digests,
            deadline_s=deadline_s,
        )

    @ray.method(concurrency_group="weights")
    def release_shadow(self) -> int:
        """Give the shadow buffer's memory back; returns how many bytes it was."""
        return self._weight_receiver().release_shadow()

    @ray.method(concurrency_group="weights")
    def send_weights_to(self, receiver: Any, transaction: str, deadline_s: float) -> PullReport:
        """Have another engine's same rank pull this rank's live weights, verified; see `weight_lending.py`."""
        self._weight_receiver()  # refuses without weight sync
        return send_weights(
            self.scheduler, receiver, transaction=transaction, deadline_s=deadline_s
        )

    @ray.method(concurrency_group="weights")
    def verify_weights(self, digests: Mapping[str, str]) -> None:
        """Compare parameters with a client's manifest: name -> digest, as `weight_sync.digest` computes it.

        Raises:
            DigestMismatchError: naming the tensor and both digests; `end_weight_update` then reports the engine TORN.
        """
        self._weight_receiver().verify(digests)

    @ray.method(concurrency_group="control")
    def lane_surroundings(self) -> Surroundings:
        """Host, device and environment of this rank, as far as lanes go."""
        return self._weight_receiver().lane_meter.surroundings()

    @ray.method(concurrency_group="control")
    def lane_loopback(self, timeout_s: float, source_device: str) -> HostLoopback:
        """What this host gives between two throw-away processes of its own; measured once."""
        return self._weight_receiver().lane_meter.loopback(timeout_s, source_device)

    @ray.method(concurrency_group="weights")
    def measure_lane(self, refs: Sequence[Any], timeout_s: float) -> float:
        """GB/s of reading a publisher's probe buffers; no parameter is touched and generation goes on."""
        return self._weight_receiver().lane_meter.measure(refs, timeout_s)

    @ray.method(concurrency_group="control")
    def weight_status(self) -> RankStatus:
        """What happened to this rank's weights. Answers while a pull runs."""
        return self._weight_receiver().status()

    @ray.method(concurrency_group="control")
    def admit_transaction(self, transaction: str | None) -> None:
        """Called by the engine's fence: whose pulls may start from now on."""
        self._weight_receiver().admit(transaction)

    @ray.method(concurrency_group="control")
    def isolate_prefix_cache(self, namespace: str) -> None:
        """Make cached prefixes unreachable for requests that have not started; generation must be paused."""
        self._weight_receiver().isolate_prefix_cache(namespace)

    @property
    def _rank(self) -> int:
        from sglang.srt.runtime_context import get_parallel

        return self._pp_rank * int(get_parallel().tp_size) + self._tp_rank

    def _weight_receiver(self) -> WeightReceiver:
        from sglang.srt.runtime_context import get_device, get_exec

        bind_rank_device(get_device().gpu_id)
        with self._receiver_lock:
            if self._receiver is None:
                if not get_device().enable_rdt_weight_sync:
                    raise WeightSyncDisabledError(
                        "this engine was started without weight sync; start it with --enable-rdt-weight-sync "
                        "(ServerArgs(enable_rdt_weight_sync=True))"
                    )
                self._receiver = WeightReceiver(
                    self.scheduler,
                    rank=self._rank,
                    pins_allowed=not get_exec().features.enable_memory_saver,
                    sessions=BOOK,
                )
            return self._receiver
