"""The settings of weight publication: `weight_sync` and its deadlines.

Runs in: any process. A part of `schema`, and as such a home of defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from async_grpo.config.section import FREE, NonNegative, Positive, Seconds, Section, warn


class Deadlines(Section):
    rendezvous_s: Seconds = 60.0
    """Forming the group of learner and engines (NCCL), or telling the engines what will come."""
    stage_s: Seconds = 120.0
    """Copying the new weights out of the learner."""
    pause_s: Seconds = 30.0
    """An engine's current forward pass, after which it pauses."""
    bucket_s: Seconds = 20.0
    """Longest time for one bucket over NCCL. When nothing moved for twice as long (two are under way), both sides abort; before the first
    bucket `pause_s` later."""
    resume_s: Seconds = 30.0
    """Setting the new version label and going on."""
    acknowledge_s: Seconds = 120.0
    """Everything above for one publication, until an engine says that it serves the new version; one that does not is replaced."""


class WeightSync(Section):
    on_resume = FREE
    backend: Literal["auto", "shared_memory", "nccl", "ipc"] = "auto"
    """How weights reach the engines; `auto`: shared memory on CPU, `ipc` when colocated on GPU, `nccl` otherwise."""
    every_steps: Annotated[Positive, warn("how old the tokens are that are trained")] = 1
    """Learner steps per publication; at most `replay.max_staleness + 1`."""
    kv_cache: Annotated[Literal["recompute", "keep"], warn("under which weights a running response goes on")] = "recompute"
    """What running responses do after a publication: recompute their cache under the new weights, or keep the old one."""
    overlap: bool = True
    """Let the engines take new weights while the next learner step runs (where the transport allows it)."""
    self_check: bool = True
    """When an engine starts: publish visibly perturbed weights, compare log-probabilities of learner and engine, restore."""
    verify_every: NonNegative = 10
    """Publications between those whose bytes are compared by checksum, and after which every engine's log-probabilities of a few fixed
    responses are compared with the learner's; 0 means never."""
    deadlines: Deadlines = Deadlines()
