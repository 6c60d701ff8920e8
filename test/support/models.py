"""Tiny random models and a tokenizer, made on the spot: nothing is downloaded.

A model is named by its configuration and a seed, so any process (engine, trainer, test) can make the same weights
without sending them. `write_model` is what an engine's `model_path` needs; `new_model` is the Hugging Face oracle.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
ENGINE_SEED = 0
"""The weights that the engines' checkpoints hold; whatever else an engine holds came over the wire."""


def qwen2_config(**changes: Any) -> Any:
    """Two layers with grouped heads and qkv bias, untied, float32: 1.4 M parameters."""
    from transformers import Qwen2Config

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": "float32",
        "architectures": ["Qwen2ForCausalLM"],
    }
    return Qwen2Config(**(fields | changes))


def new_model(seed: int, config: Any = None) -> Any:
    """A Hugging Face model in float32 and eval mode whose weights depend on the seed alone."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config or qwen2_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
        for name, parameter in model.named_parameters():
            # The usual start: all biases 0, all norms 1. A tensor that stayed behind would not show.
            if parameter.ndim == 1:
                offset = 0.0 if name.endswith("bias") else 1.0
                parameter.data.normal_(offset, 0.1)
            else:
                parameter.data.normal_(0.0, 0.08)
    return model


def checkpoint_of(model: Any) -> dict[str, Any]:
    """The state dict under the names of a checkpoint: transformers keeps experts fused in memory, but not on disk."""
    state: dict[str, Any] = model.state_dict()
    if not any(".experts.gate_up_proj" in name for name in state):
        return state
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def write_model(path: Path, *, seed: int = ENGINE_SEED, config: Any = None) -> Path:
    """Write config, weights and tokenizer as an engine's `model_path`."""
    new_model(seed, config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@functools.cache
def tokenizer() -> Any:
    """A byte-level BPE with a chat template, over `VOCAB_SIZE` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [first + second for first in consonants for second in vowels]
    words = [a + b + c for a in syllables[::3] for b in syllables[::5] for c in syllables[::7]]
    bpe.train_from_iterator([" ".join(words)], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=special[2], pad_token=special[0], bos_token=special[0]
    )
    made.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made
