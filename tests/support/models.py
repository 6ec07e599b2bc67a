"""Tiny random models for the tests: a character tokenizer and a Qwen2 architecture, written to a
directory.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = list(string.printable[:95])


def write_tokenizer(path: Path) -> None:
    """One token per character, beside padding (0), the end (1) and what is unknown (2)."""
    vocabulary = {
        token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(path)


def write_model(
    path: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    hidden: int = 64,
    positions: int = 1024,
    ends: bool = True,
) -> str:
    """A random two-layer Qwen2 with a 100-entry character vocabulary; id 0 is padding, id 1 ends a
    response unless `ends` is off.
    """
    write_tokenizer(path)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        eos_token_id=1 if ends else None,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.15,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(path)
    return str(path)


class ModuleOwner:
    """What a weight sender needs of a learner, around a plain model."""

    rank, world_size = 0, 1
    device = "cpu"
    sharded = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        return [
            (name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in self.model.named_parameters()
        ]

    def named_weights(self):
        yield from ((name, p.detach()) for name, p in self.model.named_parameters())
