"""A tiny random Qwen3 on disk, and what Hugging Face generates from it: the oracle of the topology tests.

Not Qwen2, whose attention in upstream knows no DP attention: its first request ends every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.models import VOCAB_SIZE, tokenizer


def write_tiny_qwen(path: Path, *, seed: int = 0) -> Path:
    """Config, float32 weights (wide enough apart that greedy decoding never ties) and a tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def greedy_by_transformers(
    path: Path, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """The next tokens of each prompt by argmax over Hugging Face's full forward pass, no cache, no padding."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(new_tokens):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
