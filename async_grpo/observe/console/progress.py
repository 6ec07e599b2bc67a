"""How a run is doing, in a few numbers: what the panel, `status.json` and the status command show.

Runs in: the driver. Hides how rates and shares are computed from what a learner step logs, and how
long histories are kept short.

Invariants: memory does not grow with the run; a number that no metric gives is absent, so that
nobody sees an invented 0; shares and rates are over the last `WINDOW_S` seconds, waiting included.
Thread-safe.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from async_grpo.runtime.time_ledger import ENGINE_PREFIX, LearnerTime, spent

WINDOW_S = 30.0
CURVE_POINTS = 120
EVALUATIONS = 120
NOTES = 5
QUIET_S = 10.0
"""So long, and five times the usual, without a learner step: nobody knows what the rest takes."""

BUSY = ("working", "evaluating")
"""Causes of an engine's time that are not idle."""


class Curve:
    """Keeps a series of any length as at most CURVE_POINTS means over equally many values."""

    def __init__(self) -> None:
        self.stride = 1
        self.points: list[float] = []
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        """Add the next value."""
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self.stride:
            self.points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.points) > CURVE_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [(first + second) / 2 for first, second in pairs]
            self._sum, self._count = 0.0, 0
            self.stride *= 2

    def values(self) -> list[float]:
        """Return the means, oldest first; the last one may be of fewer values."""
        return self.points + ([self._sum / self._count] if self._count else [])


STOPPING = "stopping: this step, then a checkpoint"


