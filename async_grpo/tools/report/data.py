"""What a run directory tells, as far as the report needs it.

Runs in: the report's process; reads only. Hides files and their formats. Invariants: of steps that
were taken back only the later rows count; memory is bounded whatever the length of the run (ROWS
rows, thinned evenly); a file that is missing or cut off makes things absent, not wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from async_grpo.config.stored import read_settings
from async_grpo.errors import SetupError
from async_grpo.observe.console.status_file import STATUS, json_objects, of_now, read_timeline
from async_grpo.observe.tracking.outbox import METRICS, SAMPLES
from async_grpo.old_names import metric
from async_grpo.runtime.time_ledger import LEARNER_PREFIX, LearnerTime

ROWS = 3000
SAMPLE_BYTES = 8 << 20
_KEPT = re.compile(
    r"rollout/(score|response_length|response_tokens|truncated|accuracy|reward/.*)"
    r"|rollout/(all_right|all_wrong|zero_std)_groups"
    r"|rollout/(turns|turns_max|sampled_share|ended/.*)"
    r"|train/(staleness_mean|staleness_max|loss|entropy|grad_norm|approx_kl|tokens_per_s|ess|pg_clipfrac)"
    r"|train/staleness_[\d-]+/(token_share|sequence_length|pg_clipfrac|ess)"
    r"|time/(step|wait|train|weight_sync|learner_idle)"
    r"|(goodput|time/learner|time/engine)/[a-z_]+"
    r"|replay/(staleness_mean|trained|rejected|expired|failed|unused|skipped|ready|restarts"
    r"|forfeited|capacity|in_flight|pass_rate/\d)"
    r"|checkpoint/seconds|cluster/(restarts|learner_restarts|rollout_actors|faults)"
    r"|weights/(syncs|repeated|dropped_engines|until_live_s)"
    r"|weights/(sampler|kv_cache|version)_error(_max|_share)?|train/routes_changed"
    r"|rollout/kept_overflows"
)
_TOTALS = (
    "goodput/",
    "time/learner/",
    "time/engine/",
    "replay/",
    "cluster/",
    "weights/",
    "rollout/verifier_errors_",
    "rollout/environment_failures/",
    "rollout/requests/",
)
_STEP = re.compile(rb'\{"step": (\d+),')


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Metrics of one learner step, logged at `time` (Unix seconds)."""

    step: int
    time: float
    values: dict[str, float]


