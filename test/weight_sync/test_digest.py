"""Digests: equal on equal bytes, different on any change that a broken transfer could make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.ray.weight_sync.digest import SUMS, XXH3, algorithm_for, tensor_digest

ALGORITHMS = (XXH3, SUMS)
ROW = 4096  # bytes in a row of `sums`
SIZES = (1, 7, 8, 9, ROW - 1, ROW, ROW + 1, 3 * ROW, 300 * ROW + 13)
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_any_flipped_bit_changes_the_digest_wherever_it_is(algorithm: str, size: int):
    data = random_bytes(size)
    before = tensor_digest(data, algorithm)
    places = {0, 1, size // 3, size // 2, size - 2, size - 1, size // ROW * ROW - 1} & set(
        range(size)
    )
    for place in places:
        for bit in (0, 3, 7):
            changed = data.clone()
            changed[place] ^= 1 << bit
            assert tensor_digest(changed, algorithm) != before, (place, bit)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("block", [8, 64, 512, ROW])
@pytest.mark.parametrize("distance", ["neighbours", "same columns", "other columns"])
def test_two_swapped_blocks_change_the_digest(algorithm: str, block: int, distance: str):
    data = random_bytes(64 * ROW + 100)
    first = 5 * ROW if block == ROW else 5 * ROW + 1024
    step = {"neighbours": block, "same columns": 7 * ROW, "other columns": 7 * ROW + block}
    second = first + step[distance]
    swapped = data.clone()
    swapped[first : first + block] = data[second : second + block]
    swapped[second : second + block] = data[first : first + block]
    assert not torch.equal(swapped, data)
    assert tensor_digest(swapped, algorithm) != tensor_digest(data, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_swapped_rows_of_equal_sums_change_the_digest(algorithm: str):
    # Weights have structure: an identity start, one-hot rows, permutations. Every row has the same sum there.
    identity = torch.eye(1024)
    swapped = identity.clone()
    swapped[[0, 2]] = identity[[2, 0]]
    assert tensor_digest(swapped, algorithm) != tensor_digest(identity, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rolled_and_transposed_contents_change_the_digest(algorithm: str):
    matrix = random_bytes(64 * 64 * 4).view(torch.float32).view(64, 64)
    before = tensor_digest(matrix, algorithm)
    assert tensor_digest(matrix.T.contiguous(), algorithm) != before
    for shift in (1, 2, 64, 512):
        assert tensor_digest(matrix.view(-1).roll(shift), algorithm) != before


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_leading_trailing_and_missing_zeros_count(algorithm: str):
    digests = [tensor_digest(torch.zeros(n, dtype=torch.uint8), algorithm) for n in range(20)]
    assert len(set(digests)) == 20


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_digest_of_its_bytes(algorithm: str, dtype: torch.dtype):
    source = random_bytes(5000 * 8) if dtype != torch.bool else random_bytes(5000 * 8) % 2
    tensor = source.view(dtype)
    digest = tensor_digest(tensor, algorithm)
    assert digest == tensor_digest(source, algorithm)
    assert digest == tensor_digest(tensor.view(5, -1), algorithm)
    assert digest.startswith(f"{algorithm}:")
    assert len(digest.partition(":")[2]) == 32
    changed = source.clone()
    changed[-1] ^= 1
    assert tensor_digest(changed.view(dtype), algorithm) != digest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(size=st.integers(0, 3 * ROW), offset=st.integers(0, 15), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_equal_bytes_at_another_alignment_have_the_same_digest(
    algorithm: str, size: int, offset: int, seed: int
):
    data = random_bytes(size, seed)
    room = torch.zeros(size + 16, dtype=torch.uint8)
    room[offset : offset + size] = data
    assert tensor_digest(room[offset : offset + size], algorithm) == tensor_digest(data, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_empty_and_scalar_tensors_have_digests(algorithm: str):
    empty = tensor_digest(torch.empty(0, 5), algorithm)
    assert empty == tensor_digest(torch.empty(0, dtype=torch.int8), algorithm)
    assert tensor_digest(torch.tensor(0.0), algorithm) != empty


def test_parameters_that_require_gradients_have_digests():
    parameter = torch.nn.Parameter(torch.ones(4))
    assert tensor_digest(parameter, XXH3) == tensor_digest(torch.ones(4), XXH3)


def test_the_two_algorithms_never_agree_by_accident():
    data = random_bytes(100)
    assert tensor_digest(data, XXH3) != tensor_digest(data, SUMS)


def test_a_tensor_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match=r"strides \(1, 3\)"):
        tensor_digest(torch.zeros(2, 3).T, XXH3)


def test_an_unknown_algorithm_is_refused_by_name():
    with pytest.raises(ValueError, match="'md5'"):
        tensor_digest(torch.zeros(2), "md5")


def test_the_algorithm_is_one_that_every_device_can_compute():
    assert algorithm_for(["cpu", "cpu"]) == XXH3
    assert algorithm_for(["cpu", "cuda"]) == SUMS
    assert algorithm_for(["cuda"]) == SUMS
