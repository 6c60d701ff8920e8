"""The one place that talks to Ray Direct Transport: put, describe, pin, fetch.

Everything outside deals in tensors, refs and seconds; what Ray keeps to itself (weak target references, the default
of 60 s, which exceptions a dead source raises) stays in here. NIXL is the only transport so far; another one is
another set of these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.exceptions import ObjectFetchTimedOutError, RayError

if TYPE_CHECKING:
    import torch

TRANSPORT_ERRORS = (RayError, RuntimeError, ValueError)
"""What a failed fetch may raise. TimeoutError (Ray's GetTimeoutError is one) has to be caught before these."""


def put(tensors: Sequence[torch.Tensor]) -> ray.ObjectRef:
    """Publish contiguous tensors of this process.

    Their memory is read in place: it must not change until every receiver has it.
    """
    return ray.put(list(tensors), _tensor_transport="nixl")


def pin(tensor: torch.Tensor) -> None:
    """Register the tensor's whole storage with NIXL for the life of this process (or until `unpin`)."""
    from ray.experimental import register_nixl_memory

    register_nixl_memory(tensor)


def unpin(tensor: torch.Tensor) -> None:
    from ray.experimental import deregister_nixl_memory

    deregister_nixl_memory(tensor)


def described(ref: ray.ObjectRef, *, timeout_s: float) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor that `ref` holds, without moving a byte.

    Raises:
        ValueError: `ref` is not an RDT object (a plain ray.put, say).
        TimeoutError: its owner did not say within the deadline.
    """
    manager = ray.worker.global_worker.rdt_manager
    object_id = ref.hex()
    if not manager.is_managed_object(object_id):
        raise ValueError(
            f"{ref!r} is not an RDT object; make it with ray.put(tensors, _tensor_transport='nixl')"
        )
    metadata = manager.wait_for_tensor_transport_metadata(object_id, timeout_s)
    if metadata is None:
        raise TimeoutError(
            f"the owner of {ref!r} did not describe its tensors within {timeout_s:g} s"
        )
    return list(metadata.tensor_meta)


def fetch_into(
    refs: Sequence[ray.ObjectRef], targets: Sequence[Sequence[torch.Tensor]], *, timeout_s: float
) -> list[torch.Tensor]:
    """Read the tensors of all `refs` at once into `targets` (one sequence per ref), which the caller must hold.

    Returns what Ray returned, in order; the caller has to prove that it is the targets.

    Raises:
        TimeoutError: nothing, or not everything, arrived within the deadline.
        One of TRANSPORT_ERRORS: the source died or the lane failed.
    """
    from ray.experimental import set_target_for_ref

    for ref, buffers in zip(refs, targets, strict=True):
        set_target_for_ref(ref, list(buffers))
    try:
        arrived = ray.get(list(refs), timeout=timeout_s)
    except ObjectFetchTimedOutError as error:
        raise TimeoutError(f"Ray's own transfer limit ran out: {error}") from error
    return [tensor for tensors in arrived for tensor in tensors]
