"""What a run could reach: the ideal speed-up of overlap, and the learner's idle share by simulation
with measured lengths.

Runs in: the process of `benchmarks.throughput`. The simulation is the real `ReplayQueue` in
invented time (`async_grpo.tools.predict.simulation`).
"""

from __future__ import annotations

from collections.abc import Sequence

from async_grpo.config.schema import Config
from async_grpo.rollout.engine_arguments import CPU_MAX_NUM_SEQS
from async_grpo.tools.predict.engine import Speed
from async_grpo.tools.predict.simulation.scenario import Scenario
from async_grpo.tools.predict.simulation.simulator import simulate

STEPS, SKIPPED = 60, 10


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
    """Share of the time that the learner waits. tokens_per_s: of a full engine, whose responses
    share it; one alone has an eighth of it.
    """
    places = config.cluster.engine.max_num_seqs or CPU_MAX_NUM_SEQS
    scenario = Scenario(
        max_staleness=staleness,
        rollout_batch_size=config.rollout.rollout_batch_size,
        group_size=config.rollout.group_size,
        total_steps=STEPS,
        seen=tuple(map(tuple, lengths)),
        speed=Speed(((1, tokens_per_s / 8), (8, tokens_per_s))),
        actors=1,
        places=places,
        learner_s=learner_s,
        publish_s=publish_s,
        poll_s=0.02,
        overlap=config.weight_sync.overlap,
    )
    return simulate(scenario).figures(skip=SKIPPED)["idle"]
