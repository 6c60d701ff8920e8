"""A plan applied to random weights gives, element for element, what the family's own loader makes of them."""

import families
import pytest
import torch
from shards import Topology, build_shard, publish_args

from sglang.srt.ray.weight_sync.errors import UnplannableModelError
from sglang.srt.ray.weight_sync.layout import TensorSpec, WeightLayout
from sglang.srt.ray.weight_sync.name_coverage import plan_by_names
from sglang.srt.ray.weight_sync.planning import trace_shard_plan

REARRANGED = {"deepseek-v3": "fused_qkv_a_proj_with_mqa"}  # concatenated by the loader
CASES = [
    pytest.param(family, topology, id=f"{family}-{topology}")
    for family in families.FAMILIES
    for topology in (
        Topology(),
        Topology(tp=2),
        *([Topology(tp=2, ep=2)] if family in families.MOE_FAMILIES else []),
    )
    if family != "gemma"
]


@pytest.mark.parametrize(("family", "topology"), CASES)
def test_a_plan_gives_what_the_loader_gives(family, topology, config_folder):
    server_args = publish_args(config_folder(family))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator)
        for name, shape in families.checkpoint_shapes(family).items()
    }
    manifest = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    flat = [tensor.view(-1) for tensor in weights.values()]
    for rank in topology.ranks():
        model = build_shard(server_args, rank)
        plan = trace_shard_plan(model, manifest, WeightLayout.of_model(model).fingerprint)
        assert (plan.missing_targets, plan.computed_targets) == ((), ())
        rearranged = REARRANGED.get(family, "no parameter at all")
        assert all(rearranged in name for name in plan.numbered_targets), plan.numbered_targets
        model.load_weights(weights.items())
        for name, parameter in model.named_parameters():
            planned = torch.full_like(parameter.data, -7.0)
            for piece in plan.targets[name]:
                piece.apply(flat, planned.view(-1))
            assert torch.equal(planned, parameter.data), name


def test_a_loader_that_adds_to_what_it_is_given_is_refused_by_name(config_folder):
    model = build_shard(publish_args(config_folder("gemma")), Topology().ranks()[0])
    manifest = [
        TensorSpec(name=name, shape=shape, dtype="float32")
        for name, shape in families.checkpoint_shapes("gemma").items()
    ]
    with pytest.raises(UnplannableModelError, match="GemmaForCausalLM") as refused:
        trace_shard_plan(model, manifest, "")
    assert "norm" in str(refused.value.tensor)


def test_a_loader_that_computes_is_still_held_to_its_names(config_folder):
    model = build_shard(publish_args(config_folder("gemma")), Topology(tp=2).ranks()[1])
    manifest = [
        TensorSpec(name=name, shape=shape, dtype="float32")
        for name, shape in families.checkpoint_shapes("gemma").items()
    ]
    plan = plan_by_names(model, manifest, "")
    assert (plan.missing_targets, plan.unused_sources) == ((), ())
    fewer = [spec for spec in manifest if "layers.1.self_attn.k_proj" not in spec.name]
    odd = TensorSpec(name="model.layers.1.odd.weight", shape=(2,), dtype="float32")
    plan = plan_by_names(model, [*fewer, odd], "")
    assert plan.missing_targets == ("model.layers.1.self_attn.qkv_proj.weight",)
    assert plan.partly_sent_targets == plan.missing_targets
    assert plan.unused_sources == ("model.layers.1.odd.weight",)
