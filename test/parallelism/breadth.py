"""How each text architecture that SGLang and transformers share is planned: tiny random models, no engine.

`python test/parallelism/breadth.py --write` makes `docs/models.md`; `--only NAME ...` prints those alone. A plan counts
as exact when, applied to random weights, it equals what the engine's own loader makes of them, element for element.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from shards import Topology, build_shard, publish_args
from tiny_configs import tiny_config, write_folder
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sglang.srt.ray.weight_sync.errors import UnplannableModelError
from sglang.srt.ray.weight_sync.layout import TensorSpec, WeightLayout
from sglang.srt.ray.weight_sync.name_coverage import plan_by_names
from sglang.srt.ray.weight_sync.planning import trace_shard_plan
from sglang.srt.ray.weight_sync.shards import ShardPlan
from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
EXACT, LOADER, REFUSED, WRONG = "exact", "through the loader", "refused", "WRONG"
NOT_BUILT = "not built"
MOST_ELEMENTS = 40_000_000
_HYBRID_ON_A_CPU = {
    "mamba_radix_cache_strategy": "no_buffer",
    "disable_overlap_schedule": True,
}

_INTRODUCTION = """\
# Models: how each architecture is planned

Made by `python test/parallelism/breadth.py --write`, checked by `test/parallelism/test_breadth.py` (`slow`). Each text
architecture that SGLang and transformers share gets a tiny random model on a CPU, float32.

- *exact*: the plan, applied to random weights, equals what the engine's loader makes of them, element for element.
- *through the loader*: the loader computes; use `update_weights_from_object_ref`.
- *refused*: a sync of what transformers saves is refused, with this reason.
- *not built*: no tiny model could be made here, which says nothing of the plan.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One architecture under one topology."""

    kind: str
    reason: str = ""


def shared_architectures() -> dict[str, str]:
    """Causal language models of both: architecture -> transformers' model type."""
    from sglang.srt.models.registry import ModelRegistry

    types: dict[str, str] = {}
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        # Images and drafts are other matters; of two configurations the text's own is meant.
        other = "ForConditionalGeneration" in architecture or "Assistant" in architecture
        if other or architecture not in ModelRegistry.models:
            continue
        if model_type.endswith("_text") or architecture not in types:
            types[architecture] = model_type
    return dict(sorted(types.items()))


def outcomes_of(architecture: str, model_type: str) -> dict[str, Outcome]:
    """Under TP 1, TP 2 and, with experts, EP 2. One that can't be built says why, once."""
    with TemporaryDirectory() as folder:
        try:
            config = tiny_config(model_type, architecture)
            weights = random_checkpoint(config)
            write_folder(config, Path(folder))
        except Exception as error:  # of any model's own code
            return {"tp1": Outcome(kind=NOT_BUILT, reason=f"transformers: {brief(error)}")}
        topologies = {"tp1": Topology(), "tp2": Topology(tp=2)}
        if any(".experts." in name for name in weights):
            topologies["ep2"] = Topology(tp=2, ep=2)
        found = {}
        for name, topology in topologies.items():
            with use_context(RuntimeContext(parallel=ParallelContext())):
                found[name] = _outcome(Path(folder), topology, weights)
        return found


