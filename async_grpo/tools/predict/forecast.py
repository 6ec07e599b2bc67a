"""What a run is expected to come to, and what it came to.

Runs in: the driver. Hides where a measurement is from: an earlier start of the run, or another
run of the same model and task in the same parent directory, measured on this machine, else the
first `PROBE` steps of the run itself.

    RUN_DIR/plan.json   measured (for plans of other runs), source, predicted, found, errors

Invariants: a prediction is made once and never changed; what it is compared with comes after it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.tools.predict.measure import Meter, relative_errors
from async_grpo.tools.predict.rehearsal import Prediction, Rehearsal, predict
from async_grpo.tools.predict.workload import CPU_CONTENTION, Measured, Workload, crowding

NAME = "plan.json"
PROBE, EVERY = 20, 100
"""Steps until a prediction without another run, and between two writes."""
WARM = 3
"""Steps left out beside one for each batch that is generated under the first weights."""
SHOWN = ("groups_per_s", "tokens_per_s", "idle", "staleness_mean", "masked")
QUICK = 12
"""Steps of the rehearsals that a verdict compares."""


def describe(found: Prediction) -> str:
    """Say what is expected, in words."""
    masked = f", {found.masked:.0%} of the tokens too old" if found.masked >= 0.005 else ""
    return (
        f"{found.tokens_per_s:,.0f} response tokens/s, {found.step_s:.2g} s a learner step, "
        f"learner idle {found.idle:.0%}, staleness {found.staleness_mean:.1f} on average and "
        f"{found.staleness_max:.0f} at most{masked}"
    )


class Forecast:
    """The prediction of a run. actors: that serve; cores: as in `ThroughputSettings`, None where
    models run on GPUs. error: is told when plan.json cannot be written, once.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        max_num_seqs: int,
        actors: int,
        cores: int | None,
        error: Callable[[str], None],
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._seqs, self._actors = max_num_seqs, actors
        self._error: Callable[[str], None] | None = error
        shares = cores is None or cores < config.learner.ranks + 1
        self._contention = 1.0 if shares else CPU_CONTENTION
        self._cores = cores
        self._kind, self._step = kind(config), 0
        self._all = self._meter(WARM + config.replay.max_staleness)
        self._after = self._all
        self.predicted: Prediction | None = None
        """What the run is expected to come to; None before that is known."""
        self._gains: dict[tuple[tuple[str, float], ...], float] = {}
        self.source = ""
        """Where the measurement behind the prediction is from."""
        for path in measured_beside(config, run_dir):
            self._predict(Measured.read(path), str(path.parent))
            break

    def expected(self) -> str:
        """Say what the run is expected to come to; "" before that is known."""
        if self.predicted is None:
            return ""
        return f"expected, from {self.source}: {describe(self.predicted)}"

    def observe(
        self,
        metrics: Mapping[str, float],
        lengths: Sequence[tuple[int, ...]],
        generation_s: Sequence[float],
    ) -> dict[str, float]:
        """Take a learner step and its groups; return the prediction as metrics, once."""
        self._all.observe(metrics, lengths, generation_s)
        if self._after is not self._all:
            self._after.observe(metrics, lengths, generation_s)
        self._step += 1
        out = self.metrics() if self._step == 1 else {}
        if self.predicted is None and self._all.steps >= PROBE:
            found = self._measured()
            if found is not None:
                self._predict(found, f"the first {self._step} steps")
                self._after = self._meter(0)
                out = self.metrics()
        if self._step % EVERY == 0 or out:
            self.write()
        return out

    def metrics(self) -> dict[str, float]:
        """Return the prediction as metrics."""
        known = {} if self.predicted is None else asdict(self.predicted)
        return {f"plan/{name}": known[name] for name in SHOWN if name in known}

    def gain(self, advice: Mapping[str, float]) -> float | None:
        """Predict by what factor throughput changes with these settings; None while too little is
        known, and of open episodes, which a rehearsal does not count. learner.ranks: how many times
        as many.
        """
        measured, known = self._measured(), tuple(sorted(advice.items()))
        if measured is None or "rollout.max_open_episodes" in advice:
            return None
        if known not in self._gains:
            now = self._workload(measured)
            rates = [
                Rehearsal(work, steps=QUICK).run().groups_per_s
                for work in (now, now.with_settings(advice))
            ]
            self._gains[known] = rates[1] / rates[0]
        return self._gains[known]

    def errors(self) -> dict[str, float]:
        """Compare the prediction with the steps after it; {} while there is too little."""
        found = self._found()
        if self.predicted is None or not found:
            return {}
        return relative_errors(predicted=asdict(self.predicted), found=found)

    def write(self) -> None:
        """Write plan.json, in one piece."""
        measured = self._measured()
        if measured is None:
            return
        record = {
            "kind": self._kind,
            "measured": asdict(measured),
            "places": self._seqs,
            "actors": self._actors,
            "cores": self._cores,
            "source": self.source,
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "found": self._found(),
            "errors": self.errors(),
        }
        draft = self._run_dir / (NAME + ".draft")
        try:
            draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
            os.replace(draft, self._run_dir / NAME)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            if self._error is not None:
                self._error(f"{self._run_dir / NAME} could not be written: {error.strerror}")
                self._error = None

    def _meter(self, skip: int) -> Meter:
        return Meter(
            skip=skip,
            batch=self._config.rollout.rollout_batch_size,
            contention=self._contention,
            crowd=crowding(self._actors, self._config.learner.ranks, self._cores),
        )

    def _measured(self) -> Measured | None:
        return self._all.measured(every_steps=self._config.weight_sync.every_steps)

    def _workload(self, measured: Measured) -> Workload:
        return Workload.of(
            self._config, measured, max_num_seqs=self._seqs, actors=self._actors, cores=self._cores
        )

    def _predict(self, measured: Measured, source: str) -> None:
        self.predicted, self.source = predict(self._workload(measured)), source

    def _found(self) -> dict[str, float]:
        meter = self._after
        if meter.steps < PROBE:
            return {}
        time = meter.time
        return {
            "groups_per_s": meter.groups_per_s,
            "tokens_per_s": time.tokens_per_s,
            "idle": time.idle,
            "staleness_mean": meter.staleness_mean,
            "steps": float(meter.steps),
        }


