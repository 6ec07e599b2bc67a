"""What the halves of a weight transport say to each other.

Runs in: learner ranks (senders), rollout actors (receivers), the driver (coordinator). A publication is

    learner: stage(version) -> Announcement      copy the weights out of the model; collective over the learner ranks
    driver:  hands the announcement to every engine, and lets the learner `send` at the same time
    engine:  pause (requests kept) -> load -> label -> resume

Staging is the only part that the learner must wait for. An announcement stays valid until the next but one `stage`, because the
shared-memory and IPC senders swap between two copies; the coordinator therefore waits for a publication before it stages again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

UNPUBLISHED = "unpublished"
"""Label of the weights an engine loaded from disk, before its first publication."""

SELF_CHECK = "self-check"
"""Version label of the perturbed weights of the self-check; no ticket exists while it is set, so no trained token carries it."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One publication, as the engines need it. `label` is what the engine stamps on tokens; `payload` is the transport's own.

    digest: of the bits of all weights, "" where the transport does not compute one.
    """

    label: str
    backend: str
    payload: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


class WeightSender(Protocol):
    """The learner's half of a transport; one per learner rank, every call is made on every rank."""

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Prepare for these engines and return one init payload per engine. May be called again when the set changes."""

    def rendezvous(self) -> None:
        """Complete what the engines' init calls wait for; runs while they wait. A no-op for transports without a group."""

    def stage(self, label: str) -> Announcement:
        """Copy the current weights out of the model."""

    def send(self) -> None:
        """Push the staged weights; a no-op for transports whose engines pull."""

    def close(self) -> None:
        """Free segments, buffers and groups."""


class WeightOwner(Protocol):
    """What a sender needs of the learner: full tensors under Hugging Face names, the same order every time."""

    rank: int
    device: str

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, full shape and dtype name (`float32`) of every published tensor."""

    def named_weights(self):
        """The tensors, collective over the learner ranks."""


def version_label(version: int) -> str:
    """Label of policy version `version` as the engine stamps it."""
    return f"v{version}"


def is_version(label: str) -> bool:
    """Whether a label names a policy version."""
    return label.startswith("v") and label[1:].isdigit()


def parse_label(label: str) -> int:
    """Policy version of a stamped label. An unknown label is an error: its tokens cannot be trained."""
    if not is_version(label):
        raise ValueError(f"a token carries the weight version {label!r}, which no publication set; it cannot be trained")
    return int(label[1:])
