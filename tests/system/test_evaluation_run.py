"""Real runs that evaluate beside training: with one engine (`counted_run`), and with two of which
one is killed at it.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_grpo.cluster.samples import EVALUATED
from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.run.trainer import Trainer
from tests.support.models import write_model
from tests.support.recorded_run import PROBLEMS, STEPS, lines
from tests.support.waiting import ask, wait_until

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone]


def settings(home: Path, *, steps: int, engines: int, evaluation: dict[str, int]) -> Config:
    return Config.model_validate(
        {
            "seed": 3,
            "run": {"name": "evaluation", "dir": str(home / "run"), "total_steps": steps},
            "model": {"path": write_model(home / "model", positions=64)},
            "task": {"name": "tests.support.mixed_task:Mixed"},
            "rollout": {
                "rollout_batch_size": 4,
                "group_size": 4,
                "prompt_length": 32,
                "response_length": 24,
            },
            "weight_sync": {"self_check": False},
            "learner": {"lr": 1e-3},
            "evaluation": evaluation,
            "tracking": {"mlflow": False, "report": False, "sample_rows": 20},
            "cluster": {
                "rollout_actors": {"min": engines, "max": engines},
                "engine": {"max_num_seqs": 16},
            },
        }
    )


def test_results_carry_the_step_that_they_belong_to(counted_run) -> None:
    steps = [step for step, _ in counted_run["evaluations"]]
    assert steps[0] == 0 and steps[-1] == STEPS and set(steps[1:-1]) <= {3, 6} and 3 in steps
    skipped = counted_run["evaluations"][-1][1]["eval/skipped"]
    assert len(steps) + skipped == 4
    logged = [
        (line["step"], line["eval/pass_at_4"])
        for line in counted_run["metrics"]
        if "eval/problems" in line
    ]
    assert logged == [
        (step, result["eval/pass_at_4"]) for step, result in counted_run["evaluations"]
    ]


def test_every_result_is_whole(counted_run) -> None:
    for _, result in counted_run["evaluations"]:
        assert (result["eval/problems"], result["eval/errors"]) == (PROBLEMS, 0)
        for name in ("accuracy_greedy", "pass_at_1", "pass_at_2", "pass_at_4"):
            assert (
                0
                <= result[f"eval/{name}/low"]
                <= result[f"eval/{name}"]
                <= result[f"eval/{name}/high"]
                <= 1
            )
        assert result["eval/pass_at_1"] <= result["eval/pass_at_2"] <= result["eval/pass_at_4"]
        assert result["eval/tokens"] > PROBLEMS and result["eval/seconds"] > 0
    assert (
        counted_run["log"].count("evaluated step") == len(counted_run["evaluations"]) - 2
        and "while weight sync waited" in counted_run["log"]
    )


def test_the_learner_went_on_until_its_next_publication(counted_run) -> None:
    for _, result in counted_run["evaluations"][1:-1]:
        assert 0 <= result["eval/learner_waited_s"] < result["eval/seconds"]
    for _, result in (counted_run["evaluations"][0], counted_run["evaluations"][-1]):
        assert result["eval/learner_waited_s"] == result["eval/seconds"]
    assert counted_run["publications"] == STEPS
    steps = [line for line in counted_run["metrics"] if "train/loss" in line]
    assert len(steps) == STEPS and all(line["replay/staleness_max"] <= 1 for line in steps)
    # A step whose responses are all truncated, and thereby masked, has no token in the loss.
    with_tokens = [line for line in steps if line["rollout/masked_responses"] < 1]
    assert all(line["train/staleness_max"] <= 1 for line in with_tokens)


def test_samples_tell_their_step(counted_run) -> None:
    rows = [row for row in counted_run["samples"] if row["source"] == "evaluation"]
    shown, evaluated = (
        sorted({row["step"] for row in rows}),
        {step for step, _ in counted_run["evaluations"]},
    )
    assert set(shown) <= evaluated and 0 in shown and len(shown) == 2, (
        "the first, and one of those that follow in the first half"
    )
    assert all(
        {"prompt", "response", "reward/correct", "correct", "tokens"} <= row.keys() for row in rows
    )
    assert len(rows) == EVALUATED * len(shown)
    trained = [row for row in counted_run["samples"] if row["source"] == "training"]
    assert {row["step"] for row in trained} == {1, 2, 4, 6, 8} and len(trained) == 20, (
        "four of every second step, and of the first"
    )
    assert all(
        row["prompt"].endswith("=")
        and row["staleness"] in (0, 1)
        and len(row["response"]) <= row["tokens"]
        for row in trained
    )
    assert any(row["staleness"] == 1 for row in trained) and {
        row["reward/correct"] for row in trained
    } == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_one_of_two_engines_evaluates_while_the_other_goes_on_and_its_death_is_survived(
    tmp_path: Path,
) -> None:
    steps, every = 120, 20
    config = settings(
        tmp_path,
        steps=steps,
        engines=2,
        evaluation={"every_steps": every, "max_samples": 600, "n": 2},
    )
    with (
        open(tmp_path / "log.txt", "w") as log,
        Trainer(config, console=Console(log)) as trainer,
        ThreadPoolExecutor(1) as thread,
    ):

        def away() -> list:
            serving = {engine.actor_id for engine in trainer.system.coordinator.serving()}
            return [
                engine for engine in trainer.system.actors.alive() if engine.actor_id not in serving
            ]

        trainer.train(steps=1)
        first = thread.submit(trainer.train, every + 9)
        [lent] = wait_until(away, 200, "an engine that is away")

        def is_idle() -> bool:
            held = ask(trainer, trainer.system.queue.call(ReplayQueue.held))
            return not held.get(lent.actor_id) or not away()

        held = wait_until(is_idle, 60, "its last groups")
        first.result(timeout=200)
        ask(trainer, trainer.system.evaluations.finish())
        assert held and not away() and [step for step, _ in trainer.evaluations] == [every]
        second = thread.submit(trainer.train)
        [victim] = wait_until(away, 200, "the next evaluation")
        os.kill(ask(trainer, victim.handle.pid.remote()), signal.SIGKILL)
        second.result(timeout=400)
        ask(trainer, trainer.system.evaluations.finish())
        results, deaths, counts = (
            list(trainer.evaluations),
            list(trainer.system.actors.deaths),
            ask(trainer, trainer.system.queue.call(ReplayQueue.counts)),
        )
        final = trainer.evaluate()
    text = (tmp_path / "log.txt").read_text()
    assert (
        f"evaluated step {every} on {lent.actor_id}" in text
        and "starts again with the current weights: its engine died" in text
    )
    assert len(deaths) == 1 and victim.actor_id in deaths[0]
    assert results[0][1]["eval/learner_waited_s"] == 0 and [step for step, _ in results] == sorted(
        {step for step, _ in results}
    )
    assert (
        all(result["eval/problems"] == 600 for _, result in results)
        and final["eval/problems"] == 600
    )
    order = [
        line["step"]
        for line in lines(tmp_path / "run", "metrics.jsonl")
        if "train/loss" in line or "eval/problems" in line
    ]
    assert order.index(every + 1) < len(order) - 1 - order[::-1].index(every), (
        "the learner did not wait for it"
    )
    assert (
        counts["trained"] + counts["training"] == 4 * steps
        and counts["failed"] == counts["invalid"] == 0
    )
    trained = [
        group
        for group in read_history(tmp_path / "run" / "journal").groups.values()
        if group.state == State.TRAINED
    ]
    late = Counter(group.actor_id for group in trained if group.policy_version > every + 5)
    assert late[lent.actor_id], f"it came back and took tickets: {late}"
    assert all(
        line["train/staleness_max"] <= 1
        for line in lines(tmp_path / "run", "metrics.jsonl")
        if "train/staleness_max" in line
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_only_engine_dies_in_the_last_evaluation_and_the_one_in_its_place_answers(
    tmp_path: Path,
) -> None:
    config = settings(tmp_path, steps=2, engines=1, evaluation={"max_samples": 2000, "n": 4})
    with (
        open(tmp_path / "log.txt", "w") as log,
        Trainer(config, console=Console(log)) as trainer,
        ThreadPoolExecutor(1) as thread,
    ):
        trainer.train()
        [victim] = trainer.system.actors.alive()
        process = ask(trainer, victim.handle.pid.remote())
        last = thread.submit(trainer.evaluate)
        wait_until(lambda: trainer.system.loop.phase == "evaluating", 60, "the evaluation")
        os.kill(process, signal.SIGKILL)
        assert last.result(timeout=300)["eval/problems"] == 2000
        assert [victim.actor_id] != [engine.actor_id for engine in trainer.system.actors.alive()]
    assert "replaces it" in (tmp_path / "log.txt").read_text()