class Progress:
    """Collects the progress of one run. clock: Unix seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self.started = clock()
        self._phases: list[tuple[str, float]] = []
        self.stopping: float | None = None
        """When the run was asked to end; set in a signal handler, so without the lock."""
        self._phase_before: tuple[str, float] = ("starting", self.started)
        self._step, self._total = 0, 0
        self._step_at: float | None = None
        self._metrics: dict[str, float] = {}
        self._reward, self._evaluations = Curve(), deque[tuple[int, float]](maxlen=EVALUATIONS)
        self._rows: deque[tuple[float, int, dict[str, float]]] = deque()
        self._bottleneck: dict[str, str] | None = None
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._published: float | None = None
        self._version = -1.0
        self._end: dict[str, Any] = {}
        self._earlier: Mapping[str, Any] = {}

    # ---- what happens ----

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Keep the curves of an earlier start, in case this start goes on from it."""
        known = {"evaluations", "step", "reward", "reward_stride"} <= facts.keys()
        self._earlier = facts if known else {}

    def enter(self, text: str) -> tuple[str, float]:
        """Begin a phase of the start or the end, maybe inside another; its text and begin."""
        with self._lock:
            self._phases.append((text, self._clock()))
            return self._phases[-1]

    def leave(self, phase: tuple[str, float]) -> None:
        """End a phase that `enter` began."""
        with self._lock:
            self._phases.remove(phase)
            self._phase_before = (self._phase_before[0], self._clock())

    def serves(self) -> None:
        """Note that the start is over but for the first groups."""
        with self._lock:
            self._phase_before = ("waiting for the first groups", self._clock())

    def note(self, text: str) -> None:
        """Keep a line that the user was shown."""
        with self._lock:
            self._notes.append(text)

    def say(self, *, kind: str, text: str) -> None:
        """Keep the newest bottleneck."""
        with self._lock:
            self._bottleneck = {"kind": kind, "text": text}

    def logged(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a learner step or of an evaluation."""
        now = self._clock()
        with self._lock:
            self._total = total
            self._continue(step)
            if math.isfinite(accuracy := metrics.get("eval/accuracy_greedy", math.nan)):
                self._evaluations.append((step, accuracy))
            if "time/step" in metrics:
                self._logged_step(now, step, metrics)

    def published(self, version: int) -> None:
        """Take the version that has just become live."""
        with self._lock:
            self._version, self._published = float(version), self._clock()
            if "replay/live_version" in self._metrics:
                self._metrics["replay/live_version"] = self._version

    def end(self, code: int, message: str) -> None:
        """Keep how the run ended."""
        with self._lock:
            self._end = {"exit_code": code, "message": message, "ended": self._clock()}

    def _continue(self, step: int) -> None:
        """Take over the earlier curves before `step`, the first that this start logs."""
        earlier, self._earlier = self._earlier, {}
        if not earlier or step <= 1:
            return
        before = [(int(at), float(value)) for at, value in earlier["evaluations"] if at < step]
        self._evaluations.extend(before)
        share = min(1.0, (step - 1) / max(1, earlier["step"]))
        self._reward.points = list(earlier["reward"][: round(share * len(earlier["reward"]))])
        self._reward.stride = earlier["reward_stride"]

    def _logged_step(self, now: float, step: int, metrics: Mapping[str, float]) -> None:
        if self._step_at is None:
            self._phase_before = ("training", now)
            self._rows.append((now - metrics["time/step"], step - 1, {}))
        self._step, self._step_at = step, now
        self._metrics = {
            name: float(value) for name, value in metrics.items() if math.isfinite(value)
        }
        if "rollout/score" in self._metrics:
            self._reward.add(self._metrics["rollout/score"])
        if (version := metrics.get("replay/live_version", self._version)) > self._version:
            self._version, self._published = version, now
        elif "replay/live_version" in self._metrics:  # measured before the newest publication
            self._metrics["replay/live_version"] = self._version
        self._rows.append((now, step, self._metrics))
        while len(self._rows) > 2 and self._rows[1][0] < now - WINDOW_S:
            self._rows.popleft()

    # ---- what is known ----

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return bool(self._end)

    def facts(self) -> dict[str, Any]:
        """Return everything as plain values."""
        with self._lock:
            text, since = self._phases[-1] if self._phases else self._phase_before
            if self.stopping is not None and text == "training":
                text, since = STOPPING, self.stopping
            facts: dict[str, Any] = {
                "started": self.started,
                "phase": text,
                "phase_since": since,
                "step": self._step,
                "total": self._total,
                "step_at": self._step_at,
                "metrics": self._metrics | self._rates(),
                "reward": self._reward.values(),
                "reward_stride": self._reward.stride,
                "evaluations": [list(point) for point in self._evaluations],
                "published_at": self._published,
                "bottleneck": self._bottleneck,
                "notes": list(self._notes),
            }
            seconds = facts["metrics"].get("seconds_per_step", math.nan)
            going_on = text == "training" and not self._end
            waited = 0.0 if self._step_at is None else self._clock() - self._step_at
            if going_on and waited > max(QUIET_S, 5 * seconds):
                facts["quiet"] = self._notes[-1] if self._notes else ""
            elif math.isfinite(seconds):
                facts["eta_s"] = max(0, self._total - self._step) * seconds
            return facts | self._end

    def _rates(self) -> dict[str, float]:
        """Compute rates and shares since the oldest row that is kept."""
        if len(self._rows) < 2 or self._rows[-1][0] <= self._rows[0][0]:
            return {}
        (begin, first_step, first), (end, last_step, last) = self._rows[0], self._rows[-1]
        rates = {}
        if last_step > first_step:
            rates["seconds_per_step"] = (end - begin) / (last_step - first_step)
        counted, _, generated = next((row for row in self._rows if row[2]), self._rows[-1])
        if "goodput/generated" in generated and "goodput/generated" in last and end > counted:
            more = last["goodput/generated"] - generated["goodput/generated"]
            rates["tokens_generated_per_s"] = max(0.0, more) / (end - counted)
        tokens = [row.get("rollout/response_tokens", 0.0) for _, _, row in list(self._rows)[1:]]
        learner = LearnerTime.between(first, last, tokens=sum(tokens))
        if learner.total > 0:
            rates["learner_idle"] = learner.idle
            if "rollout/response_tokens" in last:
                rates["tokens_trained_per_s"] = learner.tokens_per_s
        engine = spent(first, last, ENGINE_PREFIX)
        if (whole := sum(engine.values())) > 0:
            busy = sum(engine.get(cause, 0.0) for cause in BUSY)
            rates["engine_idle"] = max(0.0, 1 - busy / whole)
        return rates
