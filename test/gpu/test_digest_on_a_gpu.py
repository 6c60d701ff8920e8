"""`sums` gives the same digest on the GPU as on the CPU, for every length and dtype, and finds any flipped bit."""

from __future__ import annotations

import pytest
import torch
from one_gpu import DEVICE

from sglang.srt.ray.weight_sync.digest import SUMS, tensor_digest, tensor_digests

pytestmark = pytest.mark.gpu

SIZES = [1, 7, 8, 4095, 4096, 4097, 1_000_003, (32 << 20) + 4096 + 5]


@pytest.mark.parametrize("size", SIZES)
def test_the_device_computes_what_the_cpu_computes(device: str, size: int):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert tensor_digest(data.to(DEVICE), SUMS) == tensor_digest(data, SUMS)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
)
def test_any_dtype_is_read_as_bytes(device: str, dtype: torch.dtype):
    data = torch.randn(513, 129).to(dtype)
    assert tensor_digest(data.to(DEVICE), SUMS) == tensor_digest(data, SUMS)


@pytest.mark.parametrize("place", [0, 1_000_002, 500_000, 4096 * 17])
def test_a_flipped_bit_changes_it(device: str, place: int):
    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8).to(DEVICE)
    before = tensor_digest(data, SUMS)
    for bit in range(8):
        data[place] ^= 1 << bit
        assert tensor_digest(data, SUMS) != before
        data[place] ^= 1 << bit
    assert tensor_digest(data, SUMS) == before


def test_views_at_odd_addresses(device: str):
    data = torch.randint(0, 256, (100_000,), dtype=torch.uint8)
    for start in range(1, 9):
        assert tensor_digest(data.to(DEVICE)[start:], SUMS) == tensor_digest(
            data[start:].clone(), SUMS
        )


def test_many_tensors_at_once_give_what_each_gives_alone(device: str):
    """The kernel against plain torch operations on the CPU: every length of the last row, odd sizes and addresses."""
    sizes = [0, 8, 16, 4088, 4096, 4104, 5, 4099, 4096 * 64, 4096 * 64 + 8, (32 << 20) + 4096 + 8]
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    there = [tensor.to(DEVICE) for tensor in data]
    there[3] = torch.cat([data[3][:1], data[3]]).to(DEVICE)[1:]
    alone = [tensor_digest(tensor, SUMS) for tensor in data]
    assert tensor_digests(there, SUMS) == alone
    assert tensor_digests(there[::-1], SUMS) == alone[::-1]


def test_many_tensors_at_once_show_a_flipped_bit_and_moved_rows(device: str):
    data = [
        torch.randint(0, 256, (4096 * 130 + 8 * n,), dtype=torch.uint8).to(DEVICE) for n in range(3)
    ]
    before = tensor_digests(data, SUMS)
    data[1][4096 * 129 + 17] ^= 1
    flipped = tensor_digests(data, SUMS)
    assert [a == b for a, b in zip(before, flipped, strict=True)] == [True, False, True]
    data[1][4096 * 129 + 17] ^= 1
    rows = data[2][: 4096 * 130].view(130, 4096)
    rows[[3, 99]] = rows[[99, 3]]
    moved = tensor_digests(data, SUMS)
    assert [a == b for a, b in zip(before, moved, strict=True)] == [True, True, False]
