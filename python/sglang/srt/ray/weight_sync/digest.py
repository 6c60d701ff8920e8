"""A 128-bit digest of a tensor's bytes, computed where the tensor lives.

Between two CPUs it is XXH3-128 (half of the cost of a copy, measured in docs/benchmarks.md). Where one side is an
accelerator both sides use `sums`, which needs plain torch operations only and gives the same result on every device:
the bytes are read as 64-bit words in rows of 512; row sums, in which each column has a factor of its own (plain ones
are equal in every row of an identity matrix), and column sums find what changed or moved, and both are mixed with
their position before they are added up. In either, a flipped bit or two swapped blocks of any size go unnoticed with a
chance of about 2^-60; neither resists an adversary, which is not their job.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

XXH3 = "xxh3"
SUMS = "sums"

_ROW_WORDS = 512
_CHUNK_ROWS = 256  # 1 MiB: the later passes over a chunk read it from cache
_DEVICE_CHUNK_ROWS = 8192  # 32 MiB: little memory for the products, and few kernel launches
_GOLDEN = (
    -7046029254386353131
)  # 0x9E3779B97F4A7C15, Steele et al. 2014 (SplitMix64), as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9, same source
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB, same source


def algorithm_for(device_types: Iterable[str]) -> str:
    """The algorithm that all of these device types (`cpu`, `cuda`) can compute where the tensor lives."""
    return XXH3 if all(kind == "cpu" for kind in device_types) else SUMS


def can_run(algorithm: str, device_type: str) -> bool:
    return algorithm == SUMS or (algorithm == XXH3 and device_type == "cpu")


def tensor_digest(tensor: torch.Tensor, algorithm: str) -> str:
    """Digest of a contiguous tensor's bytes, as `algorithm:32 hex digits`.

    Args:
        tensor: any dtype and shape, contiguous. Shape and dtype are not part of the digest, the length is.
        algorithm: `xxh3` (CPU tensors only) or `sums`.

    Raises:
        ValueError: the tensor is not contiguous, or the algorithm can't run where it lives.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"only contiguous tensors have a digest, got strides {tensor.stride()!r}")
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if algorithm == SUMS:
        row_part, column_part = _mixed_sums(data)
        return f"{SUMS}:{row_part & _ALL_ONES:016x}{column_part & _ALL_ONES:016x}"
    if algorithm == XXH3 and data.device.type == "cpu":
        return f"{XXH3}:{xxhash.xxh3_128_hexdigest(data.numpy())}"
    raise ValueError(f"digest algorithm {algorithm!r} cannot run on device {data.device.type!r}")


_ALL_ONES = (1 << 64) - 1


def _mixed_sums(data: torch.Tensor) -> tuple[int, int]:
    row_bytes = _ROW_WORDS * 8
    whole = data.numel() // row_bytes * row_bytes
    columns = torch.zeros(_ROW_WORDS, dtype=torch.int64, device=data.device)
    row_sums = []
    if whole:
        words = _as_words(data[:whole]).view(-1, _ROW_WORDS)
        row_sums.append(_sum_rows_and_columns(words, columns))
    if whole < data.numel():
        tail = torch.zeros(row_bytes, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        row_sums.append(_sum_rows_and_columns(tail.view(torch.int64).view(1, _ROW_WORDS), columns))
    rows = (
        torch.cat(row_sums) if row_sums else torch.zeros(0, dtype=torch.int64, device=data.device)
    )
    length = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    parts = torch.stack([_mix(torch.cat([rows, length])).sum(), _mix(columns).sum()])
    row_part, column_part = parts.tolist()
    return row_part, column_part


def _as_words(data: torch.Tensor) -> torch.Tensor:
    # A view as int64 needs an address that 8 divides; parameters have it, small views into buckets may not.
    if data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _sum_rows_and_columns(words: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Weighted row sums of `words`; adds its column sums to `columns`. Sums wrap around modulo 2^64."""
    chunk_rows = _CHUNK_ROWS if words.device.type == "cpu" else _DEVICE_CHUNK_ROWS
    factors = _positions(_ROW_WORDS, words.device) * _GOLDEN | 1
    products = torch.empty_like(words[:chunk_rows])
    sums = torch.empty(words.shape[0], dtype=torch.int64, device=words.device)
    for start in range(0, words.shape[0], chunk_rows):
        chunk = words[start : start + chunk_rows]
        product = torch.mul(chunk, factors, out=products[: chunk.shape[0]])
        torch.sum(product, dim=1, out=sums[start : start + chunk_rows])
        columns += chunk.sum(dim=0)
    return sums


def _positions(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device)


def _mix(sums: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser over each sum and its position: a bijection of the sum at every position."""
    mixed = sums + _positions(sums.numel(), sums.device) * _GOLDEN
    mixed = (mixed ^ _shift_right(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shift_right(mixed, 27)) * _MIX_2
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (zero-filling) right shift; torch's own keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
