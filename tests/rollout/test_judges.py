"""What judges say of responses: values against arithmetic by hand, both orders of a pair, and
10,000 answers of which none is a grade that was not given.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from async_grpo.config.frozen import Judge
from async_grpo.config.schema import Config
from async_grpo.replay.actor_reports import _speeds
from async_grpo.rollout.frozen import FrozenFailed, Question, TextRefused
from async_grpo.rollout.judges import Judges, verdict
from async_grpo.runtime.text import filled
from async_grpo.tasks.base import Problem
from async_grpo.tasks.verifier import VerifierError
from tests.support.rollout_parts import Parts, actor_of

ASKED = Problem([{"role": "user", "content": "Name a city."}], {"answer": "Lyon"})


class Model:
    """Answers by a function of the question's text; scores are lengths."""

    def __init__(self, says: Callable[[str], Any] = lambda text: {}) -> None:
        self.says = says
        self.questions: list[Question] = []
        self.scored: list[Any] = []

    async def answer(self, question: Question) -> str:
        self.questions.append(question)
        said = self.says(question.messages[0]["content"])
        if isinstance(said, BaseException):
            raise said
        return said if isinstance(said, str) else json.dumps(said)

    async def rewards(self, conversations: Any) -> list[float]:
        self.scored += conversations
        return [float(len(response)) for _, response in conversations]


def graded(model: Model, responses: list[str], **judge: Any) -> list[float | VerifierError]:
    judges = Judges({"nice": Judge(model="m", **judge)}, {"m": model})
    return asyncio.run(judges.grade(ASKED, responses))["nice"]


def test_grades_are_means_of_criteria_on_the_scale() -> None:
    model = Model(lambda text: {"clear": 2, "right": 7 if "Lyon" in text else 1})
    found = graded(
        model,
        ["Oslo", "Lyon", "Oslo"],
        criteria=["clear", "right"],
        scale=[1, 7],
        prompt="{response}",
    )
    assert found == [pytest.approx(0.5 / 6), pytest.approx(3.5 / 6), pytest.approx(0.5 / 6)]
    assert len(model.questions) == 2  # equal texts are asked once
    [question, _] = model.questions
    assert list(question.schema["properties"]) == question.schema["required"]
    assert question.schema["properties"]["clear"] == {
        "type": "integer",
        "enum": [1, 2, 3, 4, 5, 6, 7],
    }
    assert not question.schema["additionalProperties"] and question.max_tokens == 512


def test_what_a_judge_is_asked_has_the_request_the_response_and_what_the_prompt_wants() -> None:
    model = Model(lambda text: {"reasoning": "{}", "score": 3})
    assert graded(model, ["I say {reference}"], reasoning=True, max_tokens=9) == [0.5]
    [text] = [one["content"] for one in model.questions[0].messages]
    assert "user: Name a city." in text and "I say {reference}" in text and "Lyon" not in text
    properties = model.questions[0].schema["properties"]
    assert list(properties) == ["reasoning", "score"]
    assert all("type" in one for one in properties.values()), "which some addresses demand"
    assert model.questions[0].max_tokens == 9
    graded(model, ["x"], reasoning=True, prompt="{reference} {response} {other}")
    assert model.questions[1].messages[0]["content"].startswith("Lyon x {other}\n")


def test_a_template_is_filled_at_once() -> None:
    assert filled("{a}-{b}-{c}", {"a": "{b}", "b": "{a}"}) == "{b}-{a}-{c}"


def test_a_group_of_one_has_no_pairs() -> None:
    with pytest.raises(ValueError, match=r"`task.judges.nice` compares responses of a group"):
        Config.model_validate(
            {
                "run": {"total_steps": 1},
                "model": {"path": "m"},
                "frozen": {"m": {"path": "m"}},
                "task": {"judges": {"nice": {"model": "m", "kind": "pairwise"}}},
                "algorithm": {"adv_estimator": "raw"},
                "rollout": {"group_size": 1},
            }
        )


def beats(better: Callable[[str, str], str]) -> Model:
    def says(text: str) -> dict[str, str]:
        first, second = re.findall(r"<(\w+)>", text)
        return {"better": better(first, second)}

    return Model(says)


PAIR = {"kind": "pairwise", "prompt": "<{first}> <{second}>"}


def test_a_pair_is_judged_in_both_orders_and_equal_texts_share() -> None:
    longer = beats(lambda a, b: "A" if len(a) > len(b) else "B" if len(a) < len(b) else "tie")
    texts = ["aaa", "b", "cc", "dd", "b"]
    found = graded(longer, texts, **PAIR)
    # by hand: wins over the four others, ties by half
    assert found == [1.0, 0.125, 0.625, 0.625, 0.125]
    assert len(longer.questions) == 12
    first_is_best = beats(lambda a, b: "A")
    assert graded(first_is_best, texts, **PAIR) == [0.5] * 5
    assert graded(longer, ["b", "b"], **PAIR) == [0.5, 0.5]


def test_a_pair_without_a_verdict_leaves_both_without_a_grade() -> None:
    model = beats(lambda a, b: "neither" if {a, b} == {"x", "y"} else "A")
    found = graded(model, ["x", "y", "z"], **PAIR)
    assert [isinstance(one, VerifierError) for one in found] == [True, True, False]
    assert "where better is not allowed" in str(found[0])