def kind(config: Config) -> dict[str, Any]:
    """Return what a measurement depends on, besides what a plan may change: model, task, learner,
    engine and machine.
    """
    found = config.model_dump(mode="json")
    rollout, learner, task = found["rollout"], found["learner"], found["task"]
    rollout.pop("rollout_batch_size")
    task["verifier"].pop("workers")
    for name in ("lr", "schedule", "warmup_steps"):
        learner.pop(name, None)
    cluster = found["cluster"]
    return {
        "model": found["model"],
        "task": task,
        **({"tasks": found["tasks"]} if config.tasks else {}),
        "rollout": rollout,
        "learner": learner,
        "policy_loss": config.algorithm.policy_loss.name,
        "engine": cluster["engine"],
        "device": cluster["device"],
        "machine": [platform.node(), platform.machine(), os.cpu_count()],
    }


def measured_beside(config: Config, run_dir: Path) -> Iterator[Path]:
    """Find the plan.json of runs of the same kind in the parent directory: that of the run itself,
    which goes on, then the newest.
    """
    wanted = json.loads(json.dumps(kind(config)))
    try:
        found = [(path.stat().st_mtime, path) for path in run_dir.parent.glob(f"*/{NAME}")]
    except OSError:
        return
    for _, path in sorted(found, key=lambda one: (one[1].parent == run_dir, one), reverse=True):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            Measured.of(record["measured"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written, or of another version
        known = record.get("kind", {})
        learner = known.get("learner", {}) if isinstance(known, dict) else {}
        chosen = {
            key: learner.get(key) for key, value in wanted["learner"].items() if value == "auto"
        }
        if known == wanted | {"learner": wanted["learner"] | chosen}:
            yield path
