"""`ParameterMapper` against what actually lands where, element by element."""

import families
import numpy as np
import pytest
import torch
from shards import Topology, build_shard, elements_landed, publish_args, tensors_by_element
from test_shards_of_every_rank import shifted_by_one

from sglang.srt.model_loader.parameter_mapper import ParameterMapper, UnmappableNameError


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_names_and_counts_are_those_of_the_elements_that_a_load_puts_there(
    family, rank, config_folder
):
    topology = Topology(tp=2, ep=2 if family in families.MOE_FAMILIES else 1)
    model = build_shard(publish_args(config_folder(family)), topology.ranks()[rank])
    shapes = families.checkpoint_shapes(family)
    names, tensor_of = list(shapes), tensors_by_element(shapes)
    mapper = ParameterMapper.from_model(model)
    for parameter, elements in elements_landed(model, shapes).items():
        if shifted_by_one(family, parameter):
            assert mapper.map(parameter).sglang_name == parameter
            continue
        sources = {names[tensor] for tensor in np.unique(tensor_of[elements])}
        for name in sources:
            mapped = mapper.map(name)
            assert mapped.sglang_name == parameter
            assert mapped.num_shards * mapped.num_local_experts == len(sources), name


@pytest.mark.parametrize(
    ("family", "topology", "name", "expected"),
    [
        ("qwen2", Topology(), "self_attn.k_proj.bias", ("self_attn.qkv_proj.bias", 3, 1)),
        ("qwen2", Topology(tp=2), "mlp.up_proj.weight", ("mlp.gate_up_proj.weight", 2, 1)),
        ("qwen2", Topology(), "self_attn.o_proj.weight", ("self_attn.o_proj.weight", 1, 1)),
        ("qwen3-moe", Topology(), "mlp.experts.5.up_proj.weight", ("mlp.experts.w13_weight", 2, 8)),
        (
            "qwen3-moe",
            Topology(tp=2),
            "mlp.experts.5.down_proj.weight",
            ("mlp.experts.w2_weight", 1, 8),
        ),
        (
            "qwen3-moe",
            Topology(tp=4, ep=4),
            "mlp.experts.7.gate_proj.weight",
            ("mlp.experts.w13_weight", 2, 2),
        ),
        ("qwen3-moe", Topology(), "mlp.gate.weight", ("mlp.gate.weight", 1, 1)),
        (
            "deepseek-v3",
            Topology(),
            "self_attn.kv_a_proj_with_mqa.weight",
            ("self_attn.fused_qkv_a_proj_with_mqa.weight", 2, 1),
        ),
    ],
)
def test_the_mapping_that_clients_know(family, topology, name, expected, config_folder):
    model = build_shard(publish_args(config_folder(family)), topology.ranks()[0])
    mapped = ParameterMapper.from_model(model).map(f"model.layers.1.{name}")
    name, num_shards, num_local_experts = expected
    assert mapped.sglang_name == f"model.layers.1.{name}"
    assert (mapped.num_shards, mapped.num_local_experts) == (num_shards, num_local_experts)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_a_layer_of_another_pipeline_stage_maps_to_a_name_this_rank_has_not(family, config_folder):
    model = build_shard(publish_args(config_folder(family)), Topology(pp=2).ranks()[0])
    mapper = ParameterMapper.from_model(model)
    held = dict(model.named_parameters())
    for name in families.checkpoint_shapes(family):
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        if layer >= 2:
            assert mapper.map(name).sglang_name not in held


def test_a_tied_head_maps_to_nothing_the_model_holds(config_folder):
    model = build_shard(publish_args(config_folder("llama-tied")), Topology().ranks()[0])
    mapped = ParameterMapper.from_model(model).map("lm_head.weight")
    assert mapped.sglang_name not in dict(model.named_parameters())


@pytest.mark.parametrize("family", ["qwen2", "gemma", "deepseek-v3"])
def test_mapping_does_not_touch_the_model(family, config_folder):
    model = build_shard(publish_args(config_folder(family)), Topology().ranks()[0])
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    derived = [m.w_kc.clone() for m in model.modules() if getattr(m, "w_kc", None) is not None]
    mapper = ParameterMapper.from_model(model)
    for name in families.checkpoint_shapes(family):
        mapper.map(name)
    for name, parameter in model.named_parameters():
        pointer, values = before[name]
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, values)
    after = [m.w_kc for m in model.modules() if getattr(m, "w_kc", None) is not None]
    assert all(map(torch.equal, after, derived))


def test_a_loader_that_fails_is_named_with_the_tensor():
    class Broken(torch.nn.Module):
        def load_weights(self, weights):
            for name, _ in weights:
                raise KeyError(name)

    with pytest.raises(UnmappableNameError, match=r"Broken.*\['a\.b'\].*KeyError"):
        ParameterMapper.from_model(Broken()).map("a.b")


def test_a_model_without_a_loader_is_refused():
    with pytest.raises(ValueError, match="Linear has no load_weights"):
        ParameterMapper.from_model(torch.nn.Linear(1, 1))
