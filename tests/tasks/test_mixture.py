"""Several tasks in one run: shares, problems, and what each has for itself."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_grpo.algo.accuracy import ProblemOutcome, metrics
from async_grpo.config.load import ConfigError, dump, load_config
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.replay.ledger import Ledger
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.rules import QueueSettings
from async_grpo.rollout.posed import PosedTask
from async_grpo.run.planning import shaping
from async_grpo.run.preflight.model import look
from async_grpo.run.preflight.run_check import check_run
from async_grpo.tasks.base import TaskError
from async_grpo.tasks.mixture import (
    Mixture,
    ProblemOrder,
    Quotas,
    load_tasks,
    parts_of,
    reward_weights,
)
from async_grpo.tasks.registry import held_out, load_task, problem_index
from async_grpo.tasks.verifier import VerifierError
from async_grpo.wire.codec import decode_group
from tests.support.rollout_parts import Parts, actor_of


def config(tasks: dict[str, Any], **more: Any) -> Config:
    given = {"run": {"total_steps": 2}, "model": {"path": "m"}, "tasks": tasks}
    return Config.model_validate(given | more)


def rows(path: Path, name: str, count: int) -> str:
    lines = [json.dumps({"prompt": f"{name} {n}?", "answer": str(n)}) for n in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


def three(folder: Path) -> dict[str, Any]:
    return {
        name: {
            "name": "jsonl",
            "train": rows(folder / f"{name}.jsonl", name, count),
            "eval": rows(folder / f"{name}-eval.jsonl", f"held {name}", 4),
            "weight": weight,
        }
        for name, count, weight in (("sums", 50, 5), ("words", 20, 3), ("rare", 7, 1))
    }


# ---- shares ----


@pytest.mark.parametrize(
    ("weights", "round_of"),
    [
        ((5, 3, 1), 9),
        ((1, 1), 2),
        ((0.7, 0.2, 0.1), 10),
        ((2.5, 7.5), 4),
        ((3,), 1),
        ((99, 1), 100),
    ],
)
def test_every_window_has_exactly_its_shares(weights: tuple[float, ...], round_of: int) -> None:
    quotas = Quotas({str(number): [(0, one)] for number, one in enumerate(weights)})
    order = [quotas[place] for place in range(4 * round_of)]
    for start in range(3 * round_of):
        shares = Counter(order[start : start + round_of])
        assert [shares[str(n)] / round_of for n in range(len(weights))] == pytest.approx(
            [one / sum(weights) for one in weights]
        )
    for length in range(len(order)):  # and no task is ever far from its share
        shares = Counter(order[:length])
        for number, one in enumerate(weights):
            assert abs(shares[str(number)] - length * one / sum(weights)) < len(weights)


def test_places_are_counted_as_they_come_also_where_weights_change() -> None:
    rng = random.Random(0)
    for _ in range(20):
        starts = [0, *sorted(rng.sample(range(1, 60), 2))]
        quotas = Quotas(
            {
                name: [(start, rng.choice((0, 1, 2, 0.5)) + (name == "a")) for start in starts]
                for name in "abc"
            }
        )
        seen: Counter[str] = Counter()
        for place in range(150):
            name = quotas[place]
            assert quotas.before(place) == seen[name], (place, name)
            seen[name] += 1
        assert pickle.loads(pickle.dumps(quotas))[77] == quotas[77]


def test_a_weight_of_0_rests_and_comes_back() -> None:
    quotas = Quotas({"a": [(0, 1.0)], "b": [(0, 0.0), (8, 1.0), (16, 0.0)]})
    assert "".join(quotas[place] for place in range(20)) == "aaaaaaaa" + "abababab" + "aaaa"


def test_weights_without_a_small_common_measure_are_refused() -> None:
    with pytest.raises(TaskError, match="exact shares of 1,000,000 groups"):
        Quotas({"a": [(0, 0.333333)], "b": [(0, 0.666667)]})


# ---- problems ----


def test_a_task_poses_the_problems_that_it_would_pose_alone(tmp_path: Path) -> None:
    run = config(three(tmp_path), seed=3)
    problems = load_tasks(run)
    order, seen = ProblemOrder.of(run, problems), Counter[str]()
    assert len(problems) == order.problems == 77 and isinstance(problems, Mixture)
    for group_id in range(300):
        problem = problems.train(order(group_id))
        name, alone = problem.task, problems.tasks[problem.task]
        assert name == order.task(group_id)
        index = problem_index(3, alone.fingerprint, seen[name], len(alone))
        assert problem.prompt == alone.train(index).prompt
        seen[name] += 1
    one = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}, "seed": 3})
    task = load_task(one.task, 3)
    old = ProblemOrder.of(one, task)
    assert [old(n) for n in range(9)] == [
        problem_index(3, task.fingerprint, n, len(task)) for n in range(9)
    ]


def test_what_a_task_does_not_say_is_as_in_task(tmp_path: Path) -> None:
    common = {"verifier": {"workers": 3, "timeout_s": 4.0}, "rewards": {"correct": 2.0}}
    run = config(
        {
            "plain": {"name": "arithmetic"},
            "own": {"name": "arithmetic", "verifier": {"timeout_s": 9}, "rewards": {"format": 1.0}},
        },
        task=common,
    )
    assert run.tasks["plain"].verifier.workers == run.tasks["own"].verifier.workers == 3
    assert (run.tasks["plain"].verifier.timeout_s, run.tasks["own"].verifier.timeout_s) == (4, 9)
    weights = reward_weights(run, load_tasks(run))
    assert weights == {
        "plain.correct": 2.0,
        "plain.format": 0.0,
        "own.correct": 2.0,
        "own.format": 1.0,
    }
    stored = Config.model_validate(json.loads(run.model_dump_json()))
    assert stored == run == run.model_copy(update={"seed": 0})


def test_held_out_problems_are_of_all_tasks_in_turn(tmp_path: Path) -> None:
    run = config(three(tmp_path), evaluation={"max_samples": 10})
    problems = load_tasks(run)
    assert held_out(run, problems) == 10
    shares = Counter(problem.task for problem in problems.evaluation(10))
    assert shares == {"sums": 4, "words": 3, "rare": 3}
    outcomes = [
        ProblemOutcome(problem.task == "rare", 0, 1, 0, 1, 0, problem.task)
        for problem in problems.evaluation(10)
    ]
    found = metrics(outcomes, n=0)
    assert found["eval/accuracy_greedy"] == 0.3
    assert (
        found["eval/task/rare/accuracy_greedy"] == 1.0
        and found["eval/task/sums/accuracy_greedy"] == 0.0
    )
    assert found["eval/task/rare/accuracy_greedy/low"] < 1.0


def test_a_task_that_judges_nothing_has_no_accuracy_and_takes_none_away() -> None:
    outcomes = [
        ProblemOutcome(True, 0, 1, 0, 1, 0, "high"),
        ProblemOutcome(False, 0, 0, 0, 1, 0, "style"),
    ]
    found = metrics(outcomes, n=0)
    assert found["eval/accuracy_greedy"] == 1.0 and found["eval/problems"] == 2
    assert found["eval/accuracy_greedy/high"] == 1.0, "the end of the interval"
    assert not [name for name in found if "style" in name]


def test_task_does_not_seem_to_change_the_tasks_of_a_run(tmp_path: Path) -> None:
    run = config(three(tmp_path), run={"total_steps": 2, "dir": str(tmp_path / "run")})
    file = tmp_path / "config.yaml"
    file.write_text(dump(run))
    with pytest.raises(ConfigError, match=r"say tasks\.sums\.KEY=value"):
        load_config(file, ["task.verifier.timeout_s=60"])
    changed = load_config(file, ["tasks.sums.verifier.timeout_s=60"])
    assert changed.tasks["sums"].verifier.timeout_s == 60
    assert load_config(file, ["task.name=arithmetic", "tasks={}"]).tasks == {}


def test_verifiers_that_did_not_start_are_made_anew() -> None:
    made: list[Any] = []

    class Pool:
        async def start(self) -> None:
            made.append(self)
            if len(made) == 1:
                raise VerifierError("start", "no memory")

    run = config({})
    posed = PosedTask(run, load_task(run.task, 0), make_verifiers=Pool, start_player=None)

    async def scenario() -> None:
        with pytest.raises(VerifierError, match="no memory"):
            await posed.start()
        await posed.start()
        await posed.start()

    asyncio.run(scenario())
    assert len(made) == 2 and made[0] is not made[1] is posed.verifiers


# ---- what is refused ----


RETIRES = {"enable": True, "retire_at": 0.9}
RESTING = {"a": {"weight": [[0, 1.0], [9, 0.0]]}, "b": {}}
LATER = {"a": {}, "b": {"after": {"a": 0.8}}}
EVALUATED = {"evaluation": {"every_steps": 5}}
IN_TURN = {"a": {}, "b": {"after": {"c": 0.5}}, "c": {"after": {"a": 0.1, "b": 0.5}}}


@pytest.mark.parametrize(
    ("tasks", "more", "said"),
    [
        ({"a": {"group_size": 9}}, {}, r"`tasks\.a\.group_size` is 9; the most is"),
        ({"a": {"response_length": 900}}, {}, r"`tasks\.a\.response_length` is 900"),
        ({"a": {"group_size": 1}}, {}, r"`tasks\.a\.group_size` is 1: a group has responses"),
        ({"a": {"weight": [[1, 1.0]]}}, {}, "pairs of a learner step, from 0 on and rising"),
        ({"a": {"weight": [[0, 1.0], [0, 2.0]]}}, {}, "from 0 on and rising"),
        ({"a": {"weight": [[0, 1.0], [5, 0.0]]}}, {}, "All weights of `tasks` are 0 at step 5"),
        ({"a": {"teacher": "big"}}, {}, r"`tasks\.a\.teacher` is big"),
        ({"a": {"rewards_norm": "batch"}}, {}, r"`tasks\.a\.rewards_norm` is for all tasks"),
        ({"a": {"verifier": {"on_error": "zero"}}}, {}, r"verifier\.on_error` is for all tasks"),
        ({"a": {"filter_groups": {"retire_at": 0.9}}}, {}, r"filter_groups\.retire_at` is for all"),
        ({"a": {}}, {"replay": {"filter_groups": RETIRES}}, "cannot have their shares"),
        ({"a": {}}, {"replay": {"difficulty": {"choose": "window"}}}, "cannot have the shares"),
        (RESTING, {"replay": {"quota": "trained"}}, "no weight of `tasks` can be 0"),
        (LATER, {}, r"`tasks\.NAME\.after` needs evaluations: set `evaluation\.every_steps`"),
        (LATER, {**EVALUATED, "replay": {"quota": "trained"}}, "`replay.quota` cannot be trained"),
        ({"b": {"after": {"d": 0.1}}}, EVALUATED, r"`tasks\.b\.after` names d, and `tasks` has"),
        (IN_TURN, EVALUATED, r"`tasks\.b\.after` waits for tasks that wait for it"),
        (
            {"a": {"filter_groups": {"accuracy_high": 0.9}}},
            {},
            r"`tasks\.a\.filter_groups` has con",
        ),
        ({"a": {"filter_groups": {"enable": True, "custom": "mine"}}}, {}, r"`tasks\.a\..*custom"),
        ({"A": {}}, {}, "should match pattern"),
        ({"a": {"weight": 0.0}}, {}, "All weights of `tasks` are 0 at step 0"),
        ({"a": {"weight": -1.0}}, {}, r"`tasks\.a\.weight` is -1\.0: a number above 0"),
        ({"a": {"weight": [[0]]}}, {}, r"`tasks\.a\.weight` is \[\[0"),
    ],
)
def test_what_no_task_can_have_is_one_sentence(tasks: Any, more: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(tasks, **more)


def test_an_error_says_of_which_task_it_is(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"^tasks\.a\.options\.digits is not an option"):
        load_tasks(config({"a": {"options": {"digits": 1}}, "b": {}}))
    with pytest.raises(TaskError, match=r"^tasks\.b: .* needs task\.train"):
        load_tasks(config({"a": {}, "b": {"name": "jsonl"}}))
    run = config({"a": {}, "b": {"rewards": {"style": 1.0}}})
    with pytest.raises(TaskError, match=r"^tasks\.b\.rewards names style"):
        reward_weights(run, load_tasks(run))
    warm = {"warm_start": {"cache_dir": str(tmp_path)}}
    short = {"prompt_length": 64, "response_length": 8}
    run = config({"a": {}, "b": {"response_length": 1}}, model=warm, rollout=short)
    with pytest.raises(SetupError, match=r"^tasks\.b: `rollout\.response_length` is 1"):
        look(run, load_tasks(run))


# ---- on an actor, and in the queue ----


def test_groups_have_size_length_and_reward_names_of_their_task() -> None:
    parts = Parts()
    actor = actor_of(parts)
    tasks = {"small": {"group_size": 2, "response_length": 5}, "large": {"weight": 2}}
    run = config(tasks, rollout={"group_size": 4, "response_length": 8, "prompt_length": 16})
    task = load_tasks(run)
    loaded = actor._parts
    posed = {
        own.posed: PosedTask(own, one, make_verifiers=lambda: parts, start_player=None)
        for own, one in parts_of(run, task)
    }
    actor._config, frames = run, list[bytes]()
    actor._parts = type(loaded)(loaded.engine, loaded.tokenizer, task, posed, loaded.evaluator)
    put = parts.put

    async def kept(actor_id: str, sent: list[bytes]) -> Any:
        frames.extend(sent)
        return await put(actor_id, sent)

    parts.put = kept
    asyncio.run(actor.run())
    order, found = ProblemOrder.of(run, task), {}
    for group in map(decode_group, frames):
        found[order.task(group.group_id)] = len(group.rows), set(group.rows[0].rewards)
    assert found == {"small": (2, {"small.correct"}), "large": (4, {"large.correct"})}
    asked = sorted((one.n, one.max_tokens) for _, one in parts.asked)
    assert asked == [(2, 5), (4, 8)]


def settings_of(run: Config, order: ProblemOrder) -> QueueSettings:
    return QueueSettings.of(
        run,
        shaping=shaping(run, {}),
        total_steps=2,
        trained_steps=0,
        problem=order,
        problems=order.problems,
        task_of=order.task,
        pass_rates={},
    )


def test_the_queue_has_the_size_and_the_filter_of_each_task() -> None:
    strict = {"enable": True, "accuracy_low": 0.5, "metric": "correct"}
    run = config(
        {"a": {"group_size": 2, "filter_groups": strict}, "b": {"weight": 3}},
        rollout={"group_size": 4},
    )
    order = ProblemOrder.of(run, load_tasks(run))
    settings = settings_of(run, order)
    assert pickle.loads(pickle.dumps(settings)).rule_of(0) == settings.rule_of(0)
    for group_id in range(8):
        rule = settings.rule_of(group_id)
        if order.task(group_id) == "a":
            assert rule.group_size == 2 and rule.filter is not None
            assert (rule.filter.accuracy_low, rule.filter.metric) == (0.5, "a.correct")
        else:
            assert (rule.group_size, rule.filter) == (4, None)


def test_a_task_that_others_wait_for_needs_held_out_problems(tmp_path: Path) -> None:
    data = {"name": "jsonl", "train": rows(tmp_path / "a.jsonl", "a", 3)}
    run = config({"a": data, "b": {"after": {"a": 0.5}}}, **EVALUATED)
    run = run.model_copy(update={"model": run.model.model_copy(update={"path": "hub/m"})})
    with pytest.raises(SetupError, match=r"tasks\.a: `after` waits for its accuracy: it needs"):
        check_run(run, notes=[])


def test_a_task_is_posed_once_others_are_mastered() -> None:
    tasks = {"a": {"weight": 2.0}, "b": {"after": {"a": 0.8}}, "c": {"after": {"a": 0.2, "b": 0.5}}}
    run = config(tasks, rollout={"rollout_batch_size": 8}, **EVALUATED)
    order = ProblemOrder.of(run, load_tasks(run))
    queue = ReplayQueue(settings_of(run, order))

    async def issued(count: int) -> Counter[str]:
        tickets = await queue.acquire("actor", 0, holding, count) or []
        new = [one for one in tickets if one.group_id not in dict(holding)]
        holding.extend((one.group_id, one.attempt) for one in new)
        return Counter(order.task(one.group_id) for one in new)

    async def scenario() -> None:
        assert await issued(4) == {"a": 4}
        assert await queue.evaluated({"a": 0.5, "b": 0.1}) == []
        assert await issued(1) == {"a": 1}
        assert await queue.evaluated({"a": 0.85, "b": 0.6}) == ["b", "c"]
        assert await queue.evaluated({"a": 0.1}) == [], "it is not taken back"
        assert await issued(8) == {"a": 4, "b": 2, "c": 2}, "the shares as ever"
        again = Ledger.from_snapshot(json.loads(json.dumps(queue.ledger.snapshot())))
        assert again.accuracies == {"a": 0.85, "b": 0.6}

    holding: list[tuple[int, int]] = []
    asyncio.run(scenario())


def test_a_teacher_teaches_the_task_that_names_it() -> None:
    run = config(
        {"a": {"teacher": "small"}, "b": {"teacher": "big"}},
        frozen={"small": {"path": "s"}, "big": {"path": "b"}},
        algorithm={"distill": {"teacher": ["small", "big"]}},
    )
    problems = load_tasks(run)
    taught = {(problem.task, problem.teacher) for problem in problems.evaluation(4)}
    assert taught == {("a", "small"), ("b", "big")}
    assert (
        problems.train(0).teacher == "small" and problems.train(len(problems) - 1).teacher == "big"
    )
