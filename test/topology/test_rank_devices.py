"""Which device a rank binds, for every way in which Ray and CUDA name devices."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.ray.devices import visible_index

A = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
B = "GPU-bbbbbbbb-1111-2222-3333-444444444444"
MIG = "MIG-cccccccc-1111-2222-3333-444444444444"


def nothing() -> list[str]:
    raise AssertionError("asked the driver although the environment says it")


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        # Ray sets CUDA_VISIBLE_DEVICES to what it assigned: one device, number 0.
        ("5", "5", 0),
        (B, B, 0),
        # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES: the process sees the node's devices...
        ("5", None, 5),
        # ...or those that Slurm or the user left to it, by absolute numbers or UUIDs.
        ("5", "4,5,6,7", 1),
        (B, f"{A},{B}", 1),
        (B, f"{A[:12]},{B[:12]}", 1),
        (MIG, f"{A}, {MIG}", 1),
    ],
)
def test_the_assigned_device_is_found_among_the_visible_ones(assigned, visible, index):
    assert visible_index(assigned, visible=visible, uuids=nothing) == index


def test_a_uuid_with_nothing_hidden_is_looked_up_in_the_driver():
    assert visible_index(B, visible=None, uuids=lambda: [A, B]) == 1


@pytest.mark.parametrize(("assigned", "visible"), [("3", "4,5"), (B, A), ("1", ""), ("5", A)])
def test_a_device_that_the_process_cannot_see_is_an_error(assigned, visible):
    with pytest.raises(ValueError, match=f"device '{assigned}'.*CUDA_VISIBLE_DEVICES"):
        visible_index(assigned, visible=visible, uuids=nothing)


@pytest.mark.parametrize(("device", "bound"), [("cuda", [1, 1]), ("cpu", [])])
def test_every_thread_of_a_rank_binds_the_ranks_device(
    monkeypatch: pytest.MonkeyPatch, device: str, bound: list[int]
):
    import torch

    import sglang.srt.runtime_context as context
    from sglang.srt.ray.actor_verbs import bind_rank_device

    seen: list[tuple[Any, int]] = []
    module = SimpleNamespace(set_device=lambda index: seen.append((threading.get_ident(), index)))
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    monkeypatch.setattr(context, "get_device", lambda: SimpleNamespace(device=device))
    bind_rank_device(1)
    other = threading.Thread(target=bind_rank_device, args=(1,))
    other.start()
    other.join()
    assert [index for _, index in seen] == bound
    assert len({thread for thread, _ in seen}) == len(bound)
