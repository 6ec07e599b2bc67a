"""The messages and the protocols of a weight transport.

Runs in: learner ranks (senders), rollout actors and engine workers (receivers), the driver
(coordinator); without torch at run time. A publication is

    learner: stage(label) -> Announcement; copies the weights out of the model, on all ranks
    driver:  hands the announcement to every engine, and lets the learner `send` at the same time
    engine:  pause (requests kept) -> load -> label -> resume -> Receipt

The learner waits for staging only. Invariant: an announcement stays valid until the next `stage`,
in shared memory until the next but one; the coordinator waits for a publication before the next
`stage`. The transports themselves stand in `config.transports`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from async_grpo.config.schema import Config, Deadlines, WeightSync
from async_grpo.config.transports import TRANSPORTS, automatic
from async_grpo.errors import FaultBudgetSpent

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


UNPUBLISHED = "unpublished"
"""Label of the weights an engine loaded from disk, before its first publication."""

SELF_CHECK = "self-check"
"""Label of the self-check's perturbed weights: no ticket exists then, so no token has it."""


PACKED_BYTES = 2**28
"""Tensors that are sent in one piece, where they are pushed; a larger one goes alone."""
ONE_SENDER_BYTES, MOST_SENDERS = 2**34, 4
"""Weights up to this size are sent by rank 0, larger ones by several ranks, with `senders: auto`.
More than these few would gain little: an engine receives over one network card, and each group has
buffers of its own on every GPU.
"""
BUCKETS_IN_FLIGHT = 2
"""Buckets that vLLM puts on its streams before it waits for the first: a call that returns says
nothing about its own bucket.
"""


class TornTransfer(RuntimeError):
    """A publication was cut off: the loaded weights may be a mixture until a complete one comes."""


class TransferStuck(FaultBudgetSpent):
    """The learner hangs in a transfer that cannot be aborted; only a new process would help."""


class Version(NamedTuple):
    """The weights after `step` learner steps of this `run_epoch`; versions of a run only grow."""

    run_epoch: int
    step: int

    @property
    def label(self) -> str:
        """The label that engines stamp on tokens."""
        return f"v{self.run_epoch}.{self.step}"


@dataclass(frozen=True, slots=True)
class Announcement:
    """One publication, as the engines need it: the label to stamp on tokens, the transport's name
    (`backend`) and the `payload` of the transport.

    digest: of the bits of all weights, "" where it was not computed. nbytes: of all weights.
    streamed: nothing was copied, so the learner must not train until the weights are sent.
    """

    label: str
    backend: str
    payload: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    nbytes: int = 0
    streamed: bool = False

    def whole(self) -> Announcement:
        """Return it without a delta: a group that is formed anew gets all weights."""
        rest = {key: value for key, value in self.payload.items() if key != "delta"}
        return replace(self, payload=rest)


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's answer to an announcement.

    serving: the label of the weights it serves now. failure: "" if it serves the announced ones;
    else the engine stays paused, or with adapters serves those before, and `reason` says why:
    `torn` (cut off: a complete publication mends it), `mismatch` (other bytes than were sent) or
    `names` (other tensors than it has).
    seconds: by phase (`pause`, `load`, `resume`), and `total`, in which it generated nothing.
    recomputed_tokens: cached tokens that
    running responses lost; kept_tokens: that they kept; kv_cache: which of the two was chosen, and
    why.
    """

    serving: str
    failure: str = ""
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    recomputed_tokens: int = 0
    kept_tokens: int = 0
    kv_cache: str = ""


TokenSequence = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response to it."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A rank's staged weights, its log-probs at temperature 1 of the requested sequences, and (with
    `stage_perturbed`) those `before`, under the true weights.
    """

    announcement: Announcement
    logprobs: list[np.ndarray] = field(default_factory=list)
    before: list[np.ndarray] = field(default_factory=list)


