"""The staleness experiment: what it decides from its rows, and a small one with a real engine and
learner.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.config.schema import TaskConfig
from benchmarks.rows import read_rows
from benchmarks.sorting import Sorting
from benchmarks.staleness import (
    ARMS,
    FULL,
    MORE,
    SETTINGS,
    SMOKE,
    Job,
    config_of,
    far_arms,
    jobs,
    next_job,
    tuned,
)
from benchmarks.staleness_table import Runs, interval, table

ROOT = Path(__file__).resolve().parents[2]
RATE = FULL.rates[1]
WORDS = {arm: text for arm, (text, _) in ARMS.items()}
PLACES = {name: text for name, (text, _, _) in SETTINGS.items()}


def row(
    kind: str, arm: str, lag: int, seed: int, lr: float, accuracy: float, setting: str = "addition"
) -> dict:
    job = {"kind": kind, "setting": setting, "arm": arm, "lag": lag, "seed": seed, "lr": lr}
    measured = {"accuracy": accuracy, "evaluations": [0.5, accuracy], "probability": 0.25}
    return job | measured | {"steps": 120, "batch": 16}


def tuning(best: dict[int, float]) -> list[dict]:
    """Every rate of every loss, `best` by lag."""
    return [
        row("tune", arm, lag, seed, rate, 0.9 if rate == best[lag] else 0.8)
        for arm in ARMS
        for lag in FULL.tuned_at
        for seed in FULL.tuning_seeds
        for rate in FULL.rates
    ]


TUNED = tuning({0: RATE, 16: RATE})


def all_runs(accuracy: object) -> list[dict]:
    """Every run of addition but the far ones; accuracy(arm, lag, seed)."""
    return [
        row("run", arm, lag, seed, RATE, accuracy(arm, lag, seed))
        for arm in ARMS
        for lag in FULL.lags
        for seed in range(FULL.seeds)
    ]


def test_the_best_mean_of_the_nearest_tuned_lag_is_taken() -> None:
    rows = tuning({0: FULL.rates[3], 16: FULL.rates[0]})
    assert [tuned(rows, "tis", lag, FULL) for lag in (0, 8)] == [FULL.rates[3]] * 2
    assert [tuned(rows, "tis", lag, FULL) for lag in (16, 32, 64)] == [FULL.rates[0]] * 3
    last = list(ARMS)[-1]
    assert tuned(rows[:-1], last, 32, FULL) is None, "the tuning is not complete"
    assert tuned(rows[:-1], last, 0, FULL) == FULL.rates[3]


def test_runs_begin_when_their_loss_is_tuned_and_no_run_is_done_twice(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    table_runs = {
        Job("run", "addition", arm, lag, seed, RATE)
        for arm in ARMS
        for lag in FULL.lags
        for seed in range(5)
    }
    more = {
        Job("run", setting, arm, lag, seed, RATE)
        for setting, cells in MORE.items()
        for arm, lag in cells
        for seed in range(5)
    }
    assert {job for job in jobs(TUNED, FULL) if job.kind == "run"} == table_runs | more
    assert all(job.kind == "tune" for job in jobs([], FULL))
    path.write_text("".join(json.dumps(one) + "\n" for one in TUNED) + '{"kind": "run", "ar')
    assert len(read_rows(path)) == len(TUNED)
    first = {next_job(path, FULL, part=part, parts=2) for part in (0, 1)}
    assert len(first) == 2 and first <= table_runs


def test_the_two_best_at_the_largest_lag_go_farther(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = TUNED + all_runs(lambda arm, lag, seed: 0.9 if arm in ("topr", "wide") else 0.8)
    assert far_arms(rows[:-1], FULL) == [], "the last run at lag 32 is missing"
    assert sorted(far_arms(rows, FULL)) == ["topr", "wide"]
    far = [job for job in jobs(rows, FULL) if job.lag == 64]
    assert len(far) == 10 and {job.arm for job in far} == {"topr", "wide"}
    rows += [row(job.kind, job.arm, 64, job.seed, job.lr, 0.9) for job in far]
    rows += [
        row("run", arm, lag, seed, RATE, 0.9, setting)
        for setting, cells in MORE.items()
        for arm, lag in cells
        for seed in range(5)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert all(next_job(path, FULL, part=part, parts=2) is None for part in (0, 1))


def test_intervals_are_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # s = sqrt(2.5), s / sqrt(5) = 0.7071
    assert mean == 3.0 and half == pytest.approx(2.776 * 0.70711, abs=1e-4)


def written(rows: list[dict]) -> str:
    rates = {(arm, lag): tuned(rows, arm, lag, FULL) for arm in ARMS for lag in FULL.tuned_at}
    return "\n".join(table(rows, rates=rates, arms=WORDS, settings=PLACES))


@pytest.mark.parametrize(
    ("harm", "words"),
    [(0.12, "old data hurts here"), (0.05, "too little for this experiment to show anything")],
)
def test_the_verdict_follows_from_the_rows(harm, words) -> None:
    falls = {"naive": harm / 16, "tis": 0.0002, "topr": 0.002}
    rows = TUNED + all_runs(lambda arm, lag, seed: 1.0 - falls.get(arm, 0.0) * lag)
    text = written(rows)
    assert words in text
    assert "| tis: at least 99% of its lag 0 at 32 | 99.4% ± 0.0 | met |" in text
    assert "| topr: at least 99% of its lag 0 at 16 | 96.8% ± 0.0 | not met |" in text
    assert "| tis | 0.0002 | 0.0002 | 100.0% ± 0.0 | 99.8% ± 0.0 |" in text
    assert "Not complete" in written(TUNED)
    rows += [row("run", "tis", lag, 0, RATE, 0.7, "larger") for lag in (0, 16)]
    assert "Larger: addition with a model of 2.2 M weights" in written(rows)


def test_losses_are_compared_seed_by_seed() -> None:
    more = {"tis": [0.01, 0.02, 0.03, 0.02, 0.02], "topr": [-0.05, 0.05, -0.04, 0.05, 0.01]}
    rows = all_runs(
        lambda arm, lag, seed: (
            0.5 + 0.1 * seed + (more[arm][seed] if lag == 8 and arm in more else 0.0)
        )
    )
    text = written(TUNED + rows[:-1])  # one seed lacks its partner
    assert "| tis | +0.0 ± 0.0 | **+2.0 ± 0.9** | +0.0 ± 0.0 | +0.0 ± 0.0 |" in text
    assert "| topr | +0.0 ± 0.0 | +0.4 ± 5.9 | +0.0 ± 0.0 | +0.0 ± 0.0 |" in text
    assert Runs(rows, "sorting").over("tis", "constant", 8) == []


@pytest.mark.parametrize("arm", list(ARMS))
def test_every_loss_is_a_valid_configuration_with_its_lag(arm, tmp_path) -> None:
    config = config_of("addition", Job("run", "addition", arm, 32, 0, 4e-4), FULL, str(tmp_path))
    assert (config.replay.max_staleness, config.learner.lr, config.updates_per_step) == (
        32,
        4e-4,
        2,
    )
    assert config.learner.schedule == "linear" and config.max_outstanding == 33 * 16
    narrows = arm in ("bounded", "combined", "widening")
    assert (config.algorithm.clip_schedule.kind == "harmonic") == narrows


def test_an_interval_that_widens() -> None:
    """A ratio of 1.5 is beyond 1.28 at lag 0, within 1 + 0.28 * 3 at lag 16."""
    widening = importlib.import_module("benchmarks.widening")
    lags = torch.tensor([[0, 16, 64]])
    logprobs = torch.full((1, 3), math.log(1.5), requires_grad=True)
    loss, found = policy_loss(
        "widening",
        logprobs,
        anchor_logprobs=torch.zeros(1, 3),
        behavior_logprobs=torch.zeros(1, 3),
        advantages=torch.ones(1, 3),
        loss_mask=torch.ones(1, 3),
        staleness=lags,
        clip=Clip(0.2, 0.28, kind="harmonic", rate=0.125),
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, -1.5, -1.5]]
    assert found["clipped_high"].tolist() == [[1.0, 0.0, 0.0]] and widening.CAP_HIGH == 1.5


def test_sorting_keeps_its_sides_apart() -> None:
    task = Sorting(TaskConfig(name="benchmarks.sorting:Sorting"), 0)
    held_out = {problem.prompt for problem in task.evaluation(500)}
    trained = {task.train(index).prompt for index in range(3000)}
    assert len(held_out) == 500 and not held_out & trained and len(trained) > 2900
    problem = task.train(7)
    assert problem.solution == "".join(sorted(problem.prompt[:-1])) and problem.prompt[-1] == ">"
    assert task.score(problem.solution, problem.reference).verdict == 1.0
    assert task.score(problem.solution[::-1] + "0", problem.reference).verdict == 0.0


def story(home: Path) -> list[dict]:
    """The rows of a small experiment."""
    path = home / "rows.jsonl"
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.staleness", "--smoke", "--rows", str(path)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return read_rows(path)


@pytest.mark.timeout(900)
def test_a_small_experiment_trains_at_exactly_its_lag(shared_run: list[dict]) -> None:
    runs = [one for one in shared_run if one["kind"] == "run"]
    assert sorted((one["arm"], one["lag"]) for one in runs) == sorted(
        (arm, lag) for arm in SMOKE.arms for lag in SMOKE.lags
    )
    assert all(one["lag_mean"] == one["lag_max"] == one["lag"] for one in runs), (
        "every token after the first steps has exactly the forced lag"
    )
