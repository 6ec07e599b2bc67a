"""An engine as the product sees it: what it takes before it starts (`EngineKind`), and how it
generates groups and takes new weights while it does (`Engine`).

Runs in: rollout actors, learner ranks (what pushes weights to it), and the driver (estimates, the
trial of a model). Hides which engine it is: `vllm` is the one there is, another is a folder beside
it, named where `choice` names vLLM's. Token-in, token-out: no text enters or leaves a running one.

Invariants, which every engine holds: `serving` is the label that new tokens carry, with adapters
(`weight_sync.lora`) those of new requests; it changes only inside `receive`, between the load and
the resume, and its version never falls. An engine whose weights may be a mixture stays paused. A
response keeps its tokens over a publication, and with adapters its label. Every returned token has
a finite log-prob under the distribution it was sampled from and a version; anything else raises.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from async_grpo.config.operation import EngineConfig
from async_grpo.config.schema import Config
from async_grpo.weights.transport import Announcement, Receipt, WeightSender, parse_label
from async_grpo.wire.codec import VersionSpan
from async_grpo.wire.kept import KeptSets

if TYPE_CHECKING:
    from torch import Tensor

Purpose = Literal["rollouts", "probes", "evaluated"]


class EngineError(RuntimeError):
    """The engine died, or returned a response that must not be trained."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response: token_ids [L] int32, logprobs [L] float32 (processed: temperature included),
    labels by span of tokens. finish_reason: "" for a partial response. first_token: when the
    request's first token came, in Unix seconds. cached_tokens: of its prompt, which were not
    computed again; salt: of the prefix cache, the label that was served when the request came.
    routes: experts of the prompt's tokens and all of the response's but the last, of every layer
    [T, layers * experts of a token], where `learner.routing_replay` is r3 and it has ended.
    kept: of which tokens each was sampled, where that was asked for; empty where that is not known.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    labels: list[tuple[str, int, int]]
    finish_reason: str
    first_token: float
    cached_tokens: int = 0
    salt: str = ""
    routes: np.ndarray | None = None
    kept: KeptSets | None = None

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
    schema: JSON schema that the response must have. kept: return of which tokens each was sampled,
    at most `top_k` and those that are as probable as the last of them.
    """

    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition: tuple[int, int] | None = None
    ignore_eos: bool = False
    schema: dict[str, Any] | None = None
    kept: bool = False


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
        """Partial responses of a running `generate`, by index; the last tokens may be missing."""

    def cut_off(self, name: str) -> int:
        """Tokens of a request for rollouts that was aborted or refused; the second call gives 0."""

    async def score(
        self, sequences: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[list[str], np.ndarray]]:
        """Log-probs [L] of each response at temperature 1, with the labels of the weights."""

    async def top_logprobs(
        self, sequences: Sequence[tuple[list[int], list[int]]], top_k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Log-probs [L, 1 + top_k] float32 of each response at temperature 1: of the token itself,
        and in falling order of the most probable ones in its place, and their ids [L, top_k] int32.
        """

    async def classify(self, sequences: Sequence[list[int]]) -> list[float]:
        """Score of the last token of each sequence, without activation, by a sequence classifier
        with one label; nothing else is to be had of one.
        """

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare for publications (where they are pushed: join the group, as the learner does)."""

    async def receive(self, announcement: Announcement) -> Receipt:
        """Serve the announced weights: pause with requests kept, load, label, resume. With a
        failure in the receipt, weights may be mixed and the engine stays paused until a publication
        succeeds. With adapters it pauses nobody, and a failure changes nothing.

        Raises TimeoutError for a phase beyond its deadline, ValueError for a version older than the
        served one; then the engine must be replaced.
        """

    async def sleep(self) -> int:
        """Give the GPU's memory back, all but what its process needs; running responses are kept
        and go on after `wake` or `receive`. Tokens whose caches are lost.
        """

    async def wake(self) -> None:
        """Go on with the weights that it serves; not where they may be mixed."""

    async def attend(self, announcement: Announcement) -> Receipt:
        """Take part in a publication that is pushed, and go on with the served weights."""

    async def check(self) -> None:
        """Raise EngineError when its process is gone."""

    def close(self) -> None:
        """Stop its process."""


class TriedEngine(Protocol):
    """An engine on CPU, in this process, of a small copy of a model."""

    def logprobs(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probs of all tokens but the first of every row, one after the other."""

    def publish(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors as a worker of a run loads a publication."""


class EngineKind(Protocol):
    """What is known of an engine before one starts; without importing its library, except where a
    method says so.
    """

    name: str
    """In sentences for users."""
    packages: Sequence[str]
    """Distributions on whose versions `refusal` and trials depend."""
    gpu_bytes: int
    """What an engine on a GPU takes beside weights and KV cache, about."""

    def set_environment(self, device: str) -> None:
        """Set the library's switches, before it is imported."""

    def kv_cache_gb(self, config: Config, *, device: str, backend: str) -> float | None:
        """KV cache per engine GPU or process in GiB; None where the library chooses."""

    def max_num_seqs(self, config: Config, *, device: str) -> int | None:
        """Responses that one engine generates at the same time; None where the library chooses."""

    def adapter_rank(self, rank: int) -> int:
        """Rank that it allocates for adapters of a rank. Raises SetupError for one too large."""

    def serving(self, settings: EngineConfig, *, scores: bool) -> EngineConfig:
        """Return the settings of an engine that scores sequences, or answers by a schema."""

    def begin(self, device: str, *, cores: Collection[int] = ()) -> Any:
        """Begin what `start` will need, on these cores or any; called before torch is imported."""

    async def start(
        self,
        config: Config,
        *,
        model_dir: str,
        device: str,
        backend: str,
        stop_token_ids: Sequence[int],
        label: str,
        seed: int,
        early: Any = None,
    ) -> Engine:
        """Load `model_dir` on `cpu` or `cuda`, serving as `label`; imports the library. backend:
        the weight transport; early: from `begin`.
        """

    def pushing_sender(self) -> type[WeightSender]:
        """Return the learner's half of a transport that pushes; imports the library."""

    def parser_for(self, template: str) -> str | None:
        """Name the parser of tool calls for a chat template; None where none is known."""

    def call_reader(
        self, parser: str, tokenizer: Any, tools: Sequence[dict[str, Any]]
    ) -> Callable[[str], tuple[str, list[dict[str, Any]], str]]:
        """Return what reads a turn's text: its content, its calls as chat interfaces write them,
        and what is wrong with one that cannot be read; imports the library. Raises SetupError for a
        parser that there is not, or that does not fit the tokenizer.
        """

    def trial_arguments(self, config: Config, *, model: str, device: str) -> dict[str, Any]:
        """Build plain values for `refusal` and `tried` that do not depend on the machine; `model`,
        `dtype` and `trust_remote_code` are among them.
        """

    def refusal(self, arguments: dict[str, Any], *, device: str) -> str:
        """Return why the library does not take a model, or ""; imports it."""

    def tried(self, arguments: dict[str, Any], *, directory: str, dtype: str) -> TriedEngine:
        """Start an engine of the model in `directory`; imports the library, and raises whatever it
        raises for a model that it cannot run.
        """

    def in_words(self, error: Exception) -> str:
        """Say in a line what the library raised; "" where it has no words."""


def stop_tokens(model_dir: str, eos_token_id: int | None) -> list[int]:
    """Token ids that end a response: the tokenizer's eos, and the model's generation config's."""
    from transformers.utils import cached_file

    ids = set() if eos_token_id is None else {eos_token_id}
    found = cached_file(
        model_dir, "generation_config.json", _raise_exceptions_for_missing_entries=False
    )
    if found is not None:
        eos = json.loads(Path(found).read_text(encoding="utf-8")).get("eos_token_id")
        ids |= set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
    if not ids:
        raise ValueError(
            f"{model_dir} names no end-of-sequence token, so no response could end; add "
            "one to its tokenizer"
        )
    return sorted(ids)
