"""A tiny configuration of any causal language model that transformers knows: its own defaults, made small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from families import VOCAB_SIZE, _tokenizer
from transformers import CONFIG_MAPPING

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 8,
    "n_inner": 192,
    "n_positions": 512,
    "ffn_dim": 192,
    "word_embed_proj_dim": 128,
    "sliding_window": 256,
}
_ONLY_IF_SET = ("q_lora_rank", "sliding_window", "head_dim")
_MLA = {
    "num_key_value_heads": 8,
    "moe_layer_freq": 1,
    "q_lora_rank": 32,
    "head_dim": 16,
    "rope_scaling": {  # SGLang builds MLA on a CPU only with it
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
}
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": _MLA | {"scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v3": _MLA | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 2},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"route_norm": True, "first_k_dense_replace": 1, "qk_norm": True},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB_SIZE},
    "hunyuan_v1_dense": {"head_dim": 16, "use_qk_norm": True},
    "hunyuan_v1_moe": {
        "head_dim": 16,
        "use_qk_norm": True,
        "moe_intermediate_size": [192, 192],
        "moe_topk": [2, 2],
        "num_shared_expert": [1, 1],
        "use_mixed_mlp_moe": True,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 192},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 192,
        "expert_ffn_hidden_size": 64,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 64, "n_groups": 2},
    "kimi_linear": {
        "mlp_layer_types": ["sparse", "sparse"],
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
    "olmo": {"num_key_value_heads": 8},
    "olmo2": {"num_key_value_heads": 8},
    "olmoe": {"num_key_value_heads": 8},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, architecture: str) -> Any:
    """Raises whatever the configuration class does with what it is given."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    values = {
        name: value
        for name, value in _SMALL.items()
        if name in default and not (name in _ONLY_IF_SET and default[name] is None)
    }
    if default.get("layer_types") is not None:
        values["layer_types"] = _both_kinds(default["layer_types"])
    values |= _OWN.get(model_type, {})
    return config_class(**values, architectures=[architecture], dtype="float32")


def _both_kinds(layer_types: list[str]) -> list[str]:
    """Two layers that show every kind, when there are at most two."""
    kinds = list(dict.fromkeys(layer_types))
    return (kinds + kinds)[:2]


def write_folder(config: Any, folder: Path) -> None:
    """What `ModelConfig` accepts as model path, without weights."""
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
