"""The models of the weight benchmark, and their weights without a learner.

Runs in: the processes of `benchmarks.weight_sync`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2ForCausalLM

from benchmarks.tails import random_qwen2


@dataclass(frozen=True)
class Size:
    """A Qwen2 with random weights, and how the parts load it.

    rounds: of the copies. sequences, response: responses that the engine generates at the same
    time, and their mean length. period_s: between publications while rollout time is measured.
    needs_gb: free memory that the learner needs.
    """

    name: str
    vocabulary: int
    hidden: int
    layers: int
    dtype: str = "float32"
    ranks: int = 2
    rounds: int = 30
    sequences: int = 64
    response: int = 32
    period_s: float = 1.0
    needs_gb: float = 2.0

    def build(self) -> Qwen2ForCausalLM:
        """The model, drawn from torch's global generator."""
        return random_qwen2(self.vocabulary, self.hidden, self.layers, dtype=self.dtype)

    def write(self, directory: Path) -> str:
        """The model as files; no response of it ever ends by itself."""
        torch.manual_seed(0)
        self.build().save_pretrained(directory)
        return str(directory)


SIZES = {
    size.name: size
    for size in (
        Size("1M", 512, 128, 4),
        Size("14M", 3_000, 384, 5),
        Size("100M", 10_000, 768, 9, rounds=15, sequences=16, period_s=4.0, needs_gb=6.0),
        Size(
            "500M",
            15_000,
            1_536,
            12,
            dtype="bfloat16",
            ranks=1,
            rounds=7,
            sequences=4,
            period_s=8.0,
            needs_gb=16.0,
        ),
    )
}


class PlainWeights:
    """A model's files as a learner of one rank that does not train; the sender's `WeightOwner`."""

    rank, world_size, device, sharded = 0, 1, "cpu", False

    def __init__(self, directory: str) -> None:
        self._weights: dict[str, Tensor] = {}
        for path in sorted(Path(directory).glob("*.safetensors")):
            self._weights |= {
                name: weight.clone() for name, weight in load_file(path).items()
            }  # in memory, not a mapped file

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype name of every weight."""
        return [
            (name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."))
            for name, weight in self._weights.items()
        ]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights."""
        yield from self._weights.items()
