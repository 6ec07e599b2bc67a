"""Evaluations beside training, with stand-ins for engines and learner and the real coordinator; and
samples of trained groups.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from async_grpo.algo.accuracy import ProblemOutcome
from async_grpo.cluster import samples
from async_grpo.cluster.evaluation import Evaluations
from async_grpo.cluster.samples import EVALUATED, ROWS, EvaluationSamples, TrainingSamples, interval
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, LearnerLost, Stalled
from async_grpo.observe.console.console import Console
from async_grpo.run import command
from async_grpo.weights.checks import SelfCheckFailed
from async_grpo.weights.shared_gpu import Apart
from async_grpo.wire.codec import (
    Batch,
    Group,
    Row,
    VersionSpan,
    decode_meta,
    encode_group,
    pack_frames,
)
from tests.support.listener import RecordingListener
from tests.support.models import write_model
from tests.support.pinned import Run, publish
from tests.support.publishing import FakeEngine, until

RIGHT = ProblemOutcome(greedy=True, right=1, judged=2, errors=0, greedy_tokens=3, sampled_tokens=3)


class Method:
    """A method of a Ray actor."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.remote = lambda **arguments: asyncio.ensure_future(work(**arguments))


class Answerer(FakeEngine):
    """Answers when its gate `answering` is open, under the weights that it serves; `fault` is
    raised instead.
    """

    def __init__(self, actor_id: str, events: list[str]) -> None:
        super().__init__(actor_id, events)
        self.answering, self.told, self.fault, self.well = asyncio.Event(), [], None, True
        self.asked: list[tuple[list[int], str]] = []
        self.outcome = RIGHT
        self.handle = SimpleNamespace(
            **{
                name: Method(getattr(self, name))
                for name in ("rest", "go_on", "evaluate", "health")
            }
        )

    @property
    def acknowledged(self) -> str:
        return self.label

    async def rest(self) -> None:
        self.told.append("rest")

    async def go_on(self) -> None:
        self.told.append("go on")

    async def health(self) -> None:
        if not self.well:
            raise ray.exceptions.RayActorError

    async def evaluate(
        self, *, indices: list[int], total: int, label: str, samples: int
    ) -> tuple[list[ProblemOutcome], list[dict[str, Any]]]:
        self.asked.append((list(indices), label))
        await self.answering.wait()
        if self.fault is not None:
            raise self.fault
        assert self.label == label, "it took other weights while it answered"
        return [self.outcome] * len(indices), [{"response": "x"}] * min(samples, len(indices))


class Beside(Run):
    """A run with two answerers and its evaluations."""

    gpu = Apart()

    def __init__(self, *, engines: int = 2, timeout_s: float = 5.0, **tasks: Any) -> None:
        super().__init__(engines=0)
        self.members = [Answerer(f"a{index}", self.events) for index in range(engines)]
        self.results: list[tuple[int, dict[str, float]]] = []
        self.told: list[dict[str, float]] = []
        self.listener = RecordingListener(self.notes)
        self.failures, self.run_epoch = self.listener.failures, 0
        settings = Config.model_validate(
            {
                "run": {"total_steps": 9},
                "model": {"path": "m"},
                "evaluation": {"timeout_s": timeout_s, "every_steps": 1},
                "tasks": tasks,
                "tracking": {"sample_rows": 3},
            }
        )
        self.evaluations = Evaluations(
            settings,
            coordinator=self.coordinator,
            actors=self,
            epochs=self,
            listener=self.listener,
            failures=self.listener,
            total_steps=9,
            tell=self.tell,
        )

    async def tell(self, accuracies: Mapping[str, float]) -> list[str]:
        self.told.append(dict(accuracies))
        return ["hard"]

    def done(self, step: int, result: dict[str, float], rows: list[dict[str, Any]]) -> None:
        self.results.append((step, result))

    async def begin(self) -> None:
        await self.evaluations.begin(6, self.done)


async def nobody_waits() -> None:
    raise AssertionError("an engine is there")


