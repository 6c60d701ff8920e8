"""What one rank says it holds."""

from __future__ import annotations

import hashlib
import pickle

import pytest
import torch

from sglang.srt.ray.weight_sync.layout import (
    TensorSpec,
    WeightLayout,
    dtype_name,
    dtype_of,
    fingerprint_of,
)


def spec(name: str = "a", shape: tuple[int, ...] = (2, 3), dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def test_the_fingerprint_depends_on_names_shapes_dtypes_and_order_only():
    base = fingerprint_of((spec("a"), spec("b")))
    assert base == fingerprint_of((spec("a"), spec("b")))
    different = [
        (spec("b"), spec("a")),
        (spec("a"),),
        (spec("a"), spec("c")),
        (spec("a"), spec("b", shape=(3, 2))),
        (spec("a"), spec("b", shape=(6,))),
        (spec("a"), spec("b", dtype="float16")),
    ]
    fingerprints = {fingerprint_of(entries) for entries in different}
    assert len(fingerprints | {base}) == len(different) + 1


def test_names_that_could_be_read_in_two_ways_have_different_fingerprints():
    assert fingerprint_of((spec('a","x'),)) != fingerprint_of((spec("a"), spec("x")))


def test_the_fingerprint_is_the_same_on_every_machine():
    # Spelled out: whoever changes it invalidates plans between versions that meet in one fleet.
    expected = hashlib.sha256(b'[["a",[2,3],"bfloat16"]]').hexdigest()
    assert fingerprint_of((spec(),)) == expected


def test_bytes_and_elements_follow_shape_and_dtype():
    assert spec().num_elements == 6
    assert spec().num_bytes == 12
    assert spec(shape=()).num_bytes == 2
    assert spec(shape=(0, 4)).num_bytes == 0


def test_a_layout_lists_tied_parameters_once_in_the_models_order():
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(4, 2)
    model.norm = torch.nn.LayerNorm(2, dtype=torch.float16)
    model.head = torch.nn.Linear(2, 4, bias=False)
    model.head.weight = model.embed.weight
    layout = WeightLayout.of_model(model)
    assert [(e.name, e.shape, e.dtype) for e in layout.entries] == [
        ("embed.weight", (4, 2), "float32"),
        ("norm.weight", (2,), "float16"),
        ("norm.bias", (2,), "float16"),
    ]
    assert layout.device == "cpu"
    assert layout.num_bytes == 4 * 2 * 4 + 2 * 2 * 2
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_a_model_on_two_kinds_of_device_has_no_layout():
    model = torch.nn.Linear(2, 2)
    model.bias = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"\['cpu', 'meta'\]"):
        WeightLayout.of_model(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_dtype_names_are_read_back(dtype: torch.dtype):
    assert dtype_of(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["nn", "quint", "float33", ""])
def test_a_name_that_is_no_dtype_is_refused(name: str):
    with pytest.raises(ValueError, match="is not a torch dtype"):
        dtype_of(name)
