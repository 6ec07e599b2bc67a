"""Asynchronous against synchronous: what the benchmark decides from its rows, its task, and how it
reads a run.
"""

from __future__ import annotations

import statistics
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.schema import TaskConfig
from benchmarks.async_vs_sync.__main__ import (
    PLACES,
    RATES,
    SEEDS,
    SIDES,
    STEPS,
    Job,
    course,
    draw,
    jobs,
    table,
    until,
)
from benchmarks.async_vs_sync.long_sums import LONGEST, LongSums


def row(job: Job, *, groups_per_s: float = 10.0, late: float = 0.9, pace: float = 1.0) -> dict:
    """The row of a job whose accuracy rises evenly from 0.5 to `late`."""
    points = [
        (step, step / pace, 100 * step, 0.5 + (late - 0.5) * step / STEPS)
        for step in range(0, STEPS + 1, 20)
    ]
    measured = {"groups_per_s": groups_per_s, "idle": 0.25, "lag_mean": 1.5, "machine": "M"}
    return job.__dict__ | measured | {"points": points, "steps": STEPS}


def everything() -> list[dict]:
    """All rows: two of both are best for the synchronous side, at the highest rate."""
    rows: list[dict] = []
    for _ in range(100):
        job = next((one for one in jobs(rows) if one not in map(Job.of, rows)), None)
        if job is None:
            return rows
        fits = (job.places == "two engines, two ranks") == (job.side == "synchronous")
        late = 0.98 if (job.lr == RATES[2]) == (job.side == "synchronous") else 0.9
        pace = 1.0 if job.side == "synchronous" else 2.0 + 0.01 * job.seed
        rows.append(row(job, groups_per_s=9.0 + fits, late=late, pace=pace))
    raise AssertionError("no end")


def test_each_side_gets_what_is_best_for_it_and_the_sides_take_turns() -> None:
    rows = everything()
    kinds = [entry["kind"] for entry in rows]
    assert [kinds.count(kind) for kind in ("places", "rates", "runs")] == [
        len(SIDES) * len(PLACES),
        len(SIDES) * len(RATES),
        len(SIDES) * SEEDS,
    ]
    runs = [entry for entry in rows if entry["kind"] == "runs"]
    chosen = {entry["side"]: (entry["places"], entry["lr"]) for entry in runs}
    assert chosen["synchronous"] == ("two engines, two ranks", RATES[2])
    assert chosen["asynchronous"][0] == "one engine, one rank"
    assert chosen["asynchronous"][1] in RATES[:2]
    first = [entry["side"] for entry in runs[::2]]
    assert all(one != other for one, other in pairwise(first))
    assert [entry["seed"] for entry in runs[::2]] == [entry["seed"] for entry in runs[1::2]]


def test_the_table_pairs_by_seed_and_says_what_was_never_reached() -> None:
    text = "\n".join(table(everything()))
    assert "| seconds until 90% | 167 ± 0 | 83 ± 1 | 2.02 ± 0.02 times |" in text
    assert "| tokens until 90% | 16,667 ± 0 | 16,667 ± 0 | 1.00 ± 0.00 times |" in text
    low = [entry | {"points": [(*p[:3], p[3] - 0.05) for p in entry["points"]]}
           for entry in everything()]  # fmt: skip
    assert "never in 5" in "\n".join(table(low))
    assert table([]) == ["Not measured yet."]


def test_a_goal_lies_between_two_evaluations() -> None:
    points = [(0, 0.0, 0, 0.5), (20, 10.0, 400, 0.8), (40, 30.0, 800, 1.0)]
    assert until(points, 0.9, 1) == pytest.approx(20.0)
    assert until(points, 0.65, 2) == pytest.approx(200.0)
    assert until(points, 0.4, 1) == 0.0
    assert until(points[:2], 0.9, 1) is None


def test_the_clock_starts_with_the_first_step_and_goes_on_through_evaluations() -> None:
    lines: list[dict[str, float]] = [{"step": 0, "time": 99.0, "eval/accuracy_greedy": 0.4}]
    for step in range(1, 21):
        lines.append(
            {
                "step": step,
                "time": 100.0 + 2 * step,
                "time/step": 1.5,
                "rollout/response_tokens": 50.0,
                "train/staleness_mean": 1.0,
                "time/learner/idle": 0.5 * step,
            }
        )
    lines.append({"step": 20, "time": 143.0, "eval/accuracy_greedy": 0.8})
    found = course(lines)
    assert found["points"] == [(0, 0.0, 0, 0.4), (20, 39.5, 1000, 0.8)]
    assert found["groups_per_s"] == pytest.approx(16 * 10 / 20)
    assert (found["idle"], found["lag_mean"]) == (0.25, 1.0)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(everything(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_answers_of_long_sums_differ_in_length_and_fit() -> None:
    config = load_config("benchmarks/async_vs_sync/long_sums.yaml", [])
    task = LongSums(TaskConfig(name="benchmarks.async_vs_sync.long_sums:LongSums"), 0)
    problems = [task.train(index) for index in range(2000)]
    lengths = [len(problem.solution) + 1 for problem in problems]
    assert max(lengths) <= config.rollout.response_length
    assert max(len(problem.prompt) for problem in problems) <= config.rollout.prompt_length
    assert max(lengths) > 4 * statistics.mean(lengths), "a long tail"
    for problem in problems:
        addends = [int(part) for part in problem.prompt.rstrip("=").split("+")]
        assert 2 <= len(addends) <= LONGEST
        assert list(map(int, problem.solution.split(","))) == list(accumulate(addends))[1:]
        assert task.score(problem.solution + "\n", problem.reference).correct == 1.0
        assert task.score(problem.solution + "1", problem.reference).correct == 0.0
    held_out = {problem.prompt for problem in task.evaluation(400)}
    assert len(held_out) == 400
    assert not held_out & {problem.prompt for problem in problems}
