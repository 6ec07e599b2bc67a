"""What a rollout actor does with a frozen model: its log-probs of the sampled tokens go with the
group, and a group without them is none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.base import EngineError
from async_grpo.rollout.frozen import (
    FrozenFailed,
    Taught,
    engine_config,
    teacher_planes,
    teacher_prompt,
)
from async_grpo.rollout.producer import GroupProducer
from async_grpo.run.preflight.run_check import check_run
from async_grpo.tasks.base import Problem
from async_grpo.tasks.chat import solved_ids
from async_grpo.wire.codec import Row, VersionSpan, decode_group
from tests.support.rollout_parts import Parts, Tokenizer, actor_of

ROW = {"behavior_logprobs": np.zeros(3, np.float32), "versions": [VersionSpan(0, 0, 3)]}
TAUGHT = ["math", None, "code", "poetry"]
REST = {"rewards": {}, "verdict": None, "finish_reason": "stop"}


class Teacher:
    """Says of each token: minus the number of tokens before it, prompt included, and of `top_k`
    others, as many less; these have that number as id.
    """

    def __init__(
        self, *, fails: BaseException | None = None, lacks: int = 0, top_k: int = 0
    ) -> None:
        self.fails, self.lacks, self.top_k, self.asked = fails, lacks, top_k, 0

    async def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Taught]:
        self.asked += len(sequences)
        if self.fails is not None:
            raise self.fails
        found = []
        for prompt, response in sequences:
            before = np.arange(len(prompt), len(prompt) + len(response) - self.lacks)[:, None]
            ids = before + np.arange(1, self.top_k + 1)
            found.append((-np.hstack([before, ids]).astype(np.float32), ids.astype(np.int32)))
        return found


async def test_the_planes_have_the_sampled_tokens_of_all_rows_in_order() -> None:
    prompts = [np.arange(2, dtype=np.int32), np.arange(5, dtype=np.int32)]
    turns = [(0, 1), (2, 2)]  # two tokens of context behind the first one
    rows = [
        Row(response_ids=np.arange(3), segments=[(0, 3)], prompt=1, **ROW, **REST),
        Row(response_ids=np.arange(5), segments=turns, prompt=0, **ROW, **REST),
    ]
    [plane] = (await teacher_planes(Teacher(), prompts, rows)).values()
    assert plane.dtype == np.float32 and plane.shape == (6, 1)
    assert plane[:, 0].tolist() == [-5, -6, -7, -2, -5, -6]
    both = await teacher_planes(Teacher(top_k=2), prompts, rows)
    ids, logprobs = both["teacher_ids"], both["teacher_logprobs"]
    assert ids.dtype == np.int32 and ids.tolist() == [[-x + 1, -x + 2] for x in plane[:, 0]]
    assert logprobs.tolist() == [[x, x - 1, x - 2] for x in plane[:, 0]]
    with pytest.raises(FrozenFailed, match=r"gave \[2, 4\] log-probs for \[3, 5\]"):
        await teacher_planes(Teacher(lacks=1), prompts, rows)


def run(parts: Parts, teacher: Any, **settings: Any) -> None:
    actor = actor_of(parts, teacher=teacher, **settings)
    asyncio.run(asyncio.wait_for(actor.run(), 10))


def test_every_group_carries_what_the_teacher_says() -> None:
    parts, teacher = Parts(), Teacher()
    frames: list[bytes] = []
    put = parts.put

    async def kept(actor_id: str, given: list[Any]) -> Any:
        frames.extend(given)
        return await put(actor_id, given)

    parts.put = kept  # type: ignore[method-assign]
    run(parts, teacher)
    assert teacher.asked == 4
    for frame in frames:
        plane = decode_group(frame).planes["teacher_logprobs"]
        assert plane[:, 0].tolist() == [-3, -4] * 2


def solved(actor: GroupProducer, solution: str | None, **changes: Any) -> GroupProducer:
    train = actor.parts.task.train
    actor.parts.task.train = lambda index: replace(train(index), solution=solution, **changes)
    return actor


@pytest.mark.parametrize(
    ("solution", "ids", "ended"),
    [
        ("four", [0, 1, 2, 3, 99], "stop"),
        ("twelve chars", list(range(8)), "length"),
        (None, [], ""),
    ],
)
def test_a_worked_solution_is_the_demonstration_of_its_group(
    solution: str | None, ids: list[int], ended: str
) -> None:
    """Of at most `rollout.response_length` tokens, 8; the teacher is not asked about it."""
    parts, teacher = Parts(), Teacher(top_k=2)
    given = {"sft_loss_coef": 0.1}
    actor = solved(actor_of(parts, teacher=teacher, algorithm=given), solution)
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    assert not parts.failed and len(parts.sent) == 2 and teacher.asked == 4
    for group in map(decode_group, parts.sent):
        rows = [row for row in group.rows if row.role == "demonstration"]
        assert [row.response_ids.tolist() for row in rows] == [ids] * bool(ids)
        assert [row.finish_reason for row in rows] == [ended] * bool(ids)
        assert all(not row.rewards and not row.behavior_logprobs.any() for row in rows)
        plane = group.planes["teacher_logprobs"]
        assert plane.shape == (4 + len(ids), 3) and not plane[4:].any() and plane[:4].all()


class Demonstrator:
    def __init__(self, gives: list[int]) -> None:
        self.asked: list[Any] = []
        self.gives = gives

    async def respond(self, prompt: list[int], limit: int, seed: int | None) -> list[int]:
        self.asked.append((prompt, limit, seed is not None))
        return self.gives


@pytest.mark.parametrize("seeded", [False, True])
def test_a_frozen_model_gives_the_demonstration(seeded: bool) -> None:
    parts, model = Parts(), Demonstrator([5, 99])
    given = {"sft_loss_coef": 0.1, "sft_model": "big", "distill": {}}
    actor = actor_of(parts, teacher={"big": model}, algorithm=given, seeded=seeded)
    asyncio.run(asyncio.wait_for(solved(actor, "four").run(), 10))
    assert not parts.failed
    for group in map(decode_group, parts.sent):
        assert group.rows[-1].response_ids.tolist() == [5, 99] and len(group.rows) == 3
    assert model.asked == [([0, 1, 2], 8, seeded)] * 2


@pytest.mark.parametrize(
    ("gives", "ended"), [([5] * 8, "length"), ([5] * 7 + [99], "stop"), ([5, 100], ""), ([], "")]
)
def test_a_demonstration_that_was_cut_says_so_and_strange_tokens_are_refused(
    gives: list[int], ended: str
) -> None:
    parts, given = Parts(), {"sft_loss_coef": 0.1, "sft_model": "big", "distill": {}}
    actor = actor_of(parts, teacher={"big": Demonstrator(gives)}, algorithm=given)
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    if ended:
        assert {decode_group(one).rows[-1].finish_reason for one in parts.sent} == {ended}
    else:
        what = "token 100, which the policy has not" if gives else "no token"
        said = f"frozen model big gave {what}"
        assert parts.failed == {0: said, 1: said}


def test_a_demonstration_is_asked_for_while_the_policy_generates() -> None:
    parts, cancelled = Parts(engine=EngineError("one bad request")), []

    class Slow:
        async def respond(self, prompt: list[int], limit: int, seed: int | None) -> list[int]:
            try:
                return await asyncio.sleep(60, [5])
            finally:
                cancelled.append(len(parts.failed))

    given = {"sft_loss_coef": 0.1, "sft_model": "big", "distill": {}}
    actor = actor_of(parts, teacher={"big": Slow()}, algorithm=given)
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    assert {*parts.failed.values()} == {"EngineError: one bad request"} and len(cancelled) == 2


def test_the_end_of_a_chat_is_that_of_its_template() -> None:
    tokenizer = Tokenizer()
    assert solved_ids(tokenizer, "p", "abc", (99, 7)) == [0, 1, 2, 99]
    chat = [{"role": "user", "content": "p"}]
    assert solved_ids(tokenizer, chat, "abc", (99, 7)) == [0, 1, 2, 7]
    assert solved_ids(tokenizer, chat, "abc", (99, 8)) == [0, 1, 2, 99]


def test_an_engine_that_hangs_while_it_teaches_is_replaced() -> None:
    parts = Parts()

    async def hangs(*_: Any) -> Any:
        await asyncio.sleep(60)

    parts.top_logprobs = hangs  # type: ignore[method-assign]
    own = {"distill": {"teacher": "policy", "teacher_prompt": "{prompt}"}}
    actor = actor_of(parts, algorithm=own, group_timeout_s=0.2)
    with pytest.raises(EngineError, match="no group came out of the engine"):
        asyncio.run(asyncio.wait_for(actor.run(), 10))


def test_the_policy_teaches_itself_under_another_prompt() -> None:
    """A prompt of `rollout.prompt_length` tokens leaves no room for what a scoring engine needs."""
    for template, seen in (("{prompt}", 3), ("{prompt}{solution}", 5)):
        parts = Parts()
        own = {"distill": {"teacher": "policy", "teacher_top_k": 2, "teacher_prompt": template}}
        actor = solved(actor_of(parts, algorithm=own), "ab")
        asyncio.run(asyncio.wait_for(actor.run(), 10))
        if seen < 4:
            assert not parts.failed and parts.seen == [seen] * 4
            for group in map(decode_group, parts.sent):
                assert (group.planes["teacher_logprobs"] == -seen).all()
        else:
            said = "PromptTooLong: algorithm.distill.teacher_prompt makes a prompt of 5 tokens: "
            assert {*parts.failed.values()} == {f"{said}rollout.prompt_length, 4, must be more"}
            assert not parts.asked, "before anything is generated"


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (Problem("p", 1, solution="s"), "s: p {solution} s"),
        (Problem("{solution}", {"answer": "a"}, solution="b"), "s: {solution} b"),
        (Problem("p", [1, 2], solution=("turn", "by turn")), ""),
        (Problem("p", {"answer": "a"}), ""),
    ],
)
def test_what_a_teacher_is_told(problem: Problem, told: str) -> None:
    template = "s: {prompt} {solution}"
    if problem.solution == "s":
        template, told = "s: {prompt} {solution}{x}", "s: p s{x}"
    if not told:
        assert teacher_prompt(problem, "no {prompt}") == "no p"
        with pytest.raises(FrozenFailed, match="told a solution, and the problem has none"):
            teacher_prompt(problem, template)
        return
    assert teacher_prompt(problem, template) == told
    first = {"role": "system", "content": "{prompt}"}
    chat = replace(problem, prompt=[first, {"role": "user", "content": problem.prompt}])
    assert teacher_prompt(chat, template) == [first, {"role": "user", "content": told}]


@pytest.mark.parametrize(("name", "asked"), [("code", (0, 4)), (None, (4, 0))])
def test_a_row_names_one_of_several_teachers(name: str | None, asked: tuple[int, int]) -> None:
    parts, teachers = Parts(), {"math": Teacher(), "code": Teacher()}
    actor = actor_of(parts, teacher=teachers)
    train = actor.parts.task.train
    actor.parts.task.train = lambda index: replace(train(index), teacher=name)
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    assert not parts.failed and len(parts.frames) == 2
    assert (teachers["math"].asked, teachers["code"].asked) == asked


def test_a_teacher_that_there_is_not_is_told_before_anything_is_generated() -> None:
    parts = Parts()
    actor = actor_of(parts, teacher={"math": Teacher(), "code": Teacher()})
    train = actor.parts.task.train
    actor.parts.task.train = lambda index: replace(train(index), teacher="poetry")
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    said = "frozen model poetry is named by a row, and is no teacher"
    assert parts.failed == {0: said, 1: said} and not parts.asked
    alone = actor_of(Parts(), teacher=Teacher())
    assert alone._teaching._teacher_of(Problem("p", None, teacher="poetry")) == "teacher", (
        "the only one"
    )


def test_rows_that_name_none_of_the_teachers_are_refused_before_a_start(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"} | ({"teacher": name} if name else {}) for name in TAUGHT]
    train, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "c", "answer": "d"}')
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "run": {"total_steps": 1, "dir": str(tmp_path / "run")},
        "model": {"path": "hub/policy"},
        "task": {"name": "jsonl", "train": str(train), "eval": str(held_out)},
        "frozen": {"math": {"path": "hub/m"}, "code": {"path": "hub/c"}},
        "algorithm": {"distill": {"teacher": ["math", "code"]}},
    }
    with pytest.raises(
        SetupError, match=r"rows name the teacher poetry, and .*teacher` has math, code"
    ):
        check_run(Config.model_validate(values), notes=[])
    values["frozen"] |= {"poetry": {"path": "hub/p"}}
    values["algorithm"]["distill"]["teacher"].append("poetry")
    first = check_run(Config.model_validate(values), notes=[])
    assert first.problems == len(TAUGHT)
    train.write_text(train.read_text().replace("poetry", "math"))
    second = check_run(Config.model_validate(values), notes=[])
    assert second.fingerprint != first.fingerprint, "groups of another teacher are not taken over"
    values["algorithm"]["distill"]["teacher"] = "math"
    values["frozen"] = {"math": {"path": "hub/m"}}
    alone = check_run(Config.model_validate(values), notes=[])
    train.write_text(train.read_text().replace('"teacher"', '"by"'))
    assert check_run(Config.model_validate(values), notes=[]).fingerprint == alone.fingerprint


@pytest.mark.parametrize(("most", "fits"), [(5, False), (8, True), (-1, True), (None, True)])
def test_an_engine_that_names_fewer_tokens_than_are_asked_for_is_refused(
    most: int | None, fits: bool
) -> None:
    arguments = {} if most is None else {"max_logprobs": most}
    values = {
        "run": {"total_steps": 1},
        "model": {"path": "policy"},
        "frozen": {"big": {"path": "t", "engine": {"vllm": arguments}}},
        "algorithm": {"distill": {"teacher": "big", "teacher_top_k": 8}},
    }
    with nullcontext() if fits else pytest.raises(ValueError, match="max_logprobs` is 5, below"):
        Config.model_validate(values)


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (Teacher(fails=FrozenFailed("teacher: it is gone")), "frozen model teacher: it is gone"),
        (Teacher(lacks=1), "frozen model gave [1, 1] log-probs for [2, 2]"),
    ],
)
def test_a_group_without_an_answer_is_failed(teacher: Teacher, reason: str) -> None:
    parts = Parts()
    run(parts, teacher)
    assert parts.failed == {0: reason, 1: reason} and not parts.frames


def test_a_value_that_is_not_finite_is_never_sent() -> None:
    parts, teacher = Parts(), Teacher()

    async def broken(sequences: Any) -> list[Taught]:
        nothing = np.empty((1, 0), np.int32)
        return [
            (np.full((len(response), 1), np.nan, np.float32), nothing.repeat(len(response), 0))
            for _, response in sequences
        ]

    teacher.score = broken  # type: ignore[method-assign]
    run(parts, teacher)
    assert set(parts.failed) == {0, 1} and "is not finite" in parts.failed[0]


def test_a_teacher_that_hangs_costs_groups_and_not_the_engine() -> None:
    parts, teacher, asked = Parts(), Teacher(), []

    async def hangs(sequences: Any) -> list[Taught]:
        asked.extend(work.asks for work in actor._groups.values())
        return await asyncio.sleep(60, [])

    teacher.score = hangs  # type: ignore[method-assign]
    actor = actor_of(parts, teacher=teacher, group_timeout_s=0.2)
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    assert "teacher teacher" in asked and set(asked) <= {"teacher teacher", "its verifiers"}
    assert "it was verifying" in parts.failed[0] and "it was verifying" in parts.failed[1]


@pytest.mark.parametrize("context", [None, 40])
def test_the_engine_of_a_frozen_model_has_room_for_the_token_that_it_samples(
    context: int | None,
) -> None:
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "policy", "lora": {}},
            "frozen": {
                "teacher": {"path": "other", "dtype": "float32", "engine": {"max_num_seqs": 3}}
            },
            "algorithm": {"distill": {"teacher": "teacher"}},
            "rollout": {"prompt_length": 8, "response_length": 16, "context_length": context},
        }
    )
    own = engine_config(config, "teacher")
    assert own.rollout.longest_row == config.rollout.longest_row + 1
    assert (own.model.path, own.model.dtype, own.model.lora) == ("other", "float32", None)
    assert own.cluster.engine.max_num_seqs == 3


@pytest.mark.parametrize(
    ("kind", "given", "longest"),
    [
        ("pointwise", None, 2 * 24 + 1024 + 512 + 1),
        ("reward_model", None, 24 + 64 + 1),
        ("pairwise", 600, 601),
        ("reward_model", 5, 6),
    ],
)
def test_the_engine_of_a_judge_has_room_for_what_it_is_asked(
    kind: str, given: int | None, longest: int
) -> None:
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "policy"},
            "frozen": {"m": {"path": "other", "context_length": given}},
            "task": {"judges": {"nice": {"model": "m", "kind": kind}}},
            "rollout": {"prompt_length": 8, "response_length": 16},
        }
    )
    own = engine_config(config, "m")
    assert own.rollout.longest_row == longest
    scores = kind == "reward_model"
    assert (own.cluster.engine.vllm.get("runner") == "pooling") is scores
    assert ("structured_outputs_config" in own.cluster.engine.vllm) is not scores
