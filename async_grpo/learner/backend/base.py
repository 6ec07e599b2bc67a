"""What trains a model over the learner ranks, as the learner sees it.

Runs in: learner ranks. Hides which framework it is, and how it steps, saves and loads: `deepspeed`
is the one there is. Another is a folder beside it, named where the learner names DeepSpeed's. Every
method is called on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from async_grpo.learner.division import Division
from async_grpo.learner.model import PolicyModel
from async_grpo.learner.packing import Packed


class RunnableModel(Protocol):
    """A model that computes on the ranks' devices."""

    @property
    def module(self) -> PolicyModel:
        """The model itself."""

    def __call__(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [M] of the response tokens, and entropies [M]: the forward pass."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model that a rank runs by itself."""

    module: PolicyModel

    def __call__(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `RunnableModel`."""
        logprobs, entropy = self.module(packed, temperature, with_entropy)
        return logprobs, entropy


class TrainedModel(RunnableModel, Protocol):
    """The policy, with its optimizer."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a rank's share of the loss; losses of all ranks are added."""

    def step(self, lr: float) -> float:
        """Clip, step with this learning rate and forget the gradients; the global norm before
        clipping.
        """

    def save(self, directory: str, state: dict[str, Any], *, layout: dict[str, Any]) -> None:
        """Write weights, optimizer and random state, and `state` (plain values), for an exact
        `load`. layout: what the learner's settings make of the model; where its `base` is not None,
        only what is trained is written. Raises StorageFailure, on every rank.
        """

    def load(self, directory: str, *, layout: dict[str, Any]) -> dict[str, Any]:
        """Restore what `save` wrote; its `state`. Raises ValueError for what cannot be continued
        with this layout.
        """

    def bytes_to_save(self, *, only_trained: bool) -> int:
        """Estimate the bytes that this rank writes with `save`."""


class Backend(Protocol):
    """One rank's half of the framework; made, it has joined the process group of the ranks."""

    division: Division
    """Where the parameters of its models live."""

    def loading(self, *, frozen: bool) -> AbstractContextManager[None]:
        """Divide a model that is loaded inside, where ranks share it."""

    def train(self, model: PolicyModel) -> TrainedModel:
        """Make a loaded model one that is trained."""

    def freeze(self, model: PolicyModel) -> RunnableModel:
        """Make a loaded model one that only computes."""

    def holders(self) -> Sequence[object]:
        """Models and optimizers, which hold all tensors that stay on this rank's device."""

    def close(self) -> None:
        """Free the models and leave the process group."""
