"""Asynchronous against synchronous: what the benchmark decides from its rows, its tasks, and how it
reads a run.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.schema import TaskConfig
from async_grpo.environments.base import Action
from benchmarks.async_vs_sync.__main__ import (
    SEEDS,
    SIDES,
    TUNING_SEED,
    WORKLOADS,
    Job,
    course,
    draw,
    jobs,
    table,
    until,
)
from benchmarks.async_vs_sync.long_sums import LONGEST, LongSums
from benchmarks.async_vs_sync.slow_tools import LONGEST as LONGEST_CALL
from benchmarks.async_vs_sync.slow_tools import SlowCalculator, SlowChain, seconds

SLOW, FAST = "calculator, 2 s", "calculator, 0.5 s"


def row(job: Job) -> dict:
    """The row of a job whose accuracy rises evenly from 0.5, to 0.98 with what is best: shared
    cores and the high rate, or staleness 4 and the low one. The asynchronous side is twice as fast.
    """
    synchronous = job.side == "synchronous"
    rates = WORKLOADS[job.workload].rates
    right = (
        job.choice in ("cores shared", "staleness 4") and job.lr == rates[-1 if synchronous else 0]
    )
    end, pace = 0.98 if right else 0.88, 1.0 if synchronous else 2.0 + 0.01 * job.seed
    steps = WORKLOADS[job.workload].steps
    points = [
        (step, step / pace, 100 * step, 0.5 + (end - 0.5) * step / steps)
        for step in range(0, steps + 1, 2)
    ]
    measured = {"groups_per_s": 5.0 * pace, "idle": 0.25, "staleness_mean": 1.5, "machine": "M; 1"}
    return job.__dict__ | measured | {"points": points}


def everything(name: str = SLOW) -> list[dict]:
    """All rows of a workload."""
    rows: list[dict] = []
    for _ in range(100):
        job = next((one for one in jobs(name, rows) if one not in map(Job.of, rows)), None)
        if job is None:
            return rows
        rows.append(row(job))
    raise AssertionError("no end")


def test_each_side_gets_what_is_best_for_it_and_the_sides_take_turns() -> None:
    rows = everything()
    tuning = [entry for entry in rows if entry["kind"] == "tuning"]
    assert {entry["workload"] for entry in tuning} == {FAST}, "tuned where a run is short"
    assert {entry["seed"] for entry in tuning} == {TUNING_SEED}
    tried = [[entry["side"] for entry in tuning].count(side) for side in SIDES]
    assert tried == [4, 4], "the same budget"
    runs = [entry for entry in rows if entry["kind"] == "runs"]
    assert len(runs) == len(SIDES) * SEEDS
    low, high = WORKLOADS[FAST].rates
    chosen = {entry["side"]: (entry["choice"], entry["lr"]) for entry in runs}
    assert chosen == {"synchronous": ("cores shared", high), "asynchronous": ("staleness 4", low)}
    first = [entry["side"] for entry in runs[::2]]
    assert all(one != other for one, other in pairwise(first))
    assert [entry["seed"] for entry in runs[::2]] == [entry["seed"] for entry in runs[1::2]]


def test_what_one_workload_has_tuned_is_not_tuned_again() -> None:
    rows = [entry for entry in everything(FAST) if entry["kind"] == "tuning"]
    left = [job for job in jobs(SLOW, rows) if job not in map(Job.of, rows)]
    assert len(left) == len(SIDES) * SEEDS


def test_a_pretrained_model_runs_with_every_bound_and_one_rate() -> None:
    rows = everything("sums")
    assert {(entry["kind"], entry["lr"]) for entry in rows} == {("runs", 2e-5)}
    choices = [entry["choice"] for entry in rows]
    bounds = WORKLOADS["sums"].asynchronous
    assert [choices.count(one) for one in ("cores shared", *bounds)] == [SEEDS] * 3
    text = "\n".join(table(rows))
    assert all(f"| 5 | cores shared, 2e-05 -> {bound}, 2e-05 |" in text for bound in bounds)
    assert "75%: " in text


def test_the_table_pairs_by_seed_and_says_what_was_never_reached() -> None:
    rows = everything()
    text = "\n".join(table(rows))
    assert "cores shared, 0.0003 -> staleness 4, 0.0001" in text
    assert "| 5.00 -> 10.10 | 2.02 ± 0.02 times | 90%: 17 -> 8 | 0.50 ± 0.00 times |" in text
    assert "| 0.50 ± 0.00 times | **+24.2 ± 0.2** |" in text
    assert len(table(rows)) == len(table(rows[:-1])), "a seed with one side is left out"
    assert "| 4 | cores" in "\n".join(table(rows[:-1]))
    low = [
        entry | {"points": [(*p[:3], min(p[3], 0.89)) for p in entry["points"]]} for entry in rows
    ]
    assert "| 90%: never in 5 -> never in 5 | - |" in "\n".join(table(low))
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
    found = course(lines, WORKLOADS["long_sums"])
    assert found["points"] == [(0, 0.0, 0, 0.4), (20, 39.5, 1000, 0.8)]
    assert found["groups_per_s"] == pytest.approx(16 * 10 / 20)
    assert (found["idle"], found["staleness_mean"]) == (0.25, 1.0)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(everything() + everything(FAST), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name.endswith(" s")])
def test_a_slow_tool_is_late_while_training_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = WORKLOADS[name]
    config = load_config(workload.config, list(workload.settings))
    assert config.rollout.rollout_batch_size == workload.groups
    tool = {"calculator": SlowCalculator, "chain": SlowChain}[name.split(",")[0]]
    task = tool(config.task, 0)
    slept: list[float] = []

    async def sleep(time_s: float) -> None:
        slept.append(time_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def play(problem, turns: list[str]) -> float:
        environment = task.environment()
        environment.reset(problem.reference, 0)
        for turn in turns:
            seen = await environment.step(Action(turn))
        assert seen.done
        return seen.rewards["correct"]

    for index in range(100):
        problem = task.train(index)
        said = problem.solution[::2]
        assert sum(len(turn) + 1 for turn in said) <= config.rollout.response_length
        assert len("".join(problem.solution)) + len(said) <= config.rollout.context_length
        assert max(len(turn) + 1 for turn in said) <= config.rollout.turn_length
        assert len(problem.prompt) <= config.rollout.prompt_length
        assert len(said) <= config.rollout.max_turns
        before = len(slept)
        assert asyncio.run(play(problem, list(said))) == 1.0
        assert len(slept) - before == len(said) - 1, "whoever answers waits for nobody"
        wrong = said[-1][:-1] + str((int(said[-1][-1]) + 1) % 10)
        assert asyncio.run(play(problem, [wrong])) == 0.0
    mean_s = config.task.options["mean_s"]
    assert max(slept) > 3 * mean_s
    slept.clear()
    held_out = task.evaluation(100)
    assert not {str(one.prompt) + str(one.reference) for one in held_out} & {
        str(task.train(index).prompt) + str(task.train(index).reference) for index in range(2000)
    }
    for problem in held_out:
        assert asyncio.run(play(problem, list(problem.solution[::2]))) == 1.0
    assert set(slept) == {0.0}


def test_times_of_calls_have_their_mean_and_end_at_ten_of_it() -> None:
    draws = random.Random(0)
    times = [seconds(2.0, draws) for _ in range(20_000)]
    assert statistics.mean(times) == pytest.approx(2.0, rel=0.05)
    assert statistics.median(times) == pytest.approx(1.21, rel=0.05)
    assert max(times) == LONGEST_CALL * 2.0


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
