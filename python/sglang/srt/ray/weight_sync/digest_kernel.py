"""`sums` for many tensors on a GPU in one kernel launch and one read of their bytes.

`digest.py` defines the algorithm and computes it with plain torch operations, about twenty kernels and a wait for each
tensor; for a model of many tensors that is most of a sync. Here each program of one Triton kernel takes a block of rows
of one tensor, keeps the column sums in registers and mixes the row sums at once; sums modulo 2^64 may be added in any
order, so the result is the same to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ROW_WORDS = 512
_BLOCK_ROWS = 128  # 512 KiB a program: thousands of programs for a model, and few atomic additions
_TILE_ROWS = 4
_WARPS = 4


@triton.jit
def _mixed(word):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """SplitMix64's finaliser, as `digest._mix` after its addition."""
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


@triton.jit
def _sum_block(  # type: ignore[no-untyped-def]  # noqa: ANN202
    blocks,  # noqa: ANN001
    row_parts,  # noqa: ANN001
    columns,  # noqa: ANN001
    GOLDEN: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    block = blocks + tl.program_id(0) * 4
    address, num_words = tl.load(block), tl.load(block + 1)
    first_row, tensor = tl.load(block + 2), tl.load(block + 3)
    words = address.to(tl.pointer_type(tl.int64))
    column = tl.arange(0, WORDS).to(tl.int64)
    rows = tl.arange(0, TILE_ROWS).to(tl.int64)
    factors = (((column + 1) * GOLDEN) | 1)[None, :]
    column_sums = tl.zeros([TILE_ROWS, WORDS], dtype=tl.int64)
    row_part = tl.zeros([TILE_ROWS], dtype=tl.int64)
    for start in range(0, tl.cdiv(num_words, WORDS), TILE_ROWS):
        index = (start + rows)[:, None] * WORDS + column[None, :]
        values = tl.load(words + index, mask=index < num_words, other=0)
        column_sums += values
        row_sums = tl.sum(values * factors, axis=1)
        mixed = _mixed(row_sums + (first_row + start + rows + 1) * GOLDEN)
        row_part += tl.where((start + rows) * WORDS < num_words, mixed, 0)
    tl.atomic_add(row_parts + tensor, tl.sum(row_part, axis=0))
    tl.atomic_add(columns + tensor * WORDS + column, tl.sum(column_sums, axis=0))


def raw_sums(tensors: Sequence[torch.Tensor], golden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixed row sums added up (shape [tensors]) and the column sums (shape [tensors, 512]) of each tensor's bytes.

    Args:
        tensors: contiguous, on one device; see `fits`. What is missing of the last row counts as zeros.
        golden: the factor of `digest.py`.
    """
    device = tensors[0].device
    blocks = _blocks(tuple((t.data_ptr(), t.nbytes // 8) for t in tensors), device)
    row_parts = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    columns = torch.zeros(len(tensors), ROW_WORDS, dtype=torch.int64, device=device)
    if len(blocks):
        # Triton launches on the current device of this thread, which may be another one.
        with torch.get_device_module(device).device(device):
            _sum_block[(len(blocks),)](
                blocks, row_parts, columns, golden, ROW_WORDS, _TILE_ROWS, num_warps=_WARPS
            )
    return row_parts, columns


def fits(tensor: torch.Tensor) -> bool:
    """Whether the kernel can read this tensor: whole 64-bit words at an address that 8 divides, on a CUDA device."""
    return tensor.device.type == "cuda" and tensor.data_ptr() % 8 == 0 and tensor.nbytes % 8 == 0


@functools.lru_cache(maxsize=256)
def _blocks(places: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """[address, words, first row, tensor] of each program. Depends on nothing but addresses and sizes."""
    size = _BLOCK_ROWS * ROW_WORDS
    rows = [
        (address + start * 8, min(size, words - start), start // ROW_WORDS, index)
        for index, (address, words) in enumerate(places)
        for start in range(0, words, size)
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(device)
