"""What a run shows of itself while it goes on, as the planner needs it.

Runs in: the driver. Hides which metric holds which number. The first steps are left out, since
engines and compilers warm up; then sums are taken over all that followed:

    lines of metrics --first, last--> seconds of the learner, of publications, of engines by size
    lengths of groups --the newest--> lengths
    seconds of groups --less what an engine takes for so many tokens--> waits for environments
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean

from async_grpo.rollout.engine.speeds import AGAIN
from async_grpo.runtime.time_ledger import LearnerTime, spent
from async_grpo.tools.predict.workload import Measured

KEPT_GROUPS = 256
LEAST_STEPS = 5
LEAST_SHARE = 0.01
"""Of the engines' time, at speeds that are looked at."""
STEP = (
    "rollout/response_tokens",
    "weights/until_live_s",
    "weights/engine_paused_s",
    "rollout/environment_s",
    "rollout/verifier_s",
    "rollout/teacher_s",
    "rollout/judge_s",
    "replay/staleness_mean",
)
"""Metrics whose mean over steps is taken."""


class Meter:
    """Measures a run. skip: steps at its beginning that do not count; batch: groups of a learner
    step; contention, crowd: as in `Measured`.
    """

    def __init__(self, *, skip: int, batch: int, contention: float, crowd: float = 1.0) -> None:
        self._crowd = crowd
        self._skip, self._batch = skip, batch
        self._contention = contention
        self._lengths: deque[tuple[int, ...]] = deque(maxlen=KEPT_GROUPS)
        self._generation_s: deque[float] = deque(maxlen=KEPT_GROUPS)
        self._first: Mapping[str, float] | None = None
        self._last: Mapping[str, float] = {}
        self._sums = dict.fromkeys(STEP, 0.0)
        self._passed = self.steps = 0
        """steps: those that count."""

    def observe(
        self,
        metrics: Mapping[str, float],
        lengths: Iterable[tuple[int, ...]],
        generation_s: Iterable[float],
    ) -> None:
        """Take a learner step's metrics, and of its groups the response lengths and the seconds
        from ticket to last token.
        """
        if "time/learner/working" not in metrics or "time/engine/working" not in metrics:
            return  # no engine has told anything yet, or the step was repeated
        self._passed += 1
        self._lengths.extend(lengths)
        self._generation_s.extend(generation_s)
        if self._passed <= self._skip:
            return
        if self._first is None or _began_again(self._last, metrics):
            self._first, self.steps = dict(metrics), 0
            self._sums = dict.fromkeys(STEP, 0.0)
        else:
            self.steps += 1
            for name in STEP:
                self._sums[name] += metrics.get(name, 0.0)
        self._last = dict(metrics)

    @property
    def time(self) -> LearnerTime:
        """Return the learner's time by cause, and the tokens that it trained in it."""
        return LearnerTime.between(
            self._first or {}, self._last, tokens=self._sums["rollout/response_tokens"]
        )

    @property
    def groups_per_s(self) -> float:
        """Trained groups per second."""
        return self.steps * self._batch / self.time.total

    @property
    def staleness_mean(self) -> float:
        """Mean of `replay/staleness_mean`."""
        return self._sums["replay/staleness_mean"] / self.steps

    def measured(self, *, every_steps: int) -> Measured | None:
        """Return what was measured; None while that is too little."""
        if self._first is None or self.steps < LEAST_STEPS:
            return None
        sizes = _sizes(self._first, self._last)
        again = sizes.pop(AGAIN, {})
        curve = _curve(sizes)
        if not curve:
            return None
        learner, engine = self.time, spent(self._first, self._last, "time/engine/")
        generating = engine["working"] / max(sum(engine.values()), 1e-9)
        means = {name: total / self.steps for name, total in self._sums.items()}
        working_s = learner.seconds["working"] / self.steps
        return Measured(
            lengths=tuple(self._lengths),
            curve=curve,
            learner_s=working_s / (1 + (self._contention - 1) * generating),
            step_tokens=means["rollout/response_tokens"],
            publish_s=means["weights/until_live_s"],
            exposed_s=learner.seconds["weight_sync"] / self.steps * every_steps,
            pause_s=means["weights/engine_paused_s"],
            again_s=again["s"] / again["tokens"] if again.get("tokens") else 0.0,
            verify_s=means["rollout/verifier_s"],
            delay_s=means["rollout/teacher_s"] + means["rollout/judge_s"],
            waits=self._waits(sizes, means["rollout/environment_s"]),
            contention=self._contention,
            crowd=self._crowd,
        )

    def _waits(
        self, sizes: Mapping[str, Mapping[str, float]], episode_s: float
    ) -> tuple[float, ...]:
        """Seconds that each group waited for environments: those in which no token of its longest
        response came. Waits for a full engine are among them, so that they are scaled down to what
        the slowest of n episodes takes at most in the mean: n times `episode_s`.
        """
        if not episode_s:
            return ()
        steps = sum(one["steps"] for one in sizes.values())
        token_s = sum(one["s"] for one in sizes.values()) / steps
        groups = zip(self._lengths, self._generation_s, strict=True)
        waits = [max(0.0, all_s - max(of) * token_s) for of, all_s in groups]
        most = fmean(map(len, self._lengths)) * episode_s
        scale = min(1.0, most / max(fmean(waits), 1e-9))
        return tuple(round(scale * wait, 4) for wait in waits)


def _began_again(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether sums are those of other processes than before."""
    names = (name for name in now if name.startswith(("time/", "engine/")))
    return any(now[name] < before.get(name, 0.0) for name in names if name.count("/") > 1)


def _sizes(first: Mapping[str, float], last: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the seconds, tokens and steps in between, by size."""
    sums: dict[str, dict[str, float]] = {}
    for name, value in last.items():
        _, found, rest = name.partition("engine/")
        if found and not name.startswith("time/"):
            size, _, kind = rest.partition("/")
            sums.setdefault(size, {})[kind] = value - first.get(name, 0.0)
    return sums


def _curve(sums: Mapping[str, Mapping[str, float]]) -> tuple[tuple[float, float], ...]:
    """Make points (responses, tokens per second) of the seconds, tokens and steps by size."""
    total = sum(one["s"] for one in sums.values())
    return tuple(
        sorted(
            (one["tokens"] / one["steps"], one["tokens"] / one["s"])
            for one in sums.values()
            if one["steps"] > 0 and one["s"] > LEAST_SHARE * total
        )
    )


def relative_errors(*, predicted: Mapping[str, float], found: Mapping[str, float]) -> dict:
    """Compare a prediction with what was found: throughput and lag as shares of what was found,
    idle in points. A lag below a tenth of a step counts as one.
    """
    return {
        "plan/error_throughput": predicted["groups_per_s"] / found["groups_per_s"] - 1,
        "plan/error_idle": predicted["idle"] - found["idle"],
        "plan/error_staleness": (predicted["staleness_mean"] - found["staleness_mean"])
        / max(found["staleness_mean"], 0.1),
    }
