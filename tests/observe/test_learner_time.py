"""The logged metrics, the panel, the summary, the verdict and the report say the same of one run:
how much of its time the learner is idle, and how many tokens it trains per second.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import pytest

from async_grpo.learner.batching import RankPlan, RowKey, RowValue
from async_grpo.observe.bottleneck import BottleneckWatch
from async_grpo.observe.console.progress import WINDOW_S, Progress
from async_grpo.observe.throughput import ThroughputSettings
from async_grpo.run.checkpoint.resume import earlier_evaluations
from async_grpo.run.loop import Loop
from async_grpo.run.summary import summarise
from async_grpo.runtime.text import duration
from async_grpo.runtime.time_ledger import LEARNER_CAUSES, LearnerTime, TimeByCause
from async_grpo.tools.report.data import read_run
from async_grpo.tools.report.facts import tiles
from async_grpo.tools.report.plots import times_by_cause
from async_grpo.wire.codec import Batch
from tests.support.loops import WEIGHTS, batch_of, config, finished_trainer

STEPS = 9


class Run:
    """Queue, learner and publisher that take invented time; `rows`: what the loop logged."""

    def __init__(self) -> None:
        self.now, self._chance = 1000.0, random.Random(5)
        self.rows: list[dict[str, float]] = []
        self.loop = Loop(
            config(run={"total_steps": STEPS}),
            queue=self,
            learner=self,
            publisher=self,
            weights=WEIGHTS,
            total_steps=STEPS,
            steps_done=0,
            listener=self,
        )
        self.loop.time = TimeByCause(LEARNER_CAUSES, clock=lambda: self.now, wall=lambda: self.now)

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append(metrics | {"step": step, "time": self.now})

    def note(self, text: str) -> None:
        raise AssertionError(text)

    def takes(self, most: float) -> None:
        """Invented time passes; the whole run fits into the panel's window."""
        self.now += self._chance.uniform(0.0, most / 2)

    async def get_batch(self, step: int) -> Batch:
        self.takes(4.0 if step % 3 else 0.1)
        return batch_of(step)

    async def metrics(self) -> dict[str, float]:
        self.takes(0.2)
        step = len(self.rows) + 1.0
        return {
            "replay/trained": 4.0 * step,
            "cluster/rollout_actors": 1.0,
            "time/engine/working": 2.0 * step,
            "time/engine/blocked": 0.0,
            "time/engine/paused": 0.0,
            "replay/ready_wait_s": 0.1,
        }

    async def prepare(self, plans: Sequence[RankPlan]) -> dict[RowKey, float]:
        self.takes(2.0)
        self._updates = len(plans[0].updates)
        return {}

    async def train(
        self, values: dict[RowKey, RowValue], kl_coef: float, lr_factor: float
    ) -> list[dict[str, Any]]:
        for _ in range(self._updates):
            self.takes(1.0)
        step = self.loop.steps_done + 1
        sums = {"train/staleness_mean": [step % 4 + 1.0, 2.0]}
        return [{"sums": sums, "highs": {"train/staleness_max": float(step % 4)}, "lows": {}}]

    async def publish(self, version: int) -> float:
        self.takes(0.5)
        return 0.0

    def weight_metrics(self) -> dict[str, float]:
        return {}

    async def refresh(self, version: int) -> None: ...

    async def all_steps(self) -> list[dict[str, float]]:
        """All steps, with an evaluation before the first and a checkpoint now and then."""
        with self.loop.time.during("evaluating"):
            self.now += 1.5
        for step in range(STEPS):
            await self.loop.step()
            with self.loop.time.during("checkpointing"):
                self.now += 1.5 * (step % 4 == 0)
        return self.rows


def summary(loop: Loop, **facts: Any) -> dict[str, str]:
    """The closing table of a run with this loop."""
    trainer = finished_trainer(
        loop, config(run={"total_steps": STEPS}), steps_done=STEPS, total_steps=STEPS, **facts
    )
    return dict(summarise(trainer, Path("/runs/r/c")))


@pytest.fixture
def run() -> Run:
    async def scenario() -> Run:
        run = Run()
        await run.all_steps()
        return run

    return asyncio.run(scenario())


