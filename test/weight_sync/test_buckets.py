"""How a rank's parameters are spread over registered buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.ray.weight_sync.buckets import _grouped, _views
from sglang.srt.ray.weight_sync.layout import TensorSpec, dtype_of

SPECS = [
    TensorSpec(name="a", shape=(10,), dtype="float32"),
    TensorSpec(name="b", shape=(3, 5), dtype="bfloat16"),
    TensorSpec(name="c", shape=(100, 7), dtype="float32"),
    TensorSpec(name="d", shape=(1,), dtype="int8"),
]


def names(bucket_bytes: int) -> list[list[str]]:
    return [[spec.name for spec in group] for group, _ in _grouped(SPECS, bucket_bytes)]


def test_a_tiny_limit_gives_every_tensor_its_own_bucket():
    assert names(1) == [["a"], ["b"], ["c"], ["d"]]


def test_a_large_limit_puts_all_into_one():
    assert names(1 << 30) == [["a", "b", "c", "d"]]


def test_an_oversized_tensor_stands_alone_and_order_is_kept():
    assert names(256) == [["a", "b"], ["c"], ["d"]]


def test_no_tensors_need_no_bucket():
    assert list(_grouped([], 100)) == []


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from(["float64", "bfloat16", "float8_e4m3fn", "int8"]),
        ),
        max_size=12,
    ),
    st.integers(1, 2000),
)
def test_groups_keep_order_and_views_neither_overlap_nor_leave_their_bucket(shapes, limit: int):
    specs = [
        TensorSpec(name=str(i), shape=tuple(shape), dtype=dtype)
        for i, (shape, dtype) in enumerate(shapes)
    ]
    groups = list(_grouped(specs, limit))
    assert [spec for group, _ in groups for spec in group] == specs
    for group, size in groups:
        assert len(group) == 1 or size <= limit
        memory = torch.zeros(size, dtype=torch.uint8)
        views = dict(_views(memory, group))
        for number, (spec, view) in enumerate(zip(group, views.values(), strict=True), start=1):
            assert tuple(view.shape) == spec.shape
            assert view.dtype == dtype_of(spec.dtype)
            assert view.is_contiguous()
            view.view(torch.uint8).fill_(number) if view.ndim else view.fill_(number)
        for number, view in enumerate(views.values(), start=1):
            if view.ndim:
                assert (view.view(torch.uint8) == number).all()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8"])
def test_views_start_where_every_dtype_may_start(dtype: str):
    specs = [TensorSpec(name=str(i), shape=(i,), dtype=dtype) for i in range(1, 9)]
    ((group, size),) = _grouped(specs, 1 << 20)
    base = torch.zeros(size, dtype=torch.uint8)
    assert all((view.data_ptr() - base.data_ptr()) % 64 == 0 for _, view in _views(base, group))
