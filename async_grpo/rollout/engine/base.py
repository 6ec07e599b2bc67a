"""An engine as the product sees it: it generates groups and takes new weights while it does.

Runs in: rollout actors. Hides which engine it is: `vllm` has the one that there is. Token-in,
token-out: no text enters or leaves.

Invariants, which every engine holds: `serving` is the label that new tokens carry; it changes only
inside `receive`, between the load and the resume, and its version never falls. An engine whose
weights may be a mixture stays paused. A response keeps its tokens over a publication. Every
returned token has a finite log-prob under the distribution it was sampled from and a version;
anything else raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from async_grpo.weights.transport import Announcement, Receipt, parse_label
from async_grpo.wire.codec import VersionSpan

Purpose = Literal["rollouts", "probes", "evaluated"]


class EngineError(RuntimeError):
    """The engine died, or returned a response that must not be trained."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response: token_ids [L] int32, logprobs [L] float32 (processed: temperature included),
    labels by span of tokens. finish_reason: "" for a partial response. first_token: when the
    request's first token came, in Unix seconds. cached_tokens: of its prompt, which were not
    computed again; salt: of the prefix cache, the label that was served when the request came.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    labels: list[tuple[str, int, int]]
    finish_reason: str
    first_token: float
    cached_tokens: int = 0
    salt: str = ""

    @property
    def versions(self) -> list[VersionSpan]:
        """Policy versions by span. Raises ValueError for a label that is no version."""
        return [
            VersionSpan(parse_label(label).step, start, end) for label, start, end in self.labels
        ]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; `seed` None draws from the engine's own generator.
    repetition: (longest pattern, times) after which a response ends. ignore_eos: no token ends it.
    """

    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    repetition: tuple[int, int] | None = None
    ignore_eos: bool = False


class Engine(Protocol):
    """One engine that has started."""

    serving: str
    """Label of the served weights."""
    stop_token_ids: list[int]

    @property
    def serving_version(self) -> int:
        """Served policy version; -1 before the first publication and during the self-check."""

    @property
    def max_num_seqs(self) -> int:
        """Responses that it generates at the same time."""

    @property
    def unfinished(self) -> int:
        """Responses of named requests that have not ended, begun or not."""

    @property
    def paused(self) -> bool:
        """Whether a publication runs, or has left weights that may be a mixture."""

    @property
    def sampled(self) -> Counter[str]:
        """Tokens sampled so far: `total`, running requests included; by purpose, of ended ones."""

    @property
    def speeds(self) -> dict[str, float]:
        """Seconds, tokens and steps so far, by how many responses ran (`speeds.Speeds`)."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        name: str = "",
        purpose: Purpose = "rollouts",
    ) -> list[Completion]:
        """Generate `sampling.n` responses to one prompt; cancelling aborts the request. name: for
        `so_far`, `unfinished` and `cut_off`; no two requests have the same. Raises EngineError.
        """

    def so_far(self, name: str) -> dict[int, Completion]:
        """Partial responses of a running `generate`, by index."""

    def cut_off(self, name: str) -> int:
        """Tokens of a request for rollouts that was aborted or refused; the second call gives 0."""

    async def score(
        self, sequences: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[list[str], np.ndarray]]:
        """Log-probs [L] of each response at temperature 1, with the labels of the weights."""

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare for publications (where they are pushed: join the group, as the learner does)."""

    async def receive(self, announcement: Announcement) -> Receipt:
        """Serve the announced weights: pause with requests kept, load, label, resume. With a
        failure in the receipt, weights may be mixed and the engine stays paused until a publication
        succeeds.

        Raises TimeoutError for a phase beyond its deadline, ValueError for a version older than the
        served one; then the engine must be replaced.
        """

    async def attend(self, announcement: Announcement) -> Receipt:
        """Take part in a publication that is pushed, and go on with the served weights."""

    async def check(self) -> None:
        """Raise EngineError when its process is gone."""

    def close(self) -> None:
        """Stop its process."""
