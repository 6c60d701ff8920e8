"""A tiny random Qwen2 on disk, and what Hugging Face generates from it: the oracle of the topology tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

VOCAB_SIZE = 512


def write_tiny_qwen(path: Path, *, seed: int = 0) -> Path:
    """Config, float32 weights (wide enough apart that greedy decoding never ties) and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(path)
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2", pad_token="w1"
    ).save_pretrained(path)
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
