"""A 128-bit digest of a tensor's bytes, computed where the tensor lives.

Between two CPUs it is XXH3-128 (half of the cost of a copy, measured in docs/benchmarks.md). Where one side is an
accelerator both sides use `sums`, which needs plain torch operations only and gives the same result on every device:
the bytes are read as 64-bit words in rows of 512; row sums, in which each column has a factor of its own (plain ones
are equal in every row of an identity matrix), and column sums find what changed or moved, and both are mixed with
their position before they are added up. In either, a flipped bit or two swapped blocks of any size go unnoticed with a
chance of about 2^-60; neither resists an adversary, which is not their job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until no kernel that was already launched reads or writes these tensors.

    A forward or an optimizer step may run on another stream than this thread's, and a one-sided read on none at all.
    """
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


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
        return _text(*_mixed_sums(data))
    if algorithm == XXH3 and data.device.type == "cpu":
        return f"{XXH3}:{xxhash.xxh3_128_hexdigest(data.numpy())}"
    raise ValueError(f"digest algorithm {algorithm!r} cannot run on device {data.device.type!r}")


def tensor_digests(tensors: Sequence[torch.Tensor], algorithm: str) -> list[str]:
    """`tensor_digest` of each of them, with one kernel and one wait for all that a GPU can read at once."""
    if algorithm != SUMS or not any(tensor.device.type == "cuda" for tensor in tensors):
        return [tensor_digest(tensor, algorithm) for tensor in tensors]
    from sglang.srt.ray.weight_sync import digest_kernel

    together = [t for t in tensors if digest_kernel.fits(t) and t.is_contiguous()]
    if len({tensor.device for tensor in together}) != 1:
        return [tensor_digest(tensor, algorithm) for tensor in tensors]
    parts = iter(_finished(together, *digest_kernel.raw_sums(together, _GOLDEN)))
    joined = {id(tensor) for tensor in together}
    return [
        _text(*next(parts)) if id(tensor) in joined else tensor_digest(tensor, algorithm)
        for tensor in tensors
    ]


def _finished(
    tensors: Sequence[torch.Tensor], row_parts: torch.Tensor, columns: torch.Tensor
) -> list[tuple[int, int]]:
    """Both halves of each digest from the kernel's sums: adds the length's place among the rows, mixes the columns."""
    lengths = [tensor.nbytes for tensor in tensors]
    last_rows = [-(-length // (_ROW_WORDS * 8)) + 1 for length in lengths]
    table = torch.tensor([lengths, last_rows], dtype=torch.int64).to(row_parts.device)
    rows = row_parts + _mixed_at(table[0], table[1])
    places = _positions(_ROW_WORDS, columns.device)
    column_parts = _mixed_at(columns, places).sum(dim=1)
    return [(row, column) for row, column in torch.stack([rows, column_parts], dim=1).tolist()]


_ALL_ONES = (1 << 64) - 1


def _text(row_part: int, column_part: int) -> str:
    return f"{SUMS}:{row_part & _ALL_ONES:016x}{column_part & _ALL_ONES:016x}"


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
    return _mixed_at(sums, _positions(sums.numel(), sums.device))


def _mixed_at(sums: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    mixed = sums + positions * _GOLDEN
    mixed = (mixed ^ _shift_right(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shift_right(mixed, 27)) * _MIX_2
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (zero-filling) right shift; torch's own keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
