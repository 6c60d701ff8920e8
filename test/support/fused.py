"""An engine's parameters made by hand from Hugging Face's: an oracle that shares nothing with the product's planning.

Covers what the tiny models have: qkv and gate/up fused along dim 0, one rank; everything else keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def fused_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's parameter name -> tensor, from a Hugging Face state dict; a tied head is left out by the caller."""
    import torch

    result: dict[str, Any] = {}
    parts = {part: (fused, of) for fused, of in FUSED.items() for part in of}
    for name, tensor in state.items():
        module = name.split(".")[-2]
        if module not in parts:
            result[name] = tensor
            continue
        fused, of = parts[module]
        if module == of[0]:
            siblings = [state[name.replace(module, sibling)] for sibling in of]
            result[name.replace(module, fused)] = torch.cat(siblings)
    return result