def random_checkpoint(config: Any) -> dict[str, torch.Tensor]:
    """As transformers would save it, with values of both signs everywhere."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        sketch = transformers.AutoModelForCausalLM.from_config(config)
    if (size := sum(parameter.numel() for parameter in sketch.parameters())) > MOST_ELEMENTS:
        raise ValueError(f"{size / 1e6:.0f} million elements: no tiny configuration is known")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    state = revert_weight_conversion(model, state)
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in state.items()
        if tensor.is_floating_point()
    }


def _outcome(folder: Path, topology: Topology, weights: Mapping[str, torch.Tensor]) -> Outcome:
    """The worst of its ranks."""
    manifest = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    found, unused = [], set(weights)
    for rank in topology.ranks():
        try:
            model = build_shard(publish_args(folder, **_HYBRID_ON_A_CPU), rank)
        except Exception as error:
            return Outcome(kind=NOT_BUILT, reason=f"SGLang on a CPU: {brief(error)}")
        try:
            plan = trace_shard_plan(model, manifest, WeightLayout.of_model(model).fingerprint)
        except UnplannableModelError as error:
            found.append(_by_names(model, weights, error))
            continue
        unused &= set(plan.unused_sources)
        found.append(_compared(model, plan, weights))
    worst = min(found, key=lambda each: [WRONG, REFUSED, LOADER, EXACT].index(each.kind))
    if worst.kind == EXACT and unused:
        return Outcome(kind=REFUSED, reason=f"no rank takes {shortened(unused)}")
    return worst


def _by_names(
    model: Any, weights: Mapping[str, torch.Tensor], cause: UnplannableModelError
) -> Outcome:
    manifest = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    try:
        plan = plan_by_names(model, manifest, "")
    except UnplannableModelError as error:
        return Outcome(kind=REFUSED, reason=brief(error))
    if plan.missing_targets:
        return Outcome(kind=REFUSED, reason=f"nobody sends {shortened(plan.missing_targets)}")
    if plan.unused_sources:
        return Outcome(kind=REFUSED, reason=f"its loader knows no {shortened(plan.unused_sources)}")
    try:
        model.load_weights((name, tensor.clone()) for name, tensor in weights.items())
    except Exception as error:
        return Outcome(kind=REFUSED, reason=f"its loader fails: {brief(error)}")
    return Outcome(kind=LOADER, reason=brief(cause))


def _compared(model: Any, plan: ShardPlan, weights: Mapping[str, torch.Tensor]) -> Outcome:
    """The plan's result against the loader's."""
    flat = [tensor.contiguous().view(-1) for tensor in weights.values()]
    try:
        model.load_weights((name, tensor.clone()) for name, tensor in weights.items())
    except Exception as error:
        return Outcome(kind=REFUSED, reason=f"its loader fails: {brief(error)}")
    for name, parameter in model.named_parameters():
        if name not in plan.targets:
            continue
        planned = torch.full_like(parameter.data, -7.0)
        for piece in plan.targets[name]:
            piece.apply(flat, planned.view(-1))
        if not torch.equal(planned, parameter.data):
            return Outcome(kind=WRONG, reason=name)
    if plan.missing_targets:
        return Outcome(kind=REFUSED, reason=f"nobody sends {shortened(plan.missing_targets)}")
    if plan.computed_targets:
        return Outcome(kind=LOADER, reason=f"computes {shortened(plan.computed_targets)}")
    return Outcome(kind=EXACT)


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    text = re.sub(r"0x[0-9a-f]+|/\S+/", "", text)
    return f"{type(error).__name__}: {text[:150]}"


def shortened(names: Any) -> str:
    kinds = sorted({re.sub(r"\.\d+\.", ".N.", name) for name in names})
    return ", ".join(f"`{kind}`" for kind in kinds[:3]) + (" ..." if len(kinds) > 3 else "")


def rows(found: Mapping[str, Mapping[str, Outcome]]) -> Iterator[str]:
    for architecture, by_topology in found.items():
        cells = [by_topology[t].kind if t in by_topology else "-" for t in ("tp1", "tp2", "ep2")]
        reasons = dict.fromkeys(each.reason for each in by_topology.values() if each.reason)
        yield f"| {architecture} | {' | '.join(cells)} | {'; '.join(reasons)} |"


def page(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    built = {a: o for a, o in found.items() if all(e.kind != NOT_BUILT for e in o.values())}
    exact = [a for a, o in built.items() if all(e.kind == EXACT for e in o.values())]
    counts = (
        f"{len(found)} architectures, {len(built)} built under every topology, {len(exact)} of these exact under every "
        f"one.\n"
    )
    head = "| architecture | TP 1 | TP 2 | TP 2, EP 2 | reason |\n|---|---|---|---|---|\n"
    return "\n".join([_INTRODUCTION, counts, head + "\n".join(rows(found))]) + "\n"


def sweep(only: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """Outcomes as they are found."""
    for architecture, model_type in shared_architectures().items():
        if not only or architecture in only:
            yield architecture, outcomes_of(architecture, model_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = {}
    for architecture, outcomes in sweep(options.only):
        found[architecture] = outcomes
        print(*rows({architecture: outcomes}), flush=True)
    if options.write:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
