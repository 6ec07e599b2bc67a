"""What a run does, in plain numbers: its settings, and what was measured of its engines, learner
and answers.

Runs in: the driver, and the planner's command. Hides which number comes from the configuration and
which from a measurement:

    Config  --settings--+
                        +--> Workload --> rehearsal (what a run will be), limits in closed form
    Measured (a run) ---+

Invariants: a measurement knows nothing of bounds and limits, so that it holds for other settings of
the same model, task and machine; what depends on the size of a learner step is scaled by tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.observe.throughput import ThroughputSettings, Times, limits
from async_grpo.tools.predict.engine import Speed

CPU_CONTENTION = 1.16
"""How much longer a learner step takes on CPU while engines generate, with cores of their own:
memory is shared (docs/how-to/predict.md). On GPUs 1.
"""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What everything takes, in seconds."""

    learner_s: float
    """A learner step, without what engines beside it cost."""
    publish_s: float = 0.0
    """From the end of staging until all engines serve the weights."""
    exposed_s: float = 0.0
    """What the learner itself waits for a publication."""
    pause_s: float = 0.0
    """What an engine stands still for a publication."""
    again_s: float = 0.0
    """Of each token that running responses have at a publication: what the engine takes longer,
    since it computes them again.
    """
    verify_s: float = 0.0
    """Of a verifier for a response."""
    delay_s: float = 0.0
    """What a group takes besides generation, verifiers and environments: frozen models, calls."""
    contention: float = 1.0
    """How much longer learner steps take while engines generate."""


@dataclass(frozen=True, kw_only=True)
class Measured(Costs):
    """Hold what was measured of a run."""

    lengths: tuple[tuple[int, ...], ...]
    """Response tokens of groups that were trained lately."""
    curve: tuple[tuple[float, float], ...]
    """Of an engine: (responses that run, tokens per second of all of them)."""
    waits: tuple[float, ...] = ()
    """Seconds that each of these groups waited for environments; () where there are none."""
    step_tokens: float
    """Response tokens of a learner step."""
    crowd: float = 1.0
    """Engines and learner ranks for each core that they share; 1 where each has its own."""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read what `text` wrote. Raises OSError, ValueError, KeyError, TypeError."""
        return cls.of(json.loads(path.read_text())["measured"])

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Measured:
        """Take plain JSON."""
        lengths = tuple(tuple(map(int, group)) for group in found["lengths"])
        curve = tuple((float(count), float(speed)) for count, speed in found["curve"])
        if not lengths or not curve:
            raise ValueError("no groups or no speeds were measured")
        waits = tuple(map(float, found.get("waits", ())))
        if len(waits) not in (0, len(lengths)):
            raise ValueError(f"{len(waits)} waits of {len(lengths)} groups")
        names = {one.name for one in fields(cls)} & found.keys() - {"lengths", "curve", "waits"}
        costs = {name: float(found[name]) for name in names}
        return cls(lengths=lengths, curve=curve, waits=waits, **costs)


@dataclass(frozen=True, kw_only=True)
class Workload(ThroughputSettings, Costs):
    """Settings and measurements of a run; seconds, tokens, groups."""

    lengths: tuple[tuple[int, ...], ...]
    waits: tuple[float, ...] = ()
    """As in `Measured`."""
    speed: Speed
    even: bool = False
    """Whether every learner step takes as long, instead of in proportion to its tokens."""

    @classmethod
    def of(
        cls,
        config: Config,
        measured: Measured,
        *,
        max_num_seqs: int,
        actors: int | None = None,
        cores: int | None = None,
    ) -> Workload:
        """Join a configuration with a measurement of the same model and task; the others: as in
        `ThroughputSettings.configured`.
        """
        settings = ThroughputSettings.configured(
            config, max_num_seqs=max_num_seqs, actors=actors, cores=cores
        )
        group = fmean(sum(one) / len(one) for one in measured.lengths) * settings.responses
        scale = settings.batch * group / measured.step_tokens
        costs = {one.name: getattr(measured, one.name) for one in fields(Costs)}
        costs["learner_s"] *= scale / measured.crowd
        return cls(
            **vars(settings),
            **costs,
            lengths=_of_size(measured.lengths, settings.responses),
            waits=measured.waits,
            speed=Speed(measured.curve).times(measured.crowd),
        )

    def limits(self) -> dict[str, float]:
        """Compute the most groups per second by the part that limits them. At K = 0 nothing
        overlaps, and the learner waits for T_g / (T_g + T_s) of the time, T_g a batch's generation.
        """
        overlaps = self.max_staleness > 0
        crowd = self.slow(self.actors, learning=overlaps)
        learner_s = self.learner_s * (crowd * self.contention if overlaps else 1.0)
        running = min(self.places, self.capacity * self.responses / self.actors)
        each = self.speed.each(running) / crowd
        response_s = self.group_tokens / self.responses / each
        step_s = learner_s / self.rank_factor + self.exposed_s / self.every_steps
        longest = [max(of) / each + self.delay_s for of in self.lengths]
        if self.waits:
            longest = list(map(sum, zip(longest, self.waits, strict=True)))
        batches = range(0, len(longest), max(self.batch, 1))
        slowest = (max(longest[start : start + self.batch]) for start in batches)
        return limits(
            self,
            Times(
                learner_s=learner_s,
                other_s=0.0,
                exposed_s=self.exposed_s,
                response_s=response_s * self.places / running,
                pause_s=self.pause_s,
                verify_s=self.verify_s,
                tail_s=fmean(slowest) + step_s if self.on_stale == "wait" else 0.0,
                slot_s=fmean(longest) + step_s,
            ),
        )

    def slow(self, engines: float, *, learning: bool) -> float:
        """Return how much longer everything takes while so many engines generate."""
        return crowding(engines, self.ranks if learning else 0, self.cores)

    @property
    def group_tokens(self) -> float:
        """Mean tokens of a group."""
        return fmean(map(sum, self.lengths))


def crowding(actors: float, ranks: int, cores: int | None) -> float:
    """Count the engines and learner ranks for each core that they share; at least 1."""
    return 1.0 if cores is None else max(1.0, (actors + ranks) / cores)


def _of_size(lengths: Sequence[tuple[int, ...]], size: int) -> tuple[tuple[int, ...], ...]:
    """Make groups of another size from measured ones: responses again and again, in their order."""
    return tuple(
        one if len(one) == size else tuple(one[index % len(one)] for index in range(size))
        for one in lengths
    )
