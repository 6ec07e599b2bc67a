"""The long-tail workload of the throughput benchmarks: a random model whose responses have
geometric lengths, and a task of chance.

Runs in: the benchmarks, and as a task in every process of a run. Nothing is pretended: the tokens
are sampled, and a response ends when the model samples one of its end-of-sequence tokens. The head
of a fresh model is nearly uniform, so that each token ends the response with a probability of about
(end tokens) / (vocabulary), whatever came before it: geometric lengths, cut off at the longest
response.
"""

from __future__ import annotations

import json
import random
import string
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from async_grpo.config import schema
from async_grpo.tasks.base import Problem, Score

PROMPT_TOKENS = (12, 36)
"""Shortest and longest prompt of the task."""
TRAIN_PROBLEMS = 2**20
_SPECIAL = ["<pad>", "<eos>", "<unk>"]
_CHARACTERS = string.printable[:95]


def random_qwen2(
    vocabulary: int,
    hidden: int,
    layers: int,
    *,
    positions: int = 1_024,
    end: int | None = None,
    dtype: str = "float32",
) -> Qwen2ForCausalLM:
    """A Qwen2 drawn from torch's global generator. end: id of the token that ends a sequence."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
        pad_token_id=0,
    )
    config.dtype = getattr(torch, dtype)
    return Qwen2ForCausalLM(config).to(config.dtype)


@dataclass(frozen=True)
class TailModel:
    """A Qwen2 with random weights. mean: of a response's tokens, before it is cut off; None: no
    response ends by itself.
    """

    name: str
    hidden: int
    layers: int
    vocabulary: int = 3_000
    mean: float | None = 70.0
    positions: int = 1_024

    @property
    def end_tokens(self) -> list[int]:
        """Ids that end a response."""
        return (
            []
            if self.mean is None
            else list(range(1, 1 + max(1, round(self.vocabulary / self.mean))))
        )

    def build(self) -> Qwen2ForCausalLM:
        """The model, drawn from torch's global generator."""
        shape = self.vocabulary, self.hidden, self.layers
        return random_qwen2(*shape, positions=self.positions, end=1)

    def write(self, directory: Path) -> str:
        """Model and tokenizer as files."""
        names = _SPECIAL + list(_CHARACTERS)
        names += [f"<{index}>" for index in range(len(names), self.vocabulary)]
        tokenizer = Tokenizer(
            models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
        torch.manual_seed(0)
        self.build().save_pretrained(directory)
        settings = {"eos_token_id": self.end_tokens or 1, "pad_token_id": 0}
        (directory / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return str(directory)


MODELS = {
    model.name: model
    for model in (
        TailModel("1M", 128, 4, 512),
        TailModel("14M", 384, 5),
        TailModel("100M", 768, 9, 10_000),
    )
}


class Tails:
    """Prompts of random characters; the reward is a bit of the response's checksum, so that groups
    carry signal from the first step.
    """

    weights: ClassVar[dict[str, float]] = {"correct": 1.0}
    fingerprint = "tails-1"

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        """Options: `seconds` that the verifier takes for a response."""
        self._seconds = float(settings.options.get("seconds", 0.0))

    def __len__(self) -> int:
        return TRAIN_PROBLEMS

    def train(self, index: int) -> Problem:
        return Problem(prompt_of(index), None)

    def evaluation(self, n: int) -> list[Problem]:
        return []

    def score(self, response: str, reference: Any) -> Score:
        time.sleep(self._seconds)
        right = float(zlib.crc32(response.encode()) & 1)
        return Score({"correct": right}, right)


def prompt_of(index: int) -> str:
    """The prompt of a problem: letters, a token each."""
    draw = random.Random(index)
    return "".join(draw.choices(string.ascii_letters, k=draw.randint(*PROMPT_TOKENS)))
