"""How many groups per second each part of a run lets through: the one model of throughput.

Runs in: the driver, and the planner's command. Hides the formulas. Settings say how much there is
of everything, times what it takes, measured or assumed:

    ThroughputSettings --+
                         +--> limits --> the lowest one is the run's: everybody waits for that part
    Times ---------------+

With R groups of G responses per learner step, K = max_staleness, a publication every s steps, N
engines with S places for responses and v verifiers each, which score c at a time, L groups that may
be outstanding:

    learner       R / (T_s + p / s)     T_s: a step that waits for nothing, p: a publication
    engines       R / (T_e + u / s)     T_e = R G r / (N S): r seconds of a place for a response
                                        (Little); u: an engine stands still for a publication
    verifiers     N v c / (G w)         w: a verifier needs for a response
    tail          (K + 1) R / H_b       H_b: the slowest group of a batch holds its slot, which
                                        K + 1 batches wait for
    slots         L / H                 H: a group holds its slot (Little)
    environments  N E / (G e)           E episodes open at an actor, each for e (Little)

Each of them bounds a run from above; how far the others get into the way is what a rehearsal adds
(`tools.predict.rehearsal`).

Invariants: pure functions; a part that takes no time is no limit. Sources: Little, "A proof for the
queuing formula L = lambda W" (1961); the tail by the recurrence
end(s) = max(end(s - 1), end(s - 1 - K) + T_M) + T_s, with T_M the seconds of the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from async_grpo.config.schema import Config

FIELDS = {
    "replay.max_staleness": "max_staleness",
    "replay.outstanding": "outstanding",
    "weight_sync.every_steps": "every_steps",
    "cluster.rollout_actors.max": "actors",
    "cluster.engine.max_num_seqs": "places",
    "task.verifier.workers": "verifiers",
    "task.verifier.concurrency": "concurrency",
    "rollout.max_open_episodes": "open_episodes",
    "learner.ranks": "rank_factor",
}


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """How much there is of everything that takes time."""

    batch: int
    """Groups of a learner step, R."""
    responses: int
    """Of a group, the baseline's too."""
    max_staleness: int
    every_steps: int
    outstanding: int | None = None
    """Groups that may hold a slot; None: set by the queue itself."""
    on_stale: Literal["wait", "mask", "expire"] = "wait"
    actors: int
    places: int
    """Responses that an engine generates at the same time."""
    verifiers: int
    """Of each actor."""
    concurrency: int = 1
    """Responses that a verifier scores at the same time."""
    open_episodes: int = 0
    """Episodes that a rollout actor may have begun; 0: responses are no episodes."""
    ranks: int = 1
    team: int = 1
    """Ranks that share each sequence; their number is a multiple of it."""
    rank_factor: float = 1.0
    """How many times the learner ranks with which its time was measured."""
    cores: int | None = None
    """That engines and learner ranks share; None where each has its own."""

    @staticmethod
    def configured(
        config: Config, *, max_num_seqs: int, actors: int | None = None, cores: int | None = None
    ) -> ThroughputSettings:
        """Read the settings from a configuration. max_num_seqs: of an engine, which may be vLLM's
        own choice; actors: instead of the configured ones; cores: None where models run on GPUs.
        """
        of, rollout = config.cluster.rollout_actors, config.rollout
        return ThroughputSettings(
            batch=rollout.rollout_batch_size,
            responses=rollout.group_size + config.algorithm.has_baseline,
            max_staleness=config.replay.max_staleness,
            every_steps=config.weight_sync.every_steps,
            outstanding=None if config.replay.outstanding == "auto" else config.max_outstanding,
            on_stale=config.replay.on_stale,
            actors=actors or of.max or of.min,
            places=max_num_seqs,
            verifiers=sum(one.verifier.workers for one in config.posed_tasks.values()),
            concurrency=config.task.verifier.concurrency,
            open_episodes=rollout.max_open_episodes or 2 * max_num_seqs,
            ranks=config.learner.ranks,
            team=config.learner.sequence_parallel,
            cores=cores,
        )

    @property
    def capacity(self) -> int:
        """Groups that may ever be outstanding."""
        return (self.max_staleness + 1) * self.batch

    @property
    def scored_at_once(self) -> int:
        """Responses that all verifiers of an actor score at the same time."""
        return self.verifiers * self.concurrency

    @property
    def verifier_setting(self) -> tuple[str, int]:
        """The setting by which more responses are scored at the same time, and its value."""
        name = "task.verifier.concurrency" if self.concurrency > 1 else "task.verifier.workers"
        return name, self.concurrency if self.concurrency > 1 else self.verifiers

    def with_settings(self, advice: Mapping[str, float]) -> Self:
        """Return the same with these settings (dotted names; learner.ranks: how many times as
        many). Raises KeyError for one that is not among `FIELDS`.
        """
        changed: dict[str, Any] = {
            FIELDS[name]: value if name == "learner.ranks" else int(value)
            for name, value in advice.items()
        }
        return replace(self, **changed)


@dataclass(frozen=True)
class Times:
    """Seconds of everything, as the module names them; 0 where it takes none."""

    learner_s: float  # of T_s, what more ranks divide
    other_s: float  # of T_s, what they do not
    exposed_s: float  # p
    response_s: float  # r
    pause_s: float = 0.0  # u
    verify_s: float = 0.0  # w
    tail_s: float = 0.0  # H_b
    slot_s: float = 0.0  # H
    episode_s: float = 0.0  # e


def limits(settings: ThroughputSettings, times: Times) -> dict[str, float]:
    """Compute the most groups per second by the part that limits them; infinite where one does
    not, and without environments that take no time.
    """
    of, every = settings, settings.every_steps
    step_s = times.learner_s / of.rank_factor + times.other_s + times.exposed_s / every
    generating_s = of.batch * of.responses * times.response_s / (of.actors * of.places)
    outstanding = min(of.outstanding or of.capacity, of.capacity)
    found = {
        "learner": of.batch / step_s,
        "engines": of.batch / (generating_s + times.pause_s / every),
        "verifiers": _per_s(of.actors * of.scored_at_once, of.responses * times.verify_s),
        "tail": _per_s(of.capacity, times.tail_s),
        "slots": _per_s(outstanding, times.slot_s),
    }
    if times.episode_s:
        found["environments"] = of.actors * of.open_episodes / (of.responses * times.episode_s)
    return found


def _per_s(count: float, seconds: float) -> float:
    return count / seconds if seconds else math.inf
