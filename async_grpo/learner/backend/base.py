"""What trains a model over the learner ranks, as the learner sees it.

Runs in: learner ranks. Hides which framework it is, and how it steps, saves and loads: `deepspeed`
is the one there is. Every method is called on all ranks. Where a parameter lives is no part of the
protocol yet: the learner's other modules ask `deepspeed.division`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from async_grpo.learner.model import PolicyModel
from async_grpo.learner.packing import Packed


class TrainedModel(Protocol):
    """The policy, with its optimizer."""

    module: PolicyModel

    def __call__(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [M] of the response tokens, and entropies [M]: the forward pass."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a rank's share of the loss; losses of all ranks are added."""

    def step(self, lr: float) -> float:
        """Clip, step with this learning rate and forget the gradients; the global norm before
        clipping.
        """

    def save(
        self, directory: str, state: dict[str, Any], *, rank: int, layout: dict[str, Any]
    ) -> None:
        """Write weights, optimizer and random state, and `state` (plain values), for an exact
        `load`. Raises StorageFailure, on every rank.
        """

    def load(self, directory: str, *, rank: int, layout: dict[str, Any]) -> dict[str, Any]:
        """Restore what `save` wrote; its `state`. Raises ValueError for what cannot be continued
        with this layout.
        """

    def close(self) -> None:
        """Free the model."""


class Backend(Protocol):
    """One rank's half of the framework; made, it has joined the group of the ranks."""

    sharded: bool
    """Whether no rank holds the whole model."""

    def loading(self, *, frozen: bool) -> AbstractContextManager[None] | None:
        """Divide a model that is loaded inside, where ranks share it; None where they do not."""

    def train(self, model: PolicyModel) -> TrainedModel:
        """Make a loaded model one that is trained."""

    def freeze(self, model: PolicyModel) -> nn.Module:
        """Make a loaded model one that only computes."""

    def close(self) -> None:
        """Leave the group of the ranks."""
