"""A random dense model of a given size and number of tensors, made on the spot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))
from support.models import VOCAB_SIZE, qwen2_config, tokenizer

TENSORS_OF_A_LAYER = 12
OTHER_TENSORS = 3
HEAD = 64


def config_of(megabytes: float, tensors: int, dtype: str) -> Any:
    """A Qwen2 of about so many bytes in about so many Hugging Face tensors (12 a layer, and 3; fewer in small ones)."""
    elements = megabytes * 1e6 / getattr(torch, dtype).itemsize
    layers = max(1, round((tensors - OTHER_TENSORS) / TENSORS_OF_A_LAYER))
    heads = 2
    while layers > 1 and _elements(heads, layers, _inner(heads)) > elements:
        layers -= 1
    while _elements(heads + 2, layers, _inner(heads + 2)) <= elements:
        heads += 2
    inner = _inner(heads)
    step = _elements(heads, layers, inner + 1) - _elements(heads, layers, inner)
    inner += max(0, round((elements - _elements(heads, layers, inner)) / step / HEAD)) * HEAD
    return qwen2_config(
        hidden_size=heads * HEAD,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        dtype=dtype,
    )


def tensors_of(config: Any) -> int:
    return int(config.num_hidden_layers) * TENSORS_OF_A_LAYER + OTHER_TENSORS


def _inner(heads: int) -> int:
    return 3 * heads * HEAD


def _elements(heads: int, layers: int, inner: int) -> int:
    hidden, key_value = heads * HEAD, 2 * HEAD
    attention = 2 * hidden * hidden + 2 * hidden * key_value + hidden + 2 * key_value
    return layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden * (2 * VOCAB_SIZE + 1)


def write(folder: Path, config: Any, dtype: str) -> int:
    """Config, random weights and a tokenizer; returns the bytes of the weights."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    weights = {name: torch.randn(t.shape).mul_(0.02).to(kind) for name, t in shapes.items()}
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in weights.values())
