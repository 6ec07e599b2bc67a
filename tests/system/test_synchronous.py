"""`max_staleness: 0` is synchronous training, bit for bit: the whole asynchronous system against a
plain loop.

`synchronous` below is the definition: groups by id, sampled by the newest weights, filtered, until
a batch is full. It shares the engine, the model and the rules that only cut minibatches and order a
sum with the other side; which groups are trained, in which order, from which version, in which
minibatch, and with which advantage and weight it works out for itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo.learner import batching
from async_grpo.learner.batching import PlanRow, deal, minibatches
from async_grpo.learner.rows import LearnerRow
from tests.support.synchronous import (
    BATCH_GROUPS,
    EPOCHS,
    GROUP_SIZE,
    MINIBATCH_GROUPS,
    SEED,
    STEPS,
    TOKENS_PER_MICRO_BATCH,
    WEIGHTS,
    Actor,
    Faults,
    Finished,
    Policy,
    Response,
    Step,
    before,
    make_config,
    run_asynchronously,
    sample,
    tokens_of,
    unanswerable,
)

STORM = Faults(fail=0.05, lost_answer=0.1, death_s=0.03)
CONTROL_STEPS = 4


def synchronous(steps: int) -> Finished:
    """Plain synchronous GRPO."""
    policy, done, counts, ids = Policy(make_config()), list[Step](), Counter[str](), count()
    for step in range(1, steps + 1):
        groups: dict[int, tuple[np.ndarray, list[Response]]] = {}
        while len(groups) < BATCH_GROUPS:
            group_id = next(ids)
            if unanswerable(group_id):
                counts["failed"] += 1
                continue
            prompt, responses = sample(policy.table, group_id)
            if len({response.verdict for response in responses}) == 1:
                counts["rejected"] += 1
                continue
            groups[group_id] = prompt, responses
            counts["trained"] += 1
        rows, truncated = {}, set()
        for group_id, (prompt, responses) in groups.items():
            for index, (response, advantage) in enumerate(
                zip(responses, group_advantages(responses), strict=True)
            ):
                rows[group_id, index] = row_of(prompt, response, advantage)
                if response.truncated:
                    truncated.add((group_id, index))
        updates = []
        for epoch in range(EPOCHS):
            for members in minibatches(
                list(groups),
                seed=SEED,
                step=step,
                epoch=epoch,
                groups_per_minibatch=MINIBATCH_GROUPS,
            ):
                keys = [key for key in rows if key[0] in members]
                weight = 1 / sum(len(rows[key].response) for key in keys if key not in truncated)
                shapes = [(key[0], len(rows[key].prompt), len(rows[key].response)) for key in keys]
                [parts] = deal(shapes, ranks=1, token_budget=TOKENS_PER_MICRO_BATCH)
                in_loss = [
                    [
                        (PlanRow(*keys[k], *shapes[k][1:], weight, shapes[k][2]), rows[keys[k]])
                        for k in part
                        if keys[k] not in truncated
                    ]
                    for part in parts
                ]
                expected = plain_loss(policy.table, [row for part in in_loss for _, row in part])
                updates.append(policy.update(in_loss))
                assert updates[-1].loss == pytest.approx(expected, rel=1e-4, abs=1e-6)
        done.append(Step(tuple(groups), (step - 1,), tuple(updates), policy.digest()))
    return Finished(done, counts, Counter())


def group_advantages(responses: list[Response]) -> list[float]:
    """(score - mean) / standard deviation, over the responses to one prompt."""
    scores = [
        sum(WEIGHTS[name] * value for name, value in response.rewards.items())
        for response in responses
    ]
    return [(score - mean(scores)) / (stdev(scores) + 1e-6) for score in scores]


def row_of(prompt: np.ndarray, response: Response, advantage: float) -> LearnerRow:
    """What the model trains on: no token is older than the weights that train it."""
    length = len(response.tokens)
    return LearnerRow(
        prompt,
        response.tokens,
        np.arange(length),
        response.logprobs,
        np.zeros(length, np.int64),
        advantages=np.full(length, advantage, np.float32),
    )


def plain_loss(table: torch.Tensor, rows: Sequence[LearnerRow]) -> float:
    """The clipped loss, mean over tokens, in float64."""
    distribution = torch.log_softmax(table.detach().double(), -1)
    ratio = (
        distribution[before(rows), tokens_of(rows)]
        - torch.from_numpy(np.concatenate([row.behavior for row in rows]))
    ).exp()
    advantages = torch.from_numpy(np.concatenate([row.advantages for row in rows]))
    return float(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean())


def first_difference(one: Sequence[Step], other: Sequence[Step]) -> Step | None:
    """The first of `one` that is not that of `other`."""
    return next((step for step, twin in zip(one, other, strict=True) if step != twin), None)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would only wait for each other over tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Finished:
    return synchronous(STEPS)


# ---- the statement ----


def test_the_plain_loop_trains_and_meets_what_the_statement_is_about(plain: Finished) -> None:
    assert plain.counts["rejected"] > STEPS // 2 and plain.counts["failed"] > 3
    assert len({step.weights for step in plain.steps}) == STEPS, "every step changes the weights"
    assert any(len(update.micro_batches) > 1 for step in plain.steps for update in step.updates)
    assert {len(step.updates) for step in plain.steps} == {
        EPOCHS * BATCH_GROUPS // MINIBATCH_GROUPS
    }
    rows = [sum(map(len, update.micro_batches)) for step in plain.steps for update in step.updates]
    assert min(rows) < MINIBATCH_GROUPS * GROUP_SIZE, "truncated lines are left out"


@pytest.mark.parametrize(
    "faults",
    [Faults(actors=1), replace(STORM, seed=1), replace(STORM, seed=2, actors=5)],
    ids=["calm", "storm", "crowd"],
)
def test_no_schedule_changes_a_bit(plain: Finished, faults: Faults) -> None:
    run = asyncio.run(run_asynchronously(make_config(), faults))
    assert len(run.steps) == STEPS
    for step, (got, expected) in enumerate(zip(run.steps, plain.steps, strict=True), start=1):
        assert got.group_ids == expected.group_ids, f"step {step} trains other groups"
        assert got.versions == (step - 1,), f"step {step} trains tokens of versions {got.versions}"
        for index, (update, twin) in enumerate(zip(got.updates, expected.updates, strict=True)):
            assert update == twin, f"update {index} of step {step} differs"
        assert got.weights == expected.weights, f"other weights after step {step}"
    assert {name: run.counts[name] for name in plain.counts} == plain.counts
    if faults.death_s:
        assert all(run.seen[name] >= 5 for name in ("deaths", "late", "fail", "lost_answer")), (
            f"the schedule shows too little: {run.seen}"
        )


# ---- that it can fail ----


class Liar(Actor):
    """An actor that takes a label for the weights: it goes on sampling with those of version 0."""

    def load(self, table: torch.Tensor, version: int) -> None:
        super().load(table if version == 0 else self._table, version)


def test_one_step_of_staleness_is_seen(plain: Finished) -> None:
    run = asyncio.run(
        run_asynchronously(make_config(max_staleness=1, steps=CONTROL_STEPS), Faults())
    )
    assert first_difference(run.steps[:2], plain.steps[:2]) is not None
    assert any(
        step.versions != plain_step.versions
        for step, plain_step in zip(run.steps, plain.steps, strict=False)
    )


def test_rows_that_are_dealt_in_another_order_are_seen_in_the_bits(
    plain: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(*args: Any, **kwargs: Any) -> list[list[list[int]]]:
        return [[part[::-1] for part in parts] for parts in deal(*args, **kwargs)]

    monkeypatch.setattr(batching, "deal", backwards)
    run = asyncio.run(run_asynchronously(make_config(steps=CONTROL_STEPS), Faults()))
    assert run.steps[0].group_ids == plain.steps[0].group_ids
    losses = [[update.loss for update in one.steps[0].updates] for one in (run, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] != losses[1]


def test_an_engine_that_serves_older_weights_than_it_says_is_seen(plain: Finished) -> None:
    run = asyncio.run(
        run_asynchronously(make_config(steps=CONTROL_STEPS), Faults(), actor_type=Liar)
    )
    assert [step.versions for step in run.steps] == [
        step.versions for step in plain.steps[:CONTROL_STEPS]
    ], "the labels say nothing"
    assert run.steps[0] == plain.steps[0] and run.steps[1] != plain.steps[1]
