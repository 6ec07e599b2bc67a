"""The staleness experiment: what it decides from its rows, and a small one with a real engine and
learner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.staleness import (
    ARMS,
    FULL,
    SMOKE,
    Job,
    config_of,
    gains,
    interval,
    jobs,
    next_job,
    read_rows,
    table,
    tuned,
)

ROOT = Path(__file__).resolve().parents[2]


def row(kind: str, arm: str, lag: int, seed: int, lr: float, accuracy: float) -> dict:
    return {"kind": kind, "arm": arm, "lag": lag, "seed": seed, "lr": lr, "accuracy": accuracy}


def tuning(best: float) -> list[dict]:
    """Every rate of every loss: falls off by three points per rate above `best`, and by half a
    point per rate below.
    """
    place = FULL.rates.index(best)
    return [
        row(
            "tune",
            arm,
            0,
            seed,
            rate,
            0.95 - 0.03 * max(0, index - place) - 0.005 * max(0, place - index),
        )
        for arm in ARMS
        for seed in FULL.tuning_seeds
        for index, rate in enumerate(FULL.rates)
    ]


def test_the_highest_rate_within_a_point_of_the_best_is_taken() -> None:
    assert tuned(tuning(FULL.rates[2]), "tis", FULL) == FULL.rates[2]
    flat = [
        one | {"accuracy": 0.9 - 0.009 * (one["lr"] == FULL.rates[-1])}
        for one in tuning(FULL.rates[2])
    ]
    assert tuned(flat, "tis", FULL) == FULL.rates[-1]
    assert tuned(flat[:-1], list(ARMS)[-1], FULL) is None, "the tuning is not complete"


def test_runs_begin_when_their_loss_is_tuned_and_no_run_is_done_twice(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = tuning(FULL.rates[1])
    wanted = {
        Job("run", arm, lag, seed, FULL.rates[1]).key
        for arm in ARMS
        for lag in FULL.lags
        for seed in range(5)
    }
    assert {job.key for job in jobs(rows, FULL) if job.kind == "run"} == wanted
    assert all(job.kind == "tune" for job in jobs([], FULL))
    path.write_text("".join(json.dumps(one) + "\n" for one in rows) + '{"kind": "run", "ar')
    assert len(read_rows(path)) == len(rows)
    first = {next_job(path, FULL, part=part, parts=2).key for part in (0, 1)}
    assert len(first) == 2 and first <= wanted
    everything = rows + [row(*key, 0.9) for key in wanted]
    path.write_text("".join(json.dumps(one) + "\n" for one in everything))
    assert all(next_job(path, FULL, part=part, parts=2) is None for part in (0, 1))


def test_intervals_are_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # s = sqrt(2.5), s / sqrt(5) = 0.7071
    assert mean == 3.0 and half == pytest.approx(2.776 * 0.70711, abs=1e-4)


@pytest.mark.parametrize(
    ("harm", "words"),
    [(0.12, "old data hurts here"), (0.05, "too little for this experiment to show anything")],
)
def test_the_verdict_follows_from_the_rows(harm, words) -> None:
    rows = tuning(FULL.rates[1])
    for arm in ARMS:
        for lag in FULL.lags:
            fall = (
                harm * lag / 16
                if arm == "naive"
                else 0.04 * (lag == 32)
                if arm == "bounded"
                else 0.06 * (lag == 32)
            )
            rows += [row("run", arm, lag, seed, FULL.rates[1], 1.0 - fall) for seed in range(5)]
    text = "\n".join(table(rows, FULL))
    assert words in text
    assert "| bounded: at least 95% of lag 0 at lag 32 | 96.0% ± 0.0 at lag 32 | met |" in text
    assert "| combined: at least 95% of lag 0 at lag 32 | 94.0% ± 0.0 at lag 32 | not met |" in text
    assert "Not complete" in "\n".join(table(tuning(FULL.rates[1]), FULL))


def test_what_the_schedule_adds_is_counted_seed_by_seed() -> None:
    differences = {
        "bounded": [0.01, 0.02, 0.03, 0.02, 0.02],
        "combined": [-0.05, 0.05, -0.04, 0.05, 0.01],
    }
    rows = [
        row(
            "run",
            arm,
            lag,
            seed,
            FULL.rates[1],
            0.5 + 0.1 * seed + (differences[arm][seed] if lag == 8 and arm in differences else 0.0),
        )
        for arm in ARMS
        for lag in FULL.lags
        for seed in range(5)
    ]
    text = "\n".join(gains(rows[:-1], FULL))  # one seed lacks its partner
    assert (
        "| bounded - constant | +0.0 ± 0.0 | +0.0 ± 0.0 | +0.0 ± 0.0 | +2.0 ± 0.9 | +0.0 "
        "± 0.0 | +0.0 ± 0.0 | lag 8 |" in text
    )
    assert (
        "| combined - tis | +0.0 ± 0.0 | +0.0 ± 0.0 | +0.0 ± 0.0 | +0.4 ± 5.9 | +0.0 ± "
        "0.0 | +0.0 ± 0.0 | nowhere |" in text
    )
    assert "| - | nowhere |" in "\n".join(gains([], FULL))


@pytest.mark.parametrize("arm", list(ARMS))
def test_every_loss_is_a_valid_configuration_with_its_lag(arm, tmp_path) -> None:
    config = config_of(Job("run", arm, 32, 0, 4e-4), FULL, str(tmp_path))
    assert (config.replay.max_staleness, config.learner.lr, config.updates_per_step) == (
        32,
        4e-4,
        2,
    )
    assert (config.algorithm.clip_schedule.kind == "harmonic") == (arm in ("bounded", "combined"))


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
