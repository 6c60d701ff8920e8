"""Weights from a trainer into live engines, verified: who does what.

`WeightPublisher` (trainer) plans with `shards`, fills `buckets` and drives every engine through
`control.EngineControl`; `receiver.WeightReceiver` (each rank) pulls into its own parameters and checks `digest`s.
Nothing here knows HTTP: that is `sglang.srt.ray.engine_control`.
"""

from sglang.srt.ray.weight_sync.control import EngineControl, OpenRequest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    EngineRequestError,
    EngineTornError,
    EngineWithoutActorsError,
    GenerationNotPausedError,
    ReadInFlightError,
    SessionNotOpenError,
    SlowLaneError,
    StaleTransactionError,
    TransactionBusyError,
    TransactionError,
    TransferError,
    UnknownTransactionError,
    UnplannableModelError,
    WeightMismatchError,
    WeightNameError,
    WeightSyncDisabledError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.layout import TensorSpec, WeightLayout
from sglang.srt.ray.weight_sync.ledger import PullReport
from sglang.srt.ray.weight_sync.loading import load_object_refs
from sglang.srt.ray.weight_sync.manifest import WeightManifest
from sglang.srt.ray.weight_sync.publisher import WeightPublisher
from sglang.srt.ray.weight_sync.report import SyncReport
from sglang.srt.ray.weight_sync.takeover import take_over

__all__ = [
    "DeadlineExceededError",
    "DigestMismatchError",
    "EngineControl",
    "EngineRequestError",
    "EngineTornError",
    "EngineWithoutActorsError",
    "GenerationNotPausedError",
    "OpenRequest",
    "PullReport",
    "ReadInFlightError",
    "SessionNotOpenError",
    "SlowLaneError",
    "StaleTransactionError",
    "SyncReport",
    "TensorSpec",
    "TransactionBusyError",
    "TransactionError",
    "TransferError",
    "UnknownTransactionError",
    "UnplannableModelError",
    "WeightLayout",
    "WeightManifest",
    "WeightMismatchError",
    "WeightNameError",
    "WeightPublisher",
    "WeightSyncDisabledError",
    "WeightSyncError",
    "load_object_refs",
    "take_over",
]