pytestmark = pytest.mark.timeout(60)


async def test_the_queue_is_told_the_accuracies_that_tasks_wait_for() -> None:
    for tasks, told in (({}, []), ({"a": {}, "b": {"after": {"a": 0.5}}}, [{"a": 1.0}])):
        run = Beside(engines=1, **tasks)
        await run.coordinator.start(0)
        run.members[0].outcome = replace(RIGHT, task="a")
        run.members[0].answering.set()
        await run.evaluations.everywhere(4, step=0, alone=nobody_waits)
        assert run.told == told
        assert ("task hard is posed from now on" in run.notes) == bool(told)
        await run.begin()
        await run.evaluations.finish()
        assert run.told == 2 * told


async def test_one_engine_answers_while_publications_go_on() -> None:
    run = Beside()
    await run.coordinator.start(0)
    await publish(run, 1)
    await run.begin()
    one, other = run.members
    await until(lambda: other.asked)
    assert other.asked == [(list(range(6)), "v0.1")] and other.told == ["rest"] and not one.asked
    await publish(run, 2)
    await publish(run, 3)
    assert (one.label, other.label, run.events[-1]) == (
        "v0.3",
        "v0.1",
        "live 3",
    ) and not run.results
    other.answering.set()
    await run.evaluations.finish()
    [(step, result)] = run.results
    assert (
        step,
        result["eval/problems"],
        result["eval/pass_at_1"],
        result["eval/learner_waited_s"],
    ) == (1, 6, 1, 0)
    assert (
        other.told == ["rest", "go on"]
        and other.label == "v0.3"
        and len(run.coordinator.serving()) == 2
    )
    assert (
        run.notes[0].startswith("evaluated step 1 on a1: greedy 100.0%, pass@1 100.0% (")
        and not run.failures
    )


async def test_a_single_engine_keeps_its_version_and_the_publication_waits() -> None:
    run = Beside(engines=1)
    await run.coordinator.start(0)
    await run.begin()
    publishing = asyncio.create_task(publish(run, 1))
    await until(lambda: run.members[0].asked)
    await asyncio.sleep(0.05)
    assert run.events[-1] == "live 0" and not publishing.done()
    run.members[0].answering.set()
    assert await publishing < 0.05
    [(step, result)] = run.results
    assert step == 0 and 0.04 < result["eval/learner_waited_s"] <= result["eval/seconds"]
    assert run.members[0].told == [], "it never stopped taking tickets"
    assert "while weight sync waited" in run.notes[0] and run.events[-1] == "live 1"


async def test_one_that_is_due_too_early_is_left_out_and_counted() -> None:
    run = Beside()
    await run.coordinator.start(0)
    await run.begin()
    await run.begin()
    assert "an evaluation is left out" in run.notes[0]
    run.members[1].answering.set()
    await run.evaluations.finish()
    await run.begin()
    await run.evaluations.finish()
    assert [result["eval/skipped"] for _, result in run.results] == [1, 1]


@pytest.mark.parametrize("how", ["actor", "engine"])
async def test_an_engine_that_dies_costs_a_beginning_and_the_answer_is_of_the_weights_of_then(
    how: str,
) -> None:
    run = Beside()
    await run.coordinator.start(0)
    await run.begin()
    one, other = run.members
    await until(lambda: other.asked)
    await publish(run, 1)
    other.fault = (
        ray.exceptions.RayActorError()
        if how == "actor"
        else ray.exceptions.RayTaskError("evaluate", "", ValueError("dead"))
    )
    other.well = False
    one.answering.set()
    other.answering.set()
    await run.evaluations.finish()
    assert list(run.dropped) == ["a1"] and [step for step, _ in run.results] == [1]
    assert (
        run.notes[0]
        == "the evaluation of step 0 starts again with the current weights: its engine died"
    )
    assert not run.failures and run.coordinator.serving() == [one]
    await publish(run, 2)
    assert run.events[-1] == "live 2"


