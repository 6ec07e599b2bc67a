"""The training loop and its row mathematics, with a fake queue, learner and publisher; how errors
and the summary are worded.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_grpo import cli
from async_grpo.algo.advantages import row_advantages
from async_grpo.config.schema import Config
from async_grpo.errors import EXIT_MEANING, FaultBudgetSpent, LearnerLost, SetupError, Stalled
from async_grpo.learner.batching import PlanRow, RankPlan, RowKey, RowValue
from async_grpo.replay.token_ledger import PLACES
from async_grpo.run import loop as loop_module
from async_grpo.run.ending import explained
from async_grpo.run.loop import Loop, StepTrainer
from async_grpo.run.planning import RowMath
from async_grpo.run.summary import summarise
from async_grpo.wire.codec import Batch
from tests.support.listener import RecordingListener
from tests.support.loops import GROUPS, ROWS, WEIGHTS, batch_of, config, finished_trainer, row
from tests.support.verbs import train


def rows_by_update(plans: Sequence[RankPlan]) -> list[list[PlanRow]]:
    """Rows of every optimizer update, over all ranks and micro-batches."""
    return [
        [entry for plan in plans for micro_batch in plan.updates[index] for entry in micro_batch]
        for index in range(len(plans[0].updates))
    ]


def one_update(plans: Sequence[RankPlan]) -> dict[tuple[int, int], PlanRow]:
    [rows] = rows_by_update(plans)
    return {(entry.group_id, entry.row): entry for entry in rows}


def tokens_of(entry: PlanRow) -> int:
    return row(entry.group_id, entry.row).length


# ---- row mathematics ----


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("epochs", "minibatch", "updates"), [(1, None, 1), (1, 2, 2), (3, 1, 12)])
def test_plans_cover_every_row_once_per_epoch(
    ranks: int, epochs: int, minibatch: int | None, updates: int
) -> None:
    plans = RowMath(config(ranks=ranks, epochs=epochs, minibatch=minibatch), WEIGHTS).plans(
        batch_of(4)
    )
    assert len(plans) == ranks
    rows = rows_by_update(plans)
    assert len(rows) == updates
    assert [plan.step for plan in plans] == [4] * ranks
    everything = {(40 + group, index) for group in range(GROUPS) for index in range(ROWS)}
    for epoch in range(epochs):
        of_epoch = rows[epoch * updates // epochs : (epoch + 1) * updates // epochs]
        assert Counter(
            (entry.group_id, entry.row) for update in of_epoch for entry in update
        ) == Counter(dict.fromkeys(everything, 1))
        assert {len({entry.group_id for entry in update}) for update in of_epoch} == {
            minibatch or GROUPS
        }, "a group is never split"
    for plan in plans:
        needed = {
            entry.group_id
            for update in plan.updates
            for micro_batch in update
            for entry in micro_batch
        }
        assert plan.group_ids == tuple(sorted(needed))


@pytest.mark.parametrize("by_std", [True, False])
def test_advantages_are_those_of_the_weighted_scores(by_std: bool) -> None:
    values, metrics = RowMath(config(norm_adv_by_std_in_grpo=by_std), WEIGHTS).values(
        batch_of(4), {}
    )
    keys = sorted(values)
    scores = [row(*key).rewards["correct"] + 0.5 * row(*key).rewards["format"] for key in keys]
    expected = row_advantages(
        "grpo",
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor([group for group, _ in keys]),
        norm_adv_by_std_in_grpo=by_std,
    )
    assert [values[key].value for key in keys] == pytest.approx(expected.tolist(), abs=1e-9)
    assert metrics["rollout/score"] == pytest.approx(sum(scores) / len(scores))
    if not by_std:  # worked by hand: group 40 has scores 0, 1.05, 0.1 and the mean 1.15 / 3
        by_hand = [-1.15 / 3, 1.05 - 1.15 / 3, 0.1 - 1.15 / 3]
        assert [values[40, index].value for index in range(3)] == pytest.approx(by_hand)


def test_the_overlong_penalty_enters_the_advantages() -> None:
    plain, before = RowMath(config(norm_adv_by_std_in_grpo=False), WEIGHTS).values(batch_of(4), {})
    settings = config(
        norm_adv_by_std_in_grpo=False,
        overlong_buffer={"enable": True, "len": 8, "penalty_factor": 2.0},
    )
    shaped, after = RowMath(settings, WEIGHTS).values(batch_of(4), {})
    penalty = {
        key: -2.0 * max(0, row(*key).length - 8) / 8 for key in plain
    }  # 8 = 16 tokens - the buffer of 8
    assert min(penalty.values()) < 0
    for (group, index), value in shaped.items():
        mean = sum(penalty[group, other] for other in range(ROWS)) / ROWS
        difference = value.value - plain[group, index].value
        assert difference == pytest.approx(penalty[group, index] - mean, abs=1e-9)
    assert after["rollout/score"] == before["rollout/score"], "the score is what the verifier said"
    assert after["rollout/shaped_reward"] == pytest.approx(
        before["rollout/score"] + sum(penalty.values()) / len(penalty)
    )


def test_masked_truncated_rows_have_no_weight_but_count_in_their_group() -> None:
    plain, masked = RowMath(config(), WEIGHTS), RowMath(config(mask_truncated=True), WEIGHTS)
    cut = {(41, 2), (43, 2)}
    entries = one_update(masked.plans(batch_of(4)))
    assert {key for key, entry in entries.items() if entry.weight == 0} == cut
    assert sum(entry.weight * tokens_of(entry) for entry in entries.values()) == pytest.approx(1.0)
    values, metrics = masked.values(batch_of(4), {})
    assert {key: values[key] for key in values if key not in cut} == {
        key: value for key, value in plain.values(batch_of(4), {})[0].items() if key not in cut
    }
    assert (
        metrics["rollout/masked_responses"] == pytest.approx(2 / 12) == metrics["rollout/truncated"]
    )


def test_row_metrics() -> None:
    _, metrics = RowMath(config(), WEIGHTS).values(batch_of(4), {})
    rows = [row(group, index) for group in range(40, 44) for index in range(ROWS)]
    assert metrics["rollout/accuracy"] == pytest.approx(1 / 3)
    assert metrics["rollout/response_tokens"] == sum(meta.length for meta in rows)
    assert metrics["rollout/response_length_max"] == max(meta.length for meta in rows)
    assert metrics["rollout/mixed_version_responses"] == pytest.approx(1 / 3)
    assert metrics["rollout/zero_std_groups"] == 0
    assert (metrics["rollout/generate_s"], metrics["rollout/verify_s"]) == (2.0, 0.5)
    assert metrics["rollout/reward/note"] == pytest.approx(7.0)


# ---- the loop ----


class Fakes:
    """Queue, learner and publisher in one, with every call in order."""

    def __init__(
        self,
        settings: Config,
        *,
        steps_done: int = 0,
        empty_answers: int = 0,
        lags: bool = True,
        publishes: bool = True,
        row_state: dict[str, Any] | None = None,
    ) -> None:
        self.events: list[str] = []
        self.plans: list[RankPlan] = []
        self.factors: list[float] = []
        self.ess: float | None = None
        self.listener = RecordingListener()
        self.logged = self.listener.metrics
        self.empty_answers, self.lags = empty_answers, lags
        self.training: asyncio.Event | None = None
        self.pinned: asyncio.Event | None = None
        parts: dict[str, Any] = {
            "queue": self,
            "learner": self,
            "weights": WEIGHTS,
            "total_steps": 9,
            "steps_done": steps_done,
            "listener": self.listener,
            "row_state": row_state,
        }
        self.loop: Any = (
            Loop(settings, publisher=self, **parts) if publishes else StepTrainer(settings, **parts)
        )

    async def get_batch(self, step: int) -> Batch | None:
        if self.empty_answers:
            self.empty_answers -= 1
            return None
        self.events.append(f"take {step}")
        return batch_of(step)

    async def metrics(self) -> dict[str, float]:
        return {"replay/ready": 3.0, "replay/in_flight": 5.0, "replay/failed": 0.0}

    async def prepare(self, plans: Sequence[RankPlan]) -> dict[RowKey, float]:
        self.plans = list(plans)
        self.events.append("prepare")
        if self.training is not None:
            await self.training.wait()
        return {}

    async def train(
        self, values: dict[RowKey, RowValue], kl_coef: float, lr_factor: float
    ) -> list[dict[str, Any]]:
        self.events.append(f"train {len(self.plans[0].updates)}")
        self.factors.append(lr_factor)
        lags = {"sums": {"train/staleness_mean": [3.0, 4.0]}, "lows": {}}
        other = {"sums": {"train/staleness_mean": [1.0, 4.0]}, "lows": {}}
        if not self.lags:
            return [{"sums": {}, "highs": {}, "lows": {}}]
        if self.ess is not None:
            lags["sums"]["train/ess"] = [self.ess, 1.0]
        return [
            lags | {"highs": {"train/staleness_max": 2.0}},
            other | {"highs": {"train/staleness_max": 1.0}},
        ]

    async def publish(self, version: int) -> float:
        if self.pinned is not None:
            with self.loop.held():
                await self.pinned.wait()
        self.events.append(f"publish {version}")
        return 0.5

    def weight_metrics(self) -> dict[str, float]:
        return {}

    async def refresh(self, version: int) -> None:
        self.events.append(f"refresh {version}")

    async def settle(self) -> None:
        self.events.append("wait")


async def test_a_step_in_order() -> None:
    run = Fakes(config(epochs=2, minibatch=2), empty_answers=1)
    await run.loop.step()
    assert run.events == ["refresh 0", "take 1", "prepare", "train 4", "publish 1"]
    assert run.loop.steps_done == 1
    await run.loop.step()
    assert run.events[5:7] == ["take 2", "prepare"]
    assert [step for step, _ in run.logged] == [1, 2]


async def test_publishes_every_k_steps_and_the_rest_at_the_end() -> None:
    run = Fakes(config(every=2), steps_done=4)
    for _ in range(3):
        await run.loop.step()
    assert [event for event in run.events if event.startswith(("take", "publish"))] == [
        "take 5",
        "take 6",
        "publish 6",
        "take 7",
    ]
    await run.loop.finish()
    assert run.events[-2:] == ["publish 7", "wait"], (
        "an evaluation after the last step must see its weights"
    )
    await run.loop.finish()
    assert run.events[-2:] == ["wait", "wait"]


async def test_an_evaluation_that_holds_its_version_is_waited_for_and_not_publishing() -> None:
    run = Fakes(config())
    run.pinned = asyncio.Event()
    step = asyncio.create_task(run.loop.step())
    while "waiting for an evaluation" not in run.loop.phase:
        await asyncio.sleep(0)
    await asyncio.sleep(0.5)
    assert run.events[-1] == "train 1", "it is trained, and not published"
    run.pinned.set()
    metrics = await step
    assert (
        run.events[-1] == "publish 1"
        and metrics["time/weight_sync"] == 0.5
        and metrics["time/step"] > 0.5
    )
    assert (
        metrics["time/learner/evaluating"] >= 0.5 > metrics["time/learner/weight_sync"]
        and "evaluation" not in run.loop.phase
    )
    await run.loop.publish_newest()
    assert run.events[-1] == "publish 1", "there is nothing newer"


async def test_metrics_of_a_step() -> None:
    run = Fakes(config())
    metrics = await run.loop.step()
    assert metrics["train/staleness_mean"] == pytest.approx(0.5), (
        "sums over ranks, not a mean of means"
    )
    assert metrics["train/staleness_max"] == 2
    assert metrics["replay/ready"] == 3
    assert metrics["time/weight_sync"] == 0.5
    assert 0 <= metrics["time/learner_idle"] <= 1
    await run.loop.step()
    assert (run.loop.lag_sum, run.loop.lag_max) == (pytest.approx(1.0), 2)
    groups = [*batch_of(1).groups, *batch_of(2).groups]
    assert run.loop.tokens == sum(meta.length for group in groups for meta in group.rows)
    assert len(run.loop.durations) == 2


async def test_a_step_whose_rows_are_all_masked_is_trained_and_logged() -> None:
    run = Fakes(config(), lags=False)
    metrics = await run.loop.step()
    assert "train/staleness_mean" not in metrics
    assert (run.loop.lag_sum, run.loop.lag_max, run.loop.steps_done) == (0, 0, 1)


@pytest.mark.parametrize("publishes", [True, False], ids=["recovery", "learner alone"])
async def test_recorded_steps_are_repeated_compared_and_not_published(publishes: bool) -> None:
    run = Fakes(config(), steps_done=1, publishes=publishes)
    asked: list[int] = []

    async def digest(version: int) -> str:
        asked.append(version)
        return {2: "two", 3: "other", 5: ""}[version]

    recorded = {2: "two", 3: "three", 5: "five"}
    weights = await run.loop.repeat(5, recorded=recorded, digest=digest)
    assert (weights.same, weights.different, weights.unknown) == ([2], [3], [4, 5])
    assert asked == [2, 3, 5], "nothing is staged for a version without a recorded digest"
    assert (run.loop.steps_done, len(run.logged)) == (5, 4)
    assert not [event for event in run.events if event.startswith("publish")]
    assert [line["weights/differ"] for _, line in run.logged] == [0, 1, 1, 1]
    assert all(line["train/repeated"] == 1 for _, line in run.logged)
    assert all(("time/step" in line) is not publishes for _, line in run.logged)
    if publishes:
        assert run.loop.tokens == 0, "the summary counts a step once"
        await run.loop.publish_newest()
        assert "publish 5" not in run.events, "its version was sent before"


@pytest.mark.parametrize("schedule", ["settle", "constant", "linear"])
def test_a_rate_that_settles_goes_by_the_effective_sample_size(schedule: str) -> None:
    settings = config(schedule=schedule)

    async def steps(run: Fakes, count: int) -> list[float]:
        for _ in range(count):
            run.ess = 0.8 if run.loop.steps_done < 40 else 0.999
            await run.loop.step()
        return run.factors

    async def scenario() -> None:
        run = Fakes(settings)
        whole = await steps(run, 60)
        expected = [1.0] * 34 + [0.5] * 26 if schedule == "settle" else [1.0] * 60
        assert whole == expected, "2 steps until data is old, two blocks of 16, then it comes back"
        halved = [note for note in run.listener.notes if "the learning rate is 0.5" in note]
        assert len(halved) == (schedule == "settle")
        first = Fakes(settings)
        factors = await steps(first, 20)
        second = Fakes(settings, steps_done=20, row_state=first.loop.row_state())
        assert factors + await steps(second, 40) == whole, "it goes on from a checkpoint"

    asyncio.run(scenario())


async def test_a_failure_ends_a_wait_at_once() -> None:
    run = Fakes(config(timeout_s=1000), empty_answers=10**9)
    waiting = asyncio.create_task(run.loop.step())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    run.loop.fail(FaultBudgetSpent("the actors died"))
    run.loop.fail(RuntimeError("a later error"))
    with pytest.raises(FaultBudgetSpent, match="the actors died"):
        await asyncio.wait_for(waiting, 2)
    with pytest.raises(FaultBudgetSpent):
        await run.loop.finish()


def test_a_failure_ends_training_at_once() -> None:
    async def scenario() -> None:
        run = Fakes(config(timeout_s=1000))
        run.training = asyncio.Event()
        waiting = asyncio.create_task(run.loop.step())
        while "prepare" not in run.events:
            await asyncio.sleep(0)
        run.loop.fail(FaultBudgetSpent("a rank died"))
        with pytest.raises(FaultBudgetSpent):
            await asyncio.wait_for(waiting, 2)
        assert run.loop.steps_done == 0
        assert not any(event.startswith("train") for event in run.events)

    asyncio.run(scenario())


def test_a_failure_counts_more_than_what_it_brings_about() -> None:
    """It is no interrupted step, and keeps the error that caused it."""
    cause = KeyError("what really happened")

    async def scenario() -> None:
        run = Fakes(config(timeout_s=1000))
        run.training = asyncio.Event()
        waiting = asyncio.create_task(run.loop.step())
        while "prepare" not in run.events:
            await asyncio.sleep(0)
        try:
            raise FaultBudgetSpent("the actors died") from cause
        except FaultBudgetSpent as error:
            run.loop.fail(error)
        for step in (waiting, run.loop.step(), run.loop.repeat(9, recorded={}, digest=str)):
            with pytest.raises(FaultBudgetSpent) as raised:
                await step
            assert raised.value.__cause__ is cause

    async def at_once() -> None:
        run = Fakes(config(timeout_s=1000))

        async def publish(version: int) -> float:
            run.loop.fail(FaultBudgetSpent("the actors died"))
            raise LearnerLost("a rank complains")

        run.publish = publish
        with pytest.raises(FaultBudgetSpent):
            await run.loop.step()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    asyncio.run(asyncio.wait_for(at_once(), 30))


def test_a_step_that_was_interrupted_is_not_gone_on_with() -> None:
    """The ranks may be anywhere in it: they are brought back, as after a death."""

    async def scenario() -> None:
        run = Fakes(config(timeout_s=1000))
        run.training = asyncio.Event()
        step = asyncio.create_task(run.loop.step())
        await asyncio.sleep(0.02)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        run.training.set()
        with pytest.raises(LearnerLost, match="learner step 1 was interrupted"):
            await run.loop.step()
        await run.loop.step()
        assert run.loop.steps_done == 1

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_step_without_an_end_is_ended_and_says_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "STEP_GRACE_S", 0.05)
    said = r"step 1 took more than 2 times watchdog.step_timeout_s \(0.05 s\); it was syncing"

    async def never(version: int) -> float:
        await asyncio.sleep(1000)
        return 0.0

    async def fails(version: int) -> float:
        raise TimeoutError("a deadline of its own")

    async def scenario(publish: Any, error: type[Exception], words: str) -> None:
        run = Fakes(config(timeout_s=0.05))
        monkeypatch.setattr(run, "publish", publish)
        with pytest.raises(error, match=words):
            await asyncio.wait_for(run.loop.step(), 5)

    asyncio.run(scenario(never, Stalled, said))
    asyncio.run(scenario(fails, TimeoutError, "of its own"))


def test_a_stalled_queue_ends_the_run_with_its_counts() -> None:
    async def scenario() -> None:
        run = Fakes(config(timeout_s=0.05), steps_done=2, empty_answers=10**9)
        with pytest.raises(Stalled) as caught:
            await asyncio.wait_for(run.loop.step(), 5)
        message = str(caught.value)
        assert "learner step 3" in message
        assert "watchdog.step_timeout_s = 0.05 s" in message
        assert "'replay/ready': 3" in message
        assert "'replay/in_flight': 5" in message
        assert "failed" not in message, "counts of zero say nothing"

    asyncio.run(scenario())


# ---- how a run ends ----


def remote(error: BaseException) -> Exception:
    """An error as a remote call raises it: of the same class, with a traceback as its text, and the
    original as `cause`.
    """
    kind = type(
        f"Remote({type(error).__name__})",
        (Exception,),
        {"exit_code": getattr(error, "exit_code", None)},
    )
    wrapped = kind(f"Traceback ...\n{error}")
    wrapped.cause = error
    return wrapped


@pytest.mark.parametrize(
    "wrap",
    [
        lambda error: error,
        remote,
        lambda error: remote(remote(error)),
        lambda error: ExceptionGroup("start", [ValueError("cancelled beside it"), error]),
        lambda error: ExceptionGroup("outer", [ExceptionGroup("inner", [remote(error)])]),
        lambda error: remote(ExceptionGroup("in the process", [error])),
    ],
)
def test_exit_code_and_message_through_layers(
    wrap: Callable[[Exception], Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(wrap(SetupError("no room"))) == (2, "no room")
    assert "Traceback" not in capsys.readouterr().err


def test_a_deadline_that_says_what_was_waited_for_is_a_stall() -> None:
    assert explained(remote(TimeoutError("starting actor-0.0 took longer than 9 s"))) == (
        5,
        "starting actor-0.0 took longer than 9 s",
    )


@pytest.mark.parametrize(
    "wrap", [lambda error: error, remote, lambda error: ExceptionGroup("start", [error])]
)
def test_an_unexpected_error_shows_its_traceback(
    wrap: Callable[[Exception], Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = explained(wrap(KeyError("x")))
    assert code == 1
    assert "\n" not in message
    assert "KeyError" in capsys.readouterr().err


def fake_trainer(
    settings: Config, *, steps: int = 4, total: int = 4, lags: float = 2.0
) -> SimpleNamespace:
    loop = SimpleNamespace(
        durations=[1.0] * steps,
        scores=[0.1 * one for one in range(steps)],
        tokens=1000,
        lag_sum=lags,
        lag_max=1.0,
        latest={},
    )
    seconds = {"working": 2.0, "idle": 1.0, "other": 1.0}
    loop.latest = {f"time/learner/{cause}": spent for cause, spent in seconds.items()}
    loop.latest |= {f"goodput/{place}": 0.0 for place in PLACES} | {
        "goodput/generated": 4000.0,
        "rollout/verifier_errors_crash": 5.0,
        "goodput/trained": 3000.0,
        "goodput/probes": 1000.0,
    }
    return finished_trainer(
        loop,
        settings,
        steps_done=steps,
        total_steps=total,
        evaluations=[
            (0, {"eval/accuracy_greedy": 0.25, "eval/problems": 8.0}),
            (4, {"eval/accuracy_greedy": 0.5, "eval/problems": 8.0}),
        ],
    )


def test_summary_counts_the_groups_that_were_dropped() -> None:
    trainer = fake_trainer(config(run={"total_steps": 4}))
    counts = {"rejected": 1083, "rejected/all_right": 428, "rejected/all_wrong": 655}
    counts |= {"rejected/too_easy": 0, "expired": 2, "failed": 0, "skipped": 7, "trained": 960}
    trainer.system.loop.latest.update({f"replay/{name}": n for name, n in counts.items()})
    text = dict(summarise(trainer, Path("/runs/r/c")))
    assert text["groups dropped"] == (
        "1,083 rejected (655 all_wrong, 428 all_right); 2 expired; 7 skipped"
    )


def test_summary_says_what_happened_and_how_to_go_on() -> None:
    text = dict(summarise(fake_trainer(config(run={"total_steps": 4})), Path("/runs/r/c")))
    assert text["held-out accuracy, greedy"] == "25.0% -> 50.0% after step 4"
    assert text["score"] == (
        "0.00 -> 0.30: mean reward of the first and of the last tenth of the steps"
    )
    assert text["staleness"] == "mean 0.50, largest 1 learner step (bound 2)"
    assert text["weight syncs"] == "4; the learner waited 10.0% of its time for them"
    assert (
        text["weights checked"]
        == "3 times while training; log-probs of engines and learner differ by 2.0e-06 at most"
    )
    assert text["weight sync faults"] == "1 transfers repeated, 0 engines dropped"
    assert "groups dropped" not in text
    assert text["verifier errors"] == "5 x crash: killed by signal 9"
    assert text["goodput"] == "4,000 tokens generated: 75.0% trained, 25.0% probes"
    assert text["learner time"] == "50% training, 25% waiting for groups, 25% other"
    assert "async-grpo train /runs/r/config.yaml run.total_steps=8 " in text["next"]
    assert (
        "config.yaml run.epochs=6 "
        in dict(summarise(fake_trainer(config(run={"epochs": 3})), Path("c")))["next"]
    )
    early = dict(summarise(fake_trainer(config(run={"total_steps": 9}), total=9), Path("c")))[
        "next"
    ]
    assert "total_steps" not in early


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["quickstart", "--lr", "3"],
            "--lr is no option; .*: learner.lr=3 or model.warm_start.lr=3",
        ),
        (["quickstart", "--seed=4"], "--seed is no option; .*: seed=4"),
        (["quickstart", "--no-such"], "--no-such is no option; .*, and --help lists"),
        ([], "name a YAML file or a recipe, such as quickstart"),
    ],
)
def test_an_option_that_is_a_setting_is_answered_with_the_setting(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and re.match(f"error: {says}", lines[0])
    assert lines[1:] == [f"error: exit code 2: {EXIT_MEANING[2]}"]


def test_version_and_help_name_what_else_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        assert cli.main([option]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"async_grpo {metadata.version('async_grpo')}" in said
    assert all(f" {name} " in said for name in ("status", "report", "inspect"))
