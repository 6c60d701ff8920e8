"""Tiny random models of every family that must be buildable anywhere, as `config.json` folders or whole checkpoints."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

VOCAB_SIZE = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "dtype": "float32",
}


def _qwen2() -> transformers.PretrainedConfig:
    return transformers.Qwen2Config(
        **_COMMON, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]
    )


def _qwen3() -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(
        **_COMMON, head_dim=16, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"]
    )


def _llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        **_COMMON, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]
    )


def _llama_tied() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        **_COMMON, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]
    )


def _gemma() -> transformers.PretrainedConfig:
    return transformers.GemmaConfig(
        **_COMMON,
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        architectures=["GemmaForCausalLM"],
    )


def _gemma2() -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(
        **_COMMON,
        head_dim=16,
        sliding_window=256,
        query_pre_attn_scalar=16,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        architectures=["Gemma2ForCausalLM"],
    )


def _qwen3_moe() -> transformers.PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_COMMON,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )


def _deepseek_v3() -> transformers.PretrainedConfig:
    values = _COMMON | {"num_key_value_heads": 8}
    return transformers.DeepseekV3Config(
        **values,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_scaling={
            "rope_type": "yarn",
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        tie_word_embeddings=False,
        architectures=["DeepseekV3ForCausalLM"],
    )


FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "llama": _llama,
    "llama-tied": _llama_tied,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "qwen3-moe": _qwen3_moe,
    "deepseek-v3": _deepseek_v3,
}
MOE_FAMILIES = ("qwen3-moe", "deepseek-v3")


def write_config(family: str, folder: Path) -> Path:
    """A folder that `ModelConfig` accepts as model path: config.json and a tokenizer, no weights."""
    FAMILIES[family]().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def write_checkpoint(family: str, folder: Path) -> Path:
    """As `write_config`, with random weights that Hugging Face's own class wrote."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.to(torch.float32).save_pretrained(folder)
    return write_config(family, folder)


@functools.cache
def checkpoint_shapes(family: str) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint of the family, as Hugging Face's own class has them.

    transformers 5 keeps experts fused in memory; checkpoints, and what trainers send, have one matrix an expert.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in [*model.named_parameters(), *_score_biases(model)]:
        shapes |= _unfused(name, tuple(parameter.shape))
    return shapes


def _score_biases(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]


def _unfused(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if match is None or len(shape) != 3:
        return {name: shape}
    experts, (count, rows, columns) = match.group(1), shape
    if match.group(2) == "down_proj":
        return {f"{experts}.{e}.down_proj.weight": (rows, columns) for e in range(count)}
    return {
        f"{experts}.{e}.{half}.weight": (rows // 2, columns)
        for e in range(count)
        for half in ("gate_proj", "up_proj")
    }


@functools.cache
def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|a|>", "<|b|>", "<|c|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(["some plain words to learn merges from"] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|c|>")
