"""A random Qwen2 and its tokenizer, made on the spot.

Nothing is downloaded: the tokenizer is a byte-level BPE trained on invented words, the model is
a fresh random one of a chosen size in float32.  Two sets of weights come from two seeds: the one
written to disk, which the engine loads, and the trainer's own (``new_policy``), which the engine
can only have received over the wire.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where used: the driver needs the names below, not the packages
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""They take the first ids of the vocabulary; the demo neither prompts with nor rewards them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The shape of one model that ``--model-size`` names, and a learning rate that suits it."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    learning_rate: float

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model size {self!r}: num_heads must divide hidden_size, "
                f"and num_kv_heads must divide num_heads"
            )

    def config(self) -> Qwen2Config:
        from transformers import Qwen2Config

        return Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=2,
            tie_word_embeddings=False,
            dtype="float32",
            architectures=["Qwen2ForCausalLM"],
        )


MODEL_SIZES = {
    "tiny": ModelSize(
        hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, learning_rate=1e-3
    ),
    "small": ModelSize(
        hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=4, learning_rate=3e-4
    ),
    "medium": ModelSize(
        hidden_size=1024, num_layers=8, num_heads=16, num_kv_heads=8, learning_rate=1.5e-4
    ),
}


def new_policy(size: ModelSize, *, seed: int) -> Qwen2ForCausalLM:
    """A float32 model with random weights that depend on ``seed`` alone."""
    import torch
    from transformers import Qwen2ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(size.config()).to(torch.float32)


def write_model(path: Path, *, size: ModelSize, seed: int) -> int:
    """Write config, random weights and tokenizer as an engine's ``model_path``.

    Returns the number of parameters.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would end up in the middle of the demo's own lines
    model = new_policy(size, seed=seed)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return model.num_parameters()


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_invented_lines(), trainer)
    assert bpe.get_vocab_size() == VOCAB_SIZE, bpe.get_vocab_size()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[2]
    )


def _invented_lines() -> Iterator[str]:
    """Enough syllables for the BPE to find all its merges, the same ones each time."""
    draw = random.Random(0)
    for _ in range(200):
        yield " ".join(
            "".join(draw.choice("ptkmnslr") + draw.choice("aeiou") for _ in range(3))
            for _ in range(8)
        )
