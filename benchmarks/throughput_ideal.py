"""What a run could reach: the ideal speed-up of overlap, and the learner's idle share by simulation
with measured lengths.

Runs in: the process of `benchmarks.throughput`. The simulation is the real `ReplayQueue` in
invented time (`benchmarks.simulator`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.config.schema import Config
from async_grpo.rollout.engine_arguments import CPU_MAX_NUM_SEQS
from benchmarks.scenario import Scenario
from benchmarks.simulator import simulate

STEPS, SKIPPED = 60, 10


@dataclass(frozen=True)
class MeasuredLengths(Scenario):
    """A schedule whose groups have lengths that were measured, in any order."""

    measured: tuple[tuple[int, ...], ...] = ()

    def lengths(self, group_id: int, attempt: int) -> list[int]:
        """Of one of the measured groups."""
        return list(random.Random(hash((self.seed, group_id, attempt))).choice(self.measured))


def ideal_speed_up(generation: float, learner: float) -> float:
    """(Tg + Tt) / max(Tg, Tt): of perfect overlap over one phase after the other, from the rates of
    the two in tokens per second.
    """
    seconds = [1 / generation, 1 / learner]
    return sum(seconds) / max(seconds)


def simulated_idle(
    config: Config,
    lengths: Sequence[Sequence[int]],
    *,
    tokens_per_s: float,
    learner_s: float,
    publish_s: float,
    staleness: int,
) -> float:
    """Share of the time that the learner waits. tokens_per_s: of a full engine, so that each of its
    responses has a part of it.
    """
    places = config.cluster.engine.max_num_seqs or CPU_MAX_NUM_SEQS
    slots = max(1, places // config.rollout.group_size)
    scenario = MeasuredLengths(
        max_staleness=staleness,
        rollout_batch_size=config.rollout.rollout_batch_size,
        group_size=config.rollout.group_size,
        total_steps=STEPS,
        measured=tuple(map(tuple, lengths)),
        tokens_per_s=tokens_per_s / (slots * config.rollout.group_size),
        actors=1,
        slots=slots,
        learner_s=learner_s,
        publish_s=publish_s,
        poll_s=0.02,
        overlap=config.weight_sync.overlap,
    )
    return simulate(scenario).figures(skip=SKIPPED)["idle"]