@dataclass
class RunData:
    """One run, as read at one moment."""

    directory: Path
    config: dict[str, Any]
    rows: list[MetricsRow] = field(default_factory=list)
    """Learner steps, one in `stride`; of a run that was read whole, the last one too."""
    stride: int = 1
    newest: MetricsRow | None = None
    evaluations: list[MetricsRow] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    """The newest value of what only grows or is a state, from whichever line has it."""
    starts: int = 0
    """Starts of the run that trained a learner step."""
    steps: int = 0
    """Learner steps that all starts trained, with those that were taken back; likewise the lags."""
    lag_sum: float = 0.0
    lag_max: float = 0.0
    tokens: float = 0.0
    """Response tokens that the newest start of the run trained."""
    seconds_before: float = 0.0
    """The learner's time in earlier starts."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[MetricsRow] = field(default_factory=list)
    """The newest ones, logged when they were complete."""
    events: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def learner_time(self) -> LearnerTime:
        """The learner's time and tokens since the newest start, up to the last learner step."""
        return LearnerTime.between(
            {}, self.rows[-1].values if self.rows else {}, tokens=self.tokens
        )

    @property
    def seconds(self) -> float:
        """The learner's time in all starts, without the pauses between them."""
        return self.seconds_before + self.learner_time.total

    def take(self, line: bytes) -> None:
        """Add a line of METRICS; one that is none of a run is left out."""
        row = _row(line)
        if row is None:
            return
        self.totals.update(
            (name, value) for name, value in row.values.items() if name.startswith(_TOTALS)
        )
        if any(name.startswith("eval/") for name in row.values):
            self.evaluations = [*_before(row, self.evaluations), row]
        if "checkpoint/seconds" in row.values:
            self.checkpoints = [*self.checkpoints, row][-ROWS:]
        if "time/step" not in row.values:
            return
        if self.newest is not None and row.step <= self.newest.step:  # taken back from here on
            self.rows = _before(row, self.rows)
            self.evaluations = _before(row, self.evaluations)
        self._count(row, self.newest)
        self.newest = row
        if row.step % self.stride == 0 or not self.rows:
            self.rows.append(row)
        if len(self.rows) > ROWS:
            self.stride *= 2
            self.rows = [kept for kept in self.rows if kept.step % self.stride == 0]

    def _count(self, row: MetricsRow, before: MetricsRow | None) -> None:
        """Add a learner step to its start; one whose clock has gone back begins another."""
        if before is None or any(
            row.values.get(name, 0.0) < seconds
            for name, seconds in before.values.items()
            if name.startswith(LEARNER_PREFIX)
        ):
            earlier = {} if before is None else before.values
            self.seconds_before += LearnerTime.between({}, earlier).total
            self.starts += 1
            self.tokens = 0.0
        self.steps += 1
        self.tokens += row.values.get("rollout/response_tokens", 0.0)
        # absent when no token of the batch is in the loss
        self.lag_sum += row.values.get("train/staleness_mean", 0.0)
        self.lag_max = max(self.lag_max, row.values.get("train/staleness_max", 0.0))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which the metric is known, and its values."""
        known = [(row.step, row.values[name]) for row in self.rows if name in row.values]
        return [step for step, _ in known], [value for _, value in known]

    def buckets(self, name: str) -> list[str]:
        """List the lag buckets that have this metric, by lag."""
        found = {
            match[1]
            for row in self.rows
            for key in row.values
            if (match := re.fullmatch(rf"train/staleness_([\d-]+)/{name}", key))
        }
        return sorted(found, key=lambda bucket: int(bucket.partition("-")[0]))

    def setting(self, path: str) -> Any:
        """Look up a setting by its dotted path; None where there is none."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def between(self, first: int, last: int) -> list[MetricsRow]:
        """Read the rows of these learner steps, none left out."""
        found: dict[int, MetricsRow] = {}
        for line in _lines(self.directory / METRICS):
            match = _STEP.match(line)
            row = _row(line) if match and first <= int(match[1]) <= last else None
            if row is not None and "time/step" in row.values:
                found[row.step] = row
        return [found[step] for step in sorted(found)]


def read_run(run_dir: Path) -> RunData:
    """Read everything that is there. Raises SetupError for what is no run directory."""
    if not (run_dir / METRICS).is_file():
        raise SetupError(
            f"{run_dir} has no {METRICS}: it is no run directory (run.dir), or nothing was "
            "logged yet"
        )
    data = RunData(run_dir, read_settings(run_dir / "config.yaml"))
    for line in _lines(run_dir / METRICS):
        data.take(line)
    if data.newest is not None and (not data.rows or data.rows[-1] is not data.newest):
        data.rows.append(data.newest)
    data.samples = list(_samples(run_dir / SAMPLES))
    data.events = list(read_timeline(run_dir))
    with suppress(OSError):  # a run from before there was this file
        for found in json_objects((run_dir / STATUS).read_bytes()):
            data.status = of_now(found)
    return data


def _before(row: MetricsRow, rows: list[MetricsRow]) -> list[MetricsRow]:
    return [earlier for earlier in rows if earlier.step < row.step]


def _row(line: bytes) -> MetricsRow | None:
    try:
        read = json.loads(line)
        step, when = int(read.pop("step")), float(read.pop("time"))
        known = {metric(name): value for name, value in read.items() if value is not None}
        return MetricsRow(
            step, when, {name: float(known[name]) for name in known if _is_kept(name)}
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # cut off, or of another program


@cache
def _is_kept(name: str) -> bool:
    return name.startswith(("eval/", *_TOTALS[-3:])) or _KEPT.fullmatch(name) is not None


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    """Read the first and the newest responses, at most SAMPLE_BYTES from each end of the file."""
    if not path.is_file():
        return
    size = path.stat().st_size
    with open(path, "rb") as file:
        parts = [file.read(SAMPLE_BYTES)]
        if size > SAMPLE_BYTES:
            file.seek(max(SAMPLE_BYTES, size - SAMPLE_BYTES))
            parts.append(file.read(SAMPLE_BYTES))
    yield from json_objects(b"\n".join(parts), step=int)


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file