def test_all_places_agree_on_idle_and_on_tokens_per_second(run: Run, tmp_path: Path) -> None:
    rows = run.rows
    wall = rows[-1]["time"] - 1000.0
    tokens = sum(row["rollout/response_tokens"] for row in rows)
    starved = rows[-1]["time/learner/idle"]
    assert 0.2 < starved / wall < 0.8 and tokens > 100

    # the logged metrics: weighted by the time of their lines, they are those of the run
    took = [end - begin for begin, end in pairwise([1000.0, *(row["time"] for row in rows)])]
    for name, whole in (("time/learner_idle", starved), ("train/tokens_per_s", tokens)):
        parts = [row[name] * seconds for row, seconds in zip(rows, took, strict=True)]
        assert sum(parts) == pytest.approx(whole), name

    # the summary
    told = summary(run.loop)
    assert told["tokens trained"].startswith(
        f"{tokens:,.0f} response tokens, {tokens / wall:,.0f} per second"
    )
    assert f", {starved / wall:.0%} waiting for groups" in told["learner time"]
    shares = [int(part.split("%")[0]) for part in told["learner time"].split(", ")]
    assert 100 - len(shares) <= sum(shares) <= 100 + len(shares), "all of the time is named"
    assert told["learner steps"].startswith(f"{STEPS} in {duration(wall)} ({wall / STEPS:.2f} s")
    lag = sum(row["train/staleness_mean"] for row in rows) / STEPS
    assert told["staleness"].startswith(f"mean {lag:.2f}, largest 3 learner steps")

    # the report: its tiles and its picture
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_run(tmp_path)
    shown = dict(tiles(data)[2])
    assert shown["tokens/s trained"] == f"{tokens / wall:,.0f}"
    assert shown["learner idle"] == f"{starved / wall:.0%}"
    assert shown["learner's time, pauses apart"] == duration(wall)
    assert (
        shown["staleness, mean"] == f"{lag:.2f}" and shown["staleness, largest (bound None)"] == "3"
    )
    causes = dict(times_by_cause(data))["learner time"]
    assert causes["idle"] / sum(causes.values()) == pytest.approx(starved / wall)
    assert causes["evaluating"] == pytest.approx(1.5)

    # the panel, whose window holds the whole run
    clock = chain([1000.0], (row["time"] for row in rows), repeat(rows[-1]["time"]))
    progress = Progress(clock=lambda: next(clock))
    for step, row in enumerate(rows, 1):
        progress.logged(step, STEPS, row)
    metrics = progress.facts()["metrics"]
    assert wall < WINDOW_S
    assert metrics["learner_idle"] == pytest.approx(starved / wall)
    assert metrics["tokens_trained_per_s"] == pytest.approx(tokens / wall)

    # the verdict, which begins at the first line
    watch = BottleneckWatch(
        ThroughputSettings.configured(config(), max_num_seqs=256), min_steps=STEPS - 1, min_s=0.0
    )
    told = [watch.observe(row | {"rollout/tokens_per_s_per_response": 1.0}) for row in rows]
    idle = (starved - rows[0]["time/learner/idle"]) / (rows[-1]["time"] - rows[0]["time"])
    assert told[-1] is not None and f"learner idle {idle:.0%}" in told[-1].text


def test_a_resumed_run_says_what_is_of_this_start_and_leaves_the_pause_out(
    run: Run, tmp_path: Path
) -> None:
    before = {"step": 0, "time": 999.0, "eval/accuracy_greedy": 0.25, "eval/problems": 8.0}
    again = [
        row
        | {"step": row["step"] + STEPS, "time": row["time"] + 5000.0, "train/staleness_max": 2.0}
        for row in run.rows[:-2]
    ]
    rows = [before, *run.rows, *again]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_run(tmp_path)
    tokens = sum(row["rollout/response_tokens"] for row in again)
    now = LearnerTime.between({}, again[-1], tokens=tokens)
    assert (data.learner_time, data.starts, data.steps) == (now, 2, 2 * STEPS - 2)
    shown = dict(tiles(data)[2])
    wall = run.rows[-1]["time"] - 1000.0
    assert shown["learner's time, pauses apart"] == duration(wall + now.total)
    assert shown["tokens/s trained since the last start"] == f"{now.tokens_per_s:,.0f}"
    assert shown["staleness, largest (bound None)"] == "3", "of the whole run"

    assert earlier_evaluations(tmp_path, STEPS)[0] == (0, before)
    evaluations = [(0, before), (2 * STEPS, before | {"eval/accuracy_greedy": 0.5})]
    told = summary(run.loop, resumed_at=STEPS, evaluations=evaluations)
    assert told["held-out accuracy, greedy"] == f"25.0% -> 50.0% after step {2 * STEPS}"
    assert told["KV caches"] == "kept 1 time, computed again 206 times"
    assert {name for name in told if name.endswith(", this start")} == {
        f"{name}, this start"
        for name in (
            "score",
            "learner steps",
            "tokens trained",
            "staleness",
            "weight syncs",
            "learner time",
        )
    }