async def test_when_the_last_engine_dies_its_replacement_answers() -> None:
    run = Beside(engines=1)
    await run.coordinator.start(0)
    run.members[0].fault = ray.exceptions.RayActorError()
    run.members[0].answering.set()
    await run.begin()
    await until(lambda: run.dropped)
    newcomer = Answerer("b0", run.events)
    newcomer.answering.set()
    await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    await run.evaluations.finish()
    assert [step for step, _ in run.results] == [0] and newcomer.asked == [(list(range(6)), "v0.0")]


async def test_an_error_of_a_healthy_engine_ends_the_run() -> None:
    run = Beside()
    await run.coordinator.start(0)
    run.members[1].fault = ray.exceptions.RayTaskError("evaluate", "", ValueError("a bug"))
    run.members[1].answering.set()
    await run.begin()
    await run.evaluations.finish()
    assert run.failures == [run.members[1].fault] and not run.results and not run.dropped


@pytest.mark.parametrize("engines", [1, 2])
async def test_one_that_takes_too_long_is_given_up_and_training_goes_on(
    engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)

    run = Beside(engines=engines, timeout_s=0.05)
    await run.coordinator.start(0)
    await run.begin()
    await run.evaluations.finish()
    assert run.notes == [
        "the evaluation of step 0 took longer than evaluation.timeout_s = 0.05 s and is cancelled"
    ]
    assert not run.results and not run.failures and len(cancelled) == 1, (
        "the engine is told to stop answering"
    )
    assert len(run.coordinator.serving()) == engines
    await publish(run, 1)
    assert run.events[-1] == "live 1"


async def test_an_end_of_the_run_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cancel", lambda call: None)

    run = Beside(engines=1)
    await run.coordinator.start(0)
    await run.begin()
    publishing = asyncio.create_task(publish(run, 1))
    await until(lambda: run.members[0].asked)
    run.evaluations.cancel()
    await publishing
    await run.evaluations.finish()
    assert run.events[-1] == "live 1" and not run.results and not run.failures


async def test_steps_that_are_taken_back_take_their_evaluation_with_them() -> None:
    run = Beside()
    await run.coordinator.start(0)
    await publish(run, 1)
    await run.begin()
    one, other = run.members
    await until(lambda: other.asked)
    async with run.coordinator.without_learner():
        run.run_epoch = 1
        await run.coordinator.relink(0, run_epoch=1)
    one.answering.set()
    other.answering.set()
    await run.evaluations.finish()
    assert [step for step, _ in run.results] == [0] and {
        label for _, label in other.asked + one.asked
    } == {"v0.1", "v1.0"}
    assert "the learner was rolled back before step 1" in run.notes[0]


async def test_an_engine_that_comes_back_to_a_dead_learner_waits_for_it_and_says_so() -> None:
    run = Beside()
    await run.coordinator.start(0)
    brought_back, connect = asyncio.Event(), run.learner.connect

    async def dead(sizes: list[int]) -> list[dict[str, Any]]:
        if not brought_back.is_set():
            raise LearnerLost("a learner rank died")
        return await connect(sizes)

    run.learner.connect, run.learner.back = dead, brought_back.wait
    run.members[1].answering.set()
    await run.begin()
    assert not await run.evaluations.finish(0.05)
    with pytest.raises(
        LearnerLost
    ):  # whoever waits for the evaluation hears of it, and brings the learner back
        await run.coordinator.refresh(0)
    async with run.coordinator.without_learner():
        brought_back.set()
        await run.coordinator.relink(0, run_epoch=0)
    assert await run.evaluations.finish(5)
    assert [step for step, _ in run.results] == [0] and len(run.coordinator.serving()) == 2