class WeightSender(Protocol):
    """The learner's half of a transport, one per rank; every rank makes every call. The bodies suit
    engines that read the copy on their own.
    note: what the user should know about the transport, or "".
    """

    note: str

    @classmethod
    def of(cls, owner: WeightOwner, *, config: Config, key: str) -> Self:
        """Build the sender of a rank. `key` names the shared-memory segments of the run."""

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Prepare for these engines, also anew; returns one init payload per engine, of which
        `merged_payloads` makes one of all ranks. address: of this rank's machine.
        """

    def rendezvous(self) -> str:
        """Join the group while the engines' init calls wait for it; why it failed, or ""."""
        return ""

    def reserve(self) -> None:
        """Allocate the memory for `stage(apart=True)`, where it can fail on a rank alone."""

    def stage(self, label: str, *, verify: bool, apart: bool = False) -> Announcement:
        """Copy the current weights out of the model; with `verify`, so that engines can compare the
        bytes. apart: into reserved memory, until `release`; the newest publication stays as it is.
        """

    def release(self) -> None:
        """Free the copy that was staged apart, once the engines have read it."""

    def send(self) -> str:
        """Push the staged weights; why the transfer is torn, or "" (of a copy, sent in the
        background).
        """
        return ""

    def close(self) -> None:
        """Free segments, buffers and groups."""


class WeightOwner(Protocol):
    """The learner as senders see it: full tensors under Hugging Face names, always in one order."""

    rank: int
    world_size: int
    device: str
    sharded: bool

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, full shape and dtype name (`float32`) of every published tensor."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name; collective over the learner ranks."""


def is_version(label: str) -> bool:
    """Whether a label names a policy version."""
    epoch, dot, step = label.removeprefix("v").partition(".")
    return label.startswith("v") and dot == "." and epoch.isdigit() and step.isdigit()


def parse_label(label: str) -> Version:
    """Return the version that a stamped label names. Raises ValueError for a label that names
    none.
    """
    if not is_version(label):
        raise ValueError(f"a token carries the weight version {label!r}, which no weight sync set")
    epoch, step = label[1:].split(".")
    return Version(int(epoch), int(step))


def resolve_backend(config: Config, *, device: str, colocated: bool) -> str:
    """Name of the transport of this configuration on `device` (`cpu` or `cuda`)."""
    backend = config.weight_sync.backend.name
    return backend if backend in TRANSPORTS else automatic(device=device, colocated=colocated)


def make_sender(
    backend: str,
    owner: WeightOwner,
    *,
    config: Config,
    key: str,
    pushing: Callable[[], type[WeightSender]],
) -> WeightSender:
    """Build the learner's half of a transport, whose module is imported only now: a learner on CPU
    loads no engine. key: names the run's shared-memory segments; pushing: of the engine.
    """
    module, _, name = TRANSPORTS[backend].sender.partition(":")
    kind: type[WeightSender] = getattr(import_module(module), name) if module else pushing()
    return kind.of(owner, config=config, key=key)


def fallback_directory(config: Config) -> Path:
    """Directory of the segments when /dev/shm has no room for them."""
    return Path(config.run.dir) / "weights"


def merged_payloads(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the init payloads of all ranks: rank 0's, with the groups of every rank that sends."""
    merged = []
    for payloads in zip(*ranks, strict=True):
        groups = [group for payload in payloads for group in payload.get("groups", ())]
        merged.append(payloads[0] | ({"groups": groups} if groups else {}))
    return merged


def merged_stage(ranks: Sequence[Staged]) -> Staged:
    """Merge what all ranks staged: rank 0's, with a digest of the shares of all ranks."""
    first = ranks[0]
    digests = [one.announcement.digest for one in ranks if one.announcement.digest]
    if len(digests) < 2:
        return first
    name = f"sum64-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}"
    return replace(first, announcement=replace(first.announcement, digest=name))


def sending_ranks(settings: WeightSync, *, ranks: int, nbytes: int) -> int:
    """Return how many learner ranks send weights of this size where they are pushed. Without a copy
    only one: ranks would wait for each other in gathers and in broadcasts at once. Of deltas too.
    """
    if not settings.overlap or settings.senders == "one" or settings.delta == "always":
        return 1
    if settings.senders == "every_rank":
        return ranks
    return min(ranks, MOST_SENDERS) if nbytes > ONE_SENDER_BYTES else 1


def rendezvous_seconds(deadlines: Deadlines, groups: int) -> float:
    """Return the deadline of an engine that joins so many groups of senders, one after another."""
    return deadlines.rendezvous_s * max(1, groups)


def torn_after(deadlines: Deadlines) -> float:
    """Seconds until learner and engines notice by themselves that a push was cut off."""
    return deadlines.pause_s + BUCKETS_IN_FLIGHT * deadlines.bucket_s
