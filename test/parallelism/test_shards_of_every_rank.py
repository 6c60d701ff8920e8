"""The shards of all ranks together hold exactly the checkpoint of Hugging Face's own class."""

import math

import families
import numpy as np
import pytest
from shards import Topology, build_shard, elements_landed, publish_args

NO_PIPELINE = ("gemma", "gemma2")  # upstream's Gemma classes build every layer on every stage
DENSE = [Topology(), Topology(tp=2), Topology(tp=4), Topology(pp=2), Topology(tp=2, pp=2)]
MOE = [*DENSE, Topology(tp=2, ep=2), Topology(tp=4, ep=2), Topology(tp=2, pp=2, ep=2)]
CASES = [
    pytest.param(family, topology, id=f"{family}-{topology}")
    for family in families.FAMILIES
    for topology in (MOE if family in families.MOE_FAMILIES else DENSE)
    if not (topology.pp > 1 and family in NO_PIPELINE)
]


@pytest.mark.parametrize(("family", "topology"), CASES)
def test_every_checkpoint_element_has_a_place_and_no_parameter_is_left_open(
    family, topology, config_folder
):
    server_args = publish_args(config_folder(family))
    shapes = families.checkpoint_shapes(family)
    landed = [np.empty(0, dtype=int)]
    for rank in topology.ranks():
        model = build_shard(server_args, rank)
        # Outside the context, as a trainer loads: the shard remembers which one it is.
        for name, elements in elements_landed(model, shapes).items():
            assert (elements >= 0).all(), name
            if not shifted_by_one(family, name):
                landed.append(elements)
    expected = [
        np.full(math.prod(shape), not shifted_by_one(family, name))
        for name, shape in shapes.items()
    ]
    assert np.array_equal(
        np.unique(np.concatenate(landed)), np.flatnonzero(np.concatenate(expected))
    )


def shifted_by_one(family, name):
    """Upstream's Gemma loader adds 1 to norms; those can't be told from their neighbours."""
    return family == "gemma" and "norm" in name


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_single_rank_holds_as_many_elements_as_the_checkpoint(family, config_folder):
    model = build_shard(publish_args(config_folder(family)), Topology().ranks()[0])
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held == sum(math.prod(shape) for shape in families.checkpoint_shapes(family).values())


@pytest.mark.parametrize("tp", [2, 4])
def test_the_projections_of_a_rank_are_a_tp_th_of_the_whole(tp, config_folder):
    server_args = publish_args(config_folder("qwen2"))
    whole, *_ = (build_shard(server_args, rank) for rank in Topology().ranks())
    sizes = {name: p.numel() for name, p in whole.named_parameters()}
    for rank in Topology(tp=tp).ranks():
        shard = dict(build_shard(server_args, rank).named_parameters())
        assert shard.keys() == sizes.keys()
        for name, parameter in shard.items():
            split = 1 if "norm" in name else tp
            assert parameter.numel() * split == sizes[name], name
