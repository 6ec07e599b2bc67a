"""What the halves of a weight transport say to each other.

Runs in: learner ranks (senders), rollout actors and engine workers (receivers), the driver
(coordinator). A publication is

    learner: stage(label) -> Announcement; copies the weights out of the model, on all ranks
    driver:  hands the announcement to every engine, and lets the learner `send` at the same time
    engine:  pause (requests kept) -> load -> label -> resume -> Receipt

Staging is the only part that the learner must wait for. An announcement stays valid until the next
`stage`, in shared memory until the next but one; the coordinator waits for a publication before it
stages again.

Choice of the transport, in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


UNPUBLISHED = "unpublished"
"""Label of the weights an engine loaded from disk, before its first publication."""

SELF_CHECK = "self-check"
"""Version label of the perturbed weights of the self-check; no ticket exists while it is set, so no
trained token carries it.
"""


WORKER_ENGINES = {
    "shared_memory": "async_grpo_shared_memory",
    "ipc": "async_grpo_ipc",
    "nccl": "async_grpo_nccl",
}
"""Backend -> the name under which `worker` registers its engine with vLLM."""


class TornTransfer(RuntimeError):
    """A publication was cut off: what was loaded may be a mixture, and must be replaced by a
    complete publication.
    """


class TransferStuck(FaultBudgetSpent):
    """The learner hangs in a transfer that cannot be aborted: its process would have to be
    replaced.
    """


class Version(NamedTuple):
    """What the weights contain: `step` learner steps of this `run_epoch`. Pairs are ordered, and
    only grow while a run lasts.
    """

    run_epoch: int
    step: int

    @property
    def label(self) -> str:
        """As the engine stamps it on tokens."""
        return f"v{self.run_epoch}.{self.step}"


@dataclass(frozen=True, slots=True)
class Announcement:
    """One publication, as the engines need it. `label` is what the engine stamps on tokens;
    `payload` is the transport's own.

    digest: of the bits of all weights, "" where it was not computed. nbytes: of all weights.
    streamed: nothing was copied, so the learner must not train until they are sent.
    """

    label: str
    backend: str
    payload: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    nbytes: int = 0
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's answer to an announcement.

    serving: the label of the weights it serves now. failure: "" if it serves the announced ones;
    else the engine stays paused, and `reason` says why: `torn` (cut off: a complete publication
    mends it), `mismatch` (other bytes than were sent) or `names` (other tensors than it has).
    seconds: by phase (`pause`, `load`, `resume`, `total`). recomputed_tokens: cached tokens that
    running responses lost.
    """

    serving: str
    failure: str = ""
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    recomputed_tokens: int = 0


TokenSequence = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response to it."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What a learner rank staged, and its log-probs at temperature 1 of the sequences that it was
    asked for.

    before: of `stage_perturbed`, the same under the true weights.
    """

    announcement: Announcement
    logprobs: list[np.ndarray] = field(default_factory=list)
    before: list[np.ndarray] = field(default_factory=list)


class WeightSender(Protocol):
    """The learner's half of a transport; one per learner rank, every call is made on every rank,
    `send` of a copy on rank 0 alone.

    note: what the user should know about the transport, or "".
    """

    note: str

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Prepare for these engines and return one init payload per engine. May be called again
        when the set changes.
        """

    def rendezvous(self) -> str:
        """Complete what the engines' init calls wait for; runs while they wait. A no-op without a
        group. Returns why it failed, or "".
        """

    def reserve(self) -> None:
        """Allocate the memory for `stage(apart=True)`, so that it cannot fail there, in the middle
        of what all ranks do together.
        """

    def stage(self, label: str, *, verify: bool, apart: bool = False) -> Announcement:
        """Copy the current weights out of the model; with `verify`, so that the engines can compare
        what arrives with what was sent.

        apart: a copy in memory of its own, reserved before, which lives until `release` and leaves
        the newest publication as it is.
        """

    def release(self) -> None:
        """Free the copy that was staged apart; the engines have read it."""

    def send(self) -> str:
        """Push the staged weights; a no-op for transports whose engines pull. Returns why the
        transfer is torn, or "".

        Of a copy it goes on in the background; then only the engines know how it ended.
        """

    def close(self) -> None:
        """Free segments, buffers and groups."""


class WeightOwner(Protocol):
    """What a sender needs of the learner: full tensors under Hugging Face names, the same order
    every time.
    """

    rank: int
    device: str
    sharded: bool

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, full shape and dtype name (`float32`) of every published tensor."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, collective over the learner ranks."""


def is_version(label: str) -> bool:
    """Whether a label names a policy version."""
    epoch, dot, step = label.removeprefix("v").partition(".")
    return label.startswith("v") and dot == "." and epoch.isdigit() and step.isdigit()


def parse_label(label: str) -> Version:
    """The version that a stamped label names. An unknown label is an error: its tokens cannot be
    trained.
    """
    if not is_version(label):
        raise ValueError(
            f"a token carries the weight version {label!r}, which no publication set; it "
            "cannot be trained"
        )
    epoch, step = label[1:].split(".")
    return Version(int(epoch), int(step))


def resolve_backend(config: Config, *, device: str, colocated: bool) -> str:
    """`shared_memory`, `ipc` or `nccl` for this configuration on `device` (`cpu` or `cuda`)."""
    if config.weight_sync.backend != "auto":
        return config.weight_sync.backend
    if device == "cpu":
        return "shared_memory"
    return "ipc" if colocated else "nccl"


def make_sender(backend: str, owner: WeightOwner, *, config: Config, key: str) -> WeightSender:
    """The learner's half of `backend`. `key` names the run's shared-memory segments."""
    if backend == "shared_memory":
        from async_grpo.weights.shared_memory import SharedMemorySender

        return SharedMemorySender(owner, key=key, fallback=fallback_directory(config))
    if backend == "ipc":
        from async_grpo.weights.ipc import IpcSender

        return IpcSender(owner)
    from async_grpo.weights.nccl import NcclSender  # needs vLLM, which a CPU learner does not load

    return NcclSender(
        owner, overlap=config.weight_sync.overlap, deadlines=config.weight_sync.deadlines
    )


def fallback_directory(config: Config) -> Path:
    """Where segments lie when /dev/shm has no room for them."""
    return Path(config.run.dir) / "weights"
