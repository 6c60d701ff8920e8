"""The engine side of a load: take named tensors out of refs and give them to the engine's own loader, on one rank.

`receiver.py` pulls bytes that somebody placed for this rank; here the loader places (or computes) them, so it serves
every model, and each rank gets whole Hugging Face tensors. The rules are the same: only between two versions, checked
before the write, written into the ledger before the first byte.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.ray.weight_sync import transports
from sglang.srt.ray.weight_sync.digest import can_run, settle, tensor_digest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    EngineRequestError,
    TransferError,
    WeightMismatchError,
    WeightNameError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.layout import TensorSpec
from sglang.srt.ray.weight_sync.ledger import PullReport, RankLedger
from sglang.srt.ray.weight_sync.manifest import WeightManifest, named

if TYPE_CHECKING:
    import torch

Load = Callable[[list[tuple[str, "torch.Tensor"]]], tuple[bool, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRef:
    """What one ref gave to one rank."""

    tensors: tuple[TensorSpec, ...]
    digests: dict[str, str]
    total_bytes: int
    wire_seconds: float
    verify_seconds: float
    verified: bool


def look(ref: Any, *, timeout_s: float, rank: int) -> WeightManifest:
    """Fetch what a ref holds, describe it and let go of it. Nothing of the model is touched.

    Raises:
        WeightNameError, TransferError, DeadlineExceededError: it can't be had, or is no set of named tensors.
    """
    return WeightManifest.of(_fetched(ref, timeout_s=timeout_s, rank=rank))


def load_ref(
    ref: Any,
    *,
    ledger: RankLedger,
    load: Load,
    expected: WeightManifest | None,
    timeout_s: float,
    rank: int,
) -> LoadedRef:
    """Fetch, compare with what was announced, load. Called with the receiver's lock and checks behind it.

    Args:
        expected: of all that is sent; each tensor must be in it, with its shape, dtype and digest.

    Raises:
        WeightNameError, WeightMismatchError, DigestMismatchError, TransferError, DeadlineExceededError: nothing of this
            ref was written.
        EngineRequestError: the loader failed; the model is torn.
    """
    started = time.perf_counter()
    pairs = _fetched(ref, timeout_s=timeout_s, rank=rank)
    arrived_at = time.perf_counter()
    manifest = _verified(pairs, expected, rank=rank)
    verified_at = time.perf_counter()
    names = [name for name, _ in pairs]
    ledger.will_write([])  # which parameters, only the loader knows
    try:
        succeeded, message = load(pairs)
    except Exception as error:
        succeeded, message = False, f"{type(error).__name__}: {error}"
    settle(tensor for _, tensor in pairs)
    if not succeeded:
        failure = EngineRequestError(
            f"the engine's loader failed with {names[0]!r} ... {names[-1]!r}: {message}",
            rank=rank,
            phase="load",
        )
        ledger.failed(names, failure)
        raise failure
    ledger.succeeded(names)
    return LoadedRef(
        tensors=manifest.tensors,
        digests=dict(manifest.digests),
        total_bytes=sum(spec.num_bytes for spec in manifest.tensors),
        wire_seconds=arrived_at - started,
        verify_seconds=verified_at - arrived_at,
        verified=expected is not None,
    )


def report_of(loaded: Sequence[LoadedRef], *, rank: int) -> PullReport:
    """All refs of a transaction as one report."""
    return PullReport(
        rank=rank,
        total_bytes=sum(each.total_bytes for each in loaded),
        wire_seconds=sum(each.wire_seconds for each in loaded),
        verify_seconds=sum(each.verify_seconds for each in loaded),
        verified=all(each.verified for each in loaded),
    )


def _fetched(ref: Any, *, timeout_s: float, rank: int) -> list[tuple[str, torch.Tensor]]:
    try:
        pairs = named(transports.fetch(ref, timeout_s=timeout_s))
    except TimeoutError as error:
        raise DeadlineExceededError(
            f"the owner of {ref!r} did not deliver it in time: {error}", rank=rank, phase="wire"
        ) from error
    except WeightSyncError as error:
        error.rank, error.phase = rank, error.phase or "wire"
        raise
    except transports.TRANSPORT_ERRORS as error:
        raise TransferError(
            f"{ref!r} could not be fetched (its owner died, or the lane broke): {error}",
            rank=rank,
            phase="wire",
        ) from error
    if not pairs:
        raise WeightNameError(f"{ref!r} holds no tensors", rank=rank, phase="wire")
    return pairs


def _verified(
    pairs: Sequence[tuple[str, torch.Tensor]], expected: WeightManifest | None, *, rank: int
) -> WeightManifest:
    """What arrived, held against what was announced."""
    if expected is None:
        return WeightManifest.of(pairs)
    specs = {spec.name: spec for spec in expected.tensors}
    if unknown := [name for name, _ in pairs if name not in specs]:
        raise WeightNameError(f"not in the manifest: {unknown!r}", rank=rank, phase="verify")
    for name, tensor in pairs:
        found = TensorSpec.of(name, tensor)
        if found != specs[name]:
            raise WeightMismatchError(
                f"{name!r} was announced as {specs[name].shape!r} {specs[name].dtype!r} and arrived as "
                f"{found.shape!r} {found.dtype!r}",
                rank=rank,
                tensor=name,
                phase="verify",
            )
        _compare(name, tensor, expected.digests[name], rank=rank)
    return WeightManifest(
        tensors=tuple(specs[name] for name, _ in pairs),
        digests={name: expected.digests[name] for name, _ in pairs},
    )


def _compare(name: str, tensor: torch.Tensor, wanted: str, *, rank: int) -> None:
    algorithm = wanted.partition(":")[0]
    data = tensor.detach().contiguous()
    found = tensor_digest(data if can_run(algorithm, data.device.type) else data.cpu(), algorithm)
    if found != wanted:
        raise DigestMismatchError(
            f"{name!r} is not what was announced: source {wanted}, here {found}",
            rank=rank,
            tensor=name,
            phase="verify",
        )