async def test_before_and_after_training_all_engines_share_the_problems() -> None:
    run = Beside(engines=3)
    await run.coordinator.start(0)
    for engine in run.members:
        engine.answering.set()
    run.members[1].fault = ray.exceptions.RayActorError()
    result, rows = await run.evaluations.everywhere(9, step=0, alone=nobody_waits)
    assert (result["eval/problems"], len(rows)) == (9, 3)
    assert sorted(
        index for engine in run.members for indices, _ in engine.asked for index in indices
    ) == list(range(9))
    assert result["eval/learner_waited_s"] == result["eval/seconds"] and list(run.dropped) == ["a1"]


async def test_before_and_after_training_the_deadline_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "cancel", lambda call: None)

    run = Beside(timeout_s=0.05)
    await run.coordinator.start(0)
    with pytest.raises(Stalled, match=r"longer than evaluation.timeout_s = 0.05 s"):
        await run.evaluations.everywhere(4, step=0, alone=nobody_waits)


@pytest.mark.parametrize("replaced", [True, False])
async def test_before_and_after_training_the_last_engine_is_waited_for_until_nobody_can_come(
    replaced: bool,
) -> None:
    run = Beside()
    await run.coordinator.start(0)
    for engine in run.members:
        engine.answering.set()
        engine.fault = ray.exceptions.RayActorError()
    newcomer = Answerer("b0", run.events)
    newcomer.answering.set()

    async def alone() -> None:
        assert list(run.dropped) == ["a0", "a1"]
        if not replaced:
            raise FaultBudgetSpent("the restart budget is spent")
        await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))

    if not replaced:
        with pytest.raises(FaultBudgetSpent, match="budget is spent"):
            await run.evaluations.everywhere(4, step=0, alone=alone)
        return
    result, _ = await run.evaluations.everywhere(4, step=0, alone=alone)
    assert result["eval/problems"] == 4 and [sorted(indices) for indices, _ in newcomer.asked] == [
        [0, 1, 2, 3]
    ]


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (FaultBudgetSpent("actor-0.1 died"), False),
        (Stalled("too long"), False),
        (SelfCheckFailed("other weights"), True),
        (ValueError("a bug"), True),
    ],
)
def test_after_training_what_dies_costs_the_evaluation_and_not_the_run(
    error: Exception, ends: bool
) -> None:
    def evaluate() -> None:
        raise error

    said = io.StringIO()
    with pytest.raises(type(error)) if ends else nullcontext():
        command._evaluate_last(SimpleNamespace(evaluate=evaluate), Console(said))
    assert said.getvalue() == (
        ""
        if ends
        else "error: the final evaluation is missing, but training is complete and saved: "
        f"{error}\n"
    )


# ---- samples of trained groups ----


def group(group_id: int, version: int) -> Group:
    """Three responses, and a greedy one that is not trained."""
    rows = [
        Row(
            response_ids=np.array([10 + index, 11], np.int32),
            behavior_logprobs=np.full(2, -1.0, np.float32),
            segments=[(0, 2)],
            versions=[VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, 2)],
            rewards={"correct": reward, "format": -reward},
            verdict=reward,
            finish_reason="stop",
            role=role,
        )
        for index, (reward, role) in enumerate(
            ((0.5, "train"), (1.0, "train"), (0.0, "train"), (9.0, "baseline"))
        )
    ]
    return Group(
        group_id=group_id,
        attempt=1,
        policy_version=version,
        actor_id="a",
        prompts=[np.array([3, 4], np.int32)],
        rows=rows,
    )


class Frames:
    """The queue."""

    def __init__(self, groups: list[Group]) -> None:
        self.frames = {one.group_id: encode_group(one) for one in groups}
        self.asked: list[tuple[int, list[int]]] = []

    def batch(self, step: int) -> Batch:
        return Batch(step, tuple(decode_meta(frame) for frame in self.frames.values()))

    async def payload(self, step: int, group_ids: list[int]) -> np.ndarray:
        self.asked.append((step, group_ids))
        if step == 40:
            raise FaultBudgetSpent("the queue\nis gone")
        return pack_frames([self.frames[group_id] for group_id in group_ids])


