"""Which device index of its own process a rank uses, from what Ray says it was given.

Ray names a device by the machine's numbering or by UUID, while torch counts the devices that the process can see. The
two agree only where nothing hides a device, so upstream's `int(assigned)` binds a wrong device, or none, as soon as
`CUDA_VISIBLE_DEVICES` is set by Ray, by a scheduler such as Slurm, or holds UUIDs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def rank_device_index(assigned: str | int) -> int:
    """Index, in this process, of the device that Ray assigned to it. Called once, in the rank's actor."""
    return visible_index(
        str(assigned), visible=os.environ.get(VISIBLE_VARIABLE), uuids=_device_uuids
    )


def visible_index(assigned: str, *, visible: str | None, uuids: Callable[[], Sequence[str]]) -> int:
    """Pure form of `rank_device_index`.

    Args:
        assigned: what Ray calls the device: a number of the machine's, or a UUID (`GPU-...`, `MIG-...`).
        visible: the process's `CUDA_VISIBLE_DEVICES`; None when unset, and the numbering is the machine's.
        uuids: UUIDs of all devices in order; asked only for a UUID where nothing is hidden.

    Raises:
        ValueError: the process can't see that device.
    """
    if visible is None:
        if assigned.isdigit():
            return int(assigned)
        names = list(uuids())
    else:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    for index, name in enumerate(names):
        if _same_device(assigned, name):
            return index
    raise ValueError(
        f"Ray gave this rank device {assigned!r}, but the process sees {names!r} "
        f"({VISIBLE_VARIABLE}={visible!r}). Unset {VISIBLE_VARIABLE} in the runtime environment, "
        f"or let Ray set it (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES unset)."
    )


def _same_device(assigned: str, name: str) -> bool:
    """Equal, or one a UUID that the other abbreviates, as CUDA allows."""
    if assigned == name:
        return True
    if assigned.isdigit() or name.isdigit():
        return False
    short, long = sorted((assigned.lower(), name.lower()), key=len)
    return len(short) >= len("GPU-xxxx") and long.startswith(short)


def _device_uuids() -> list[str]:
    import torch

    return [
        f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        for index in range(torch.cuda.device_count())
    ]
