"""The one place that talks to Ray Direct Transport: put, describe, pin, fetch.

Everything outside deals in tensors, refs and seconds; what Ray keeps to itself (weak target references, the limit
of 60 s, which exceptions a dead source raises) stays in here. NIXL is the only transport so far; another one is
another set of these functions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import ray.experimental
import torch
from ray.exceptions import RayError

_FIRST_LOOK_S, _LONGEST_LOOK_S = 50e-6, 1e-3
TRANSPORT_ERRORS = (RayError, RuntimeError, ValueError)
"""What a failed read may raise. TimeoutError has to be caught before these."""


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


def forgotten() -> int:
    """How often this process has taken a registration back: refs that were put before describe it as it was then."""
    from ray.experimental.rdt.util import get_tensor_transport_manager

    return int(get_tensor_transport_manager("NIXL")._nixl_agent_meta_version)


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


def waves(refs: Sequence[ray.ObjectRef]) -> Iterator[slice]:
    """Cut described refs into runs whose reads may be under way at the same time.

    A source that gave a registration back between two puts describes the second one under another version. Starting to
    read that one makes Ray forget the source and meet it again, and every read from it that is still under way then
    fails with NIXL_ERR_NOT_FOUND (ray 2.60, `fetch_multiple_tensors` in nixl_tensor_transport.py).
    """
    manager = ray.worker.global_worker.rdt_manager
    first, versions = 0, dict[str, int]()
    for index, ref in enumerate(refs):
        source = manager.get_rdt_metadata(ref.hex()).tensor_transport_meta
        name, version = source.nixl_agent_name, source.nixl_agent_meta_version
        if versions.setdefault(name, version) != version:
            yield slice(first, index)
            first, versions = index, {name: version}
    if first < len(refs):
        yield slice(first, len(refs))


_abandoned: list[list[torch.Tensor]] = []


def fetch(ref: ray.ObjectRef, *, timeout_s: float) -> Any:
    """The value of any ref, of the object store or of RDT, with tensors in memory of this process.

    Raises:
        TimeoutError: its owner did not deliver in time.
        One of TRANSPORT_ERRORS: the owner died, or the transport failed.
    """
    if not ray.worker.global_worker.rdt_manager.is_managed_object(ref.hex()):
        return _get(ref, timeout_s)
    started = time.monotonic()
    shapes = described(ref, timeout_s=timeout_s)
    source = ray.worker.global_worker.rdt_manager.get_rdt_metadata(ref.hex())
    device = source.tensor_transport_meta.tensor_device
    targets = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    ray.experimental.set_target_for_ref(ref, targets)
    try:
        return _get(ref, max(timeout_s - (time.monotonic() - started), 0.0))
    except BaseException:
        # A read that was given up may still write: its targets must never become somebody else's memory.
        _abandoned.append(targets)
        raise


def _get(ref: ray.ObjectRef, timeout_s: float) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"{ref!r} did not arrive within {timeout_s:g} s") from error


class Read:
    """One transfer from a remote process straight into local tensors, from its first byte to the proof of its end.

    `ray.get` would do the same, but it drops the transfer when it times out, and a one-sided read that is no longer
    looked at may still write. Ray's transport interface lets the handle be kept. Used on one thread at a time.
    """

    def __init__(self, ref: ray.ObjectRef, targets: Sequence[torch.Tensor]) -> None:
        """Start reading the tensors of `ref` into `targets`; both are held until this object goes.

        Raises:
            One of TRANSPORT_ERRORS: the source is gone or refuses.
        """
        from ray.experimental.rdt.util import get_tensor_transport_manager

        self.ref = ref
        self._targets = list(targets)
        metadata = ray.worker.global_worker.rdt_manager.get_rdt_metadata(ref.hex())
        backend = metadata.tensor_transport_backend
        self._transport = get_tensor_transport_manager(backend)
        communicator = self._transport.get_communicator_metadata(None, None, backend)
        self._request: Any = self._transport.fetch_multiple_tensors(
            ref.hex(), metadata.tensor_transport_meta, communicator, self._targets
        )

    def wait(self, *, timeout_s: float) -> list[torch.Tensor]:
        """The tensors that were written, which the caller has to compare with its targets.

        Raises:
            TimeoutError: not everything arrived in time; the read goes on, ask `is_over`.
            One of TRANSPORT_ERRORS: the read failed and is over.
        """
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_LOOK_S
        while (remaining := deadline - time.monotonic()) > pause and self._is_moving():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_S)
        return list(self._transport.wait_fetch_complete(self._request, timeout=max(remaining, 0.0)))

    def _is_moving(self) -> bool:
        """Ray's own wait looks once a millisecond, in which a few megabytes travel (ray 2.60)."""
        handle = getattr(self._request, "xfer_handle", None)
        return handle is not None and self._request.nixl_agent.check_xfer_state(handle) == "PROC"

    def is_over(self) -> bool:
        """Whether no byte can land any more: it completed or failed. Does not wait."""
        try:
            self.wait(timeout_s=0.0)
        except TimeoutError:
            return False
        except TRANSPORT_ERRORS:
            return True
        return True