def test_a_few_groups_are_shown_with_rewards_and_staleness(tmp_path) -> None:
    told, queue = RecordingListener(), Frames([group(group_id, 30) for group_id in range(4)])
    config = Config.model_validate(
        {"run": {"total_steps": 40}, "model": {"path": "m"}, "tracking": {"sample_rows": 20}}
    )

    async def scenario() -> None:
        table = TrainingSamples(
            config,
            queue=queue,
            model_dir=write_model(tmp_path),
            total_steps=40,
            weights={"correct": 2.0, "format": 1.0},
            listener=told,
        )
        for step in range(32, 41):
            table.take(queue.batch(step))
            await table.finish()

    asyncio.run(scenario())
    assert (
        queue.asked == [(40, [0, 2])]
        and told.notes == ["no samples of the groups 0, 2 of step 40: is gone"]
        and told.rows == []
    )
    queue.asked.clear()

    async def first() -> None:
        table = TrainingSamples(
            config,
            queue=queue,
            model_dir=str(tmp_path),
            total_steps=400,
            weights={"correct": 2.0, "format": 1.0},
            listener=told,
        )
        table._every = 33
        table.take(queue.batch(33))
        await table.finish()

    asyncio.run(first())
    assert queue.asked == [(33, [1, 3])] and len(told.rows) == ROWS
    best, worst = told.rows[:2]
    assert (best["step"], best["source"], best["group_id"], best["staleness"], best["tokens"]) == (
        33,
        "training",
        1,
        2,
        2,
    )
    assert (best["rewards"], worst["rewards"]) == (
        {"correct": 1.0, "format": -1.0},
        {"correct": 0.0, "format": 0.0},
    ), "the greedy one is not trained"
    light = samples._decoder(str(tmp_path), trust_remote_code=False)
    assert (best["prompt"], best["response"]) == (light([3, 4]), light([11, 11])) and best[
        "prompt"
    ] != ""


def test_a_run_shows_about_as_many_rows_as_it_may() -> None:
    assert interval(100, 0, each=ROWS) == 0
    for total, rows in ((1, 1), (7, 100), (250, 100), (250, 4), (10_000, 100), (10_000, 9)):
        every = interval(total, rows, each=ROWS)
        moments = sum(step == 1 or step % every == 0 for step in range(1, total + 1))
        assert 1 <= moments * ROWS <= max(rows, 2 * ROWS), (total, rows)


@pytest.mark.parametrize(
    ("total", "every", "rows"),
    [(10_000, 1, 100), (100, 10, 100), (7, 3, 4), (1000, 7, 8), (50, 10, 0), (100, 100, 1000)],
)
def test_however_many_evaluations_a_run_has_its_sample_table_is_bounded(
    total: int, every: int, rows: int
) -> None:
    table = EvaluationSamples(total_steps=total, rows=rows)
    answers = [{"response": str(index)} for index in range(40)]
    steps = [*range(0, total, every), total]
    shown = {step: found for step in steps if (found := table.shown(step, answers))}
    assert sum(map(len, shown.values())) <= max(rows, 3 * min(rows, EVALUATED))
    assert all(found == answers[: min(rows, EVALUATED)] for found in shown.values())
    if rows:
        assert {0, total} <= shown.keys() and (
            len(steps) == 2 or rows < 3 * EVALUATED or len(shown) > 2
        )
        assert table.shown(0, answers), "steps that were taken back are evaluated anew"


def test_an_episode_is_shown_turn_by_turn() -> None:
    def row(*segments: tuple[int, int]) -> Row:
        tokens = sum(context + sampled for context, sampled in segments)
        return Row(np.arange(tokens), np.zeros(1), list(segments), [], {}, None, "env_done")

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    said = {
        "0 1": row((0, 2)),
        "policy: 0 1\nenvironment: 2\npolicy: 3 4": row((0, 2), (1, 2)),
        "policy: \nenvironment: 0\npolicy: 1": row((1, 1)),
    }
    assert [samples._said(one, decode) for one in said.values()] == [*said]
