"""`RankParallelismConfig` alone."""

import dataclasses
import json

import pytest

from sglang.srt.distributed.parallel_state import RankParallelismConfig

SIZES = ["tp", "pp", "ep", "moe_tp", "attn_tp", "attn_dp"]


def test_a_rank_nobody_said_anything_about_is_the_only_one():
    config = RankParallelismConfig()
    for name in SIZES:
        assert (getattr(config, f"{name}_size"), getattr(config, f"{name}_rank")) == (1, 0)
    assert (config.world_size, config.global_rank, config.local_rank) == (1, 0, 0)
    assert not config.has_dp_attention
    assert not config.has_expert_parallelism


def test_the_fields_are_those_that_clients_read():
    assert [field.name for field in dataclasses.fields(RankParallelismConfig)] == [
        *(f"{name}_{what}" for name in SIZES for what in ("size", "rank")),
        "world_size",
        "global_rank",
        "local_rank",
    ]


def test_it_survives_json():
    config = RankParallelismConfig(
        tp_size=4,
        tp_rank=3,
        ep_size=2,
        ep_rank=1,
        moe_tp_size=2,
        moe_tp_rank=1,
        attn_dp_size=2,
        attn_dp_rank=1,
    )
    assert RankParallelismConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.has_dp_attention
    assert config.has_expert_parallelism


def test_missing_names_take_their_defaults():
    assert RankParallelismConfig.from_dict({"tp_size": 2}) == RankParallelismConfig(tp_size=2)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"\['tp_width'\] are no fields.*'tp_size'"):
        RankParallelismConfig.from_dict({"tp_width": 2})


@pytest.mark.parametrize("name", SIZES)
def test_a_rank_outside_its_size_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}_rank=2 is no rank of {name}_size=2"):
        RankParallelismConfig(**{f"{name}_size": 2, f"{name}_rank": 2})


@pytest.mark.parametrize("value", ["2", 2.0, True, None])
def test_only_ints_are_taken(value):
    with pytest.raises(ValueError, match="tp_size must be an int"):
        RankParallelismConfig(tp_size=value)