def test_a_reward_models_score_is_normalised_and_clipped() -> None:
    model = Model()
    found = graded(model, ["a", "bbb", "c" * 90], kind="reward_model", mean=2.0, std=0.5, clip=4.0)
    assert found == [-2.0, 2.0, 4.0]
    assert model.scored[0] == (ASKED.prompt, "a")
    assert graded(Model(), ["c" * 90], kind="reward_model") == [90.0]
    broken = Model()
    broken.rewards = lambda asked: asyncio.sleep(0, [float("nan")])  # type: ignore[method-assign]
    [error] = graded(broken, ["a"], kind="reward_model")
    assert isinstance(error, VerifierError) and "nice gave nan" in str(error)


def test_verdicts_are_remembered_and_nothing_else() -> None:
    said = [FrozenFailed("away"), "no idea", TextRefused("too long"), {"score": 5}]
    model = Model(lambda text: said.pop(0))
    judges = Judges({"nice": Judge(model="m")}, {"m": model})
    with pytest.raises(FrozenFailed):
        asyncio.run(judges.grade(ASKED, ["a"]))
    for why in ("nice answered 'no idea', which is no JSON", "nice too long"):
        [error] = asyncio.run(judges.grade(ASKED, ["a"]))["nice"]
        assert isinstance(error, VerifierError) and why in str(error)
    for _ in range(3):
        assert asyncio.run(judges.grade(ASKED, ["a"])) == {"nice": [1.0]}
    assert len(model.questions) == 4


def test_a_model_that_is_away_is_asked_nothing_more_for_the_group() -> None:
    answered: list[str] = []

    class Slow(Model):
        async def answer(self, question: Question) -> str:
            self.questions.append(question)
            if len(self.questions) == 2:
                raise FrozenFailed("away")
            await asyncio.sleep(0.05)
            answered.append("late")
            return "{}"

    async def ask() -> None:
        judges = Judges({"nice": Judge(model="m", **PAIR)}, {"m": model})
        with pytest.raises(FrozenFailed):
            await judges.grade(ASKED, list("abcdefgh"))
        await asyncio.sleep(0.1)

    model = Slow()
    asyncio.run(ask())
    assert answered == []


HOSTILE = [
    "",
    "5",
    "null",
    "[5]",
    '"score"',
    "{}",
    '{"score": "5"}',
    '{"score": 5.0}',
    '{"score": true}',
    '{"score": 6}',
    '{"score": -1}',
    '{"score": NaN}',
    '{"score": [5]}',
    '{"score": {"score": 5}}',
    '{"score": 5, "more": 1}',
    '{"Score": 5}',
    '{"score": 5',
    '{"score": 5} {"score": 1}',
    'The score is {"score": 5}',
    '```json\n{"score": 5}\n```',
    "<html><body>502</body></html>",
    '{"score": 1e400}',
    "[" * 5000,
    "\x00\ud800",
    '{"reasoning": "x", "score": 5}',
]


def test_ten_thousand_hostile_answers_are_no_grades() -> None:
    random.seed(0)
    allowed, good = {"score": [1, 2, 3, 4, 5]}, '{"score": 5}'
    letters = '{}[]":,.0123456789 escortnul\\'
    for number in range(10_000):
        answer = HOSTILE[number % len(HOSTILE)]
        if number >= len(HOSTILE):
            at = random.randrange(len(answer) + 1)
            answer = answer[:at] + "".join(random.choices(letters, k=3)) + answer[at:]
        try:
            found = verdict(answer, allowed, reasoning=False)
        except ValueError as error:
            assert "answered" in str(error)
        else:  # whitespace and escapes alone
            assert json.loads(answer) == found and found["score"] in allowed["score"]
            assert type(found["score"]) is int and set(found) == {"score"}
    assert verdict(good, allowed, reasoning=False) == {"score": 5}
    for answer in HOSTILE:
        with pytest.raises(ValueError, match="answered"):
            verdict(answer, allowed, reasoning=False)


def test_a_text_without_room_is_not_scored() -> None:
    model = Model()
    model.rewards = lambda asked: asyncio.sleep(0, [None, 2.0])  # type: ignore[method-assign]
    long, short = graded(model, ["aa", "b"], kind="reward_model")
    assert short == 2.0 and "frozen.m.context_length" in str(long)


def judged(model: Model, **settings: Any) -> tuple[Parts, Counter[str]]:
    parts = Parts()
    actor = actor_of(parts, judge=model, **settings)
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    return parts, actor._counts


def test_a_grade_is_a_component_of_every_row() -> None:
    parts, counts = judged(Model(lambda text: {"score": 4}))
    assert [row.rewards for frame in parts.frames for row in frame.rows] == [
        {"correct": 1.0, "nice": 0.75}
    ] * 4
    assert counts["judged"] == 2
    waited = _speeds({"judged": 2, "judging_ms": 3000.0, "taught": 4, "teaching_ms": 1000.0})
    assert waited == {"rollout/judge_s": 1.5, "rollout/teacher_s": 0.25}


def test_a_response_that_a_judge_does_not_grade_is_never_scored() -> None:
    parts, counts = judged(Model(lambda text: "no idea"))
    assert set(parts.failed) == {0, 1} and not parts.frames
    assert parts.failed[0].startswith("verifier: judge: nice answered 'no idea'")
    assert counts["verifier_errors_judge"] == 2


def test_on_error_zero_gives_it_the_reward_0() -> None:
    parts, _ = judged(Model(lambda text: "no idea"), on_error="zero")
    assert [row.rewards["nice"] for frame in parts.frames for row in frame.rows] == [0.0] * 4


def test_a_judge_that_is_away_fails_groups_by_name() -> None:
    parts, counts = judged(Model(lambda text: FrozenFailed("gpt: it is away")))
    assert counts["verifier_errors_frozen"] == 2
    assert parts.failed == dict.fromkeys((0, 1), "frozen model gpt: it is away")
