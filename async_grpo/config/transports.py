"""The weight transports: what each can do, and where its learner's half is.

Runs in: every process; without torch and vLLM. Invariant: no other module compares a transport's
name; code that depends on the transport asks for a trait. A transport is added with an entry here,
a module in `weights` with its sender, and the receiving half in the folder of every engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from async_grpo.algo.catalog import Constants, Registry, Traits, choice


@dataclass(frozen=True)
class Senders(Constants):
    """Options of a transport that pushes."""

    senders: Literal["auto", "one", "every_rank"] = choice(
        "auto",
        "Learner ranks that send: rank 0, or every rank its share, with `overlap`; `auto`: one up "
        "to 16 GiB of weights, else at most four.",
    )


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to bring weights from the learner to the engines.

    sender: `module:class` of the learner's half, built with `of(owner, config=..., key=...)`; ""
    where weights are pushed, which goes by the engine's protocol (`EngineKind.pushing_sender`).
    needs_gpu: whether it works between GPUs only.
    colocated: whether a learner rank and its engine share one GPU; None where both ways work.
    pushes: the learner sends to a group of all engines; else each engine reads a copy itself.
    relayed: engines read memory of rank 0's node, so every other node needs a relay.
    options: the class of the options that it has.
    """

    name: str
    sender: str = ""
    needs_gpu: bool = True
    colocated: bool | None = None
    pushes: bool = False
    relayed: bool = False
    options: type[Any] | None = None


TRANSPORTS = {
    transport.name: transport
    for transport in (
        Transport(
            "shared_memory",
            sender="async_grpo.weights.shared_memory:SharedMemorySender",
            needs_gpu=False,
            relayed=True,
        ),
        Transport("nccl", colocated=False, pushes=True, options=Senders),
        Transport("ipc", sender="async_grpo.weights.ipc:IpcSender", colocated=True),
    )
}

BACKENDS = Registry("weight transport", Traits)
"""What `weight_sync.backend` may be."""
BACKENDS.declare("auto")
for _transport in TRANSPORTS.values():
    BACKENDS.declare(_transport.name, options=_transport.options)


def automatic(*, device: str, colocated: bool) -> str:
    """Return the transport that `weight_sync.backend: auto` means on `device` (`cpu` or `cuda`)."""
    return next(
        name
        for name, transport in TRANSPORTS.items()
        if transport.needs_gpu == (device == "cuda") and transport.colocated in (None, colocated)
    )
