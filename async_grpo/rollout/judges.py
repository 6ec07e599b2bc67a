"""Grades of responses by frozen models: reward components.

    responses of a group, each text once -> question per text, or per ordered pair
        -> Answerer.answer -> verdict, JSON of a fixed schema -> value
    reward model: conversations -> RewardModel.rewards -> (score - mean) / std, clipped

Runs in: rollout actors, behind the verifiers. Hides what a judge is asked. Invariants: a verdict is
what the judge itself wrote, whole and within the scale, never a part of a response; what is not
answered so is an error (`JudgeError`), never a grade; a pair is judged in both orders, so that a
judge that prefers a place says nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import permutations
from typing import Any, TypeVar

from async_grpo.config.frozen import Judge
from async_grpo.rollout.frozen import Question, TextRefused
from async_grpo.runtime.text import filled
from async_grpo.tasks.base import Problem, Prompt
from async_grpo.tasks.verifier import VerifierError

POINTWISE = """Grade the response to the request below.

Request:
{prompt}

Response:
{response}

Grade it for {criteria}, each from {lowest} (worst) to {highest} (best)."""
PAIRWISE = """Which response to the request below is better?

Request:
{prompt}

Response A:
{first}

Response B:
{second}

Answer A, B, or tie."""
_SHARES = {"A": 1.0, "tie": 0.5, "B": 0.0}
_REMEMBERED = 4096
_SHOWN = 80

T = TypeVar("T")
Values = list[float | VerifierError]


class JudgeError(VerifierError):
    """A judge gave no verdict on a response."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__("judge", f"{name} {detail}")


class Judges:
    """All judges of a task."""

    def __init__(self, judges: Mapping[str, Judge], models: Mapping[str, Any]) -> None:
        self._judges = judges
        self._models = {name: models[judge.model] for name, judge in judges.items()}
        self._known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        """The last verdicts by a digest of what was asked: temperature 0 gives the same."""

    async def grade(self, problem: Problem, responses: Sequence[str]) -> dict[str, Values]:
        """Grade every response to a problem: by component, in the order of `responses`. Raises
        FrozenFailed.
        """
        texts = Counter(responses)
        graded = await _all(
            self._values(name, judge, problem, texts) for name, judge in self._judges.items()
        )
        return {
            name: [values[text] for text in responses]
            for name, values in zip(self._judges, graded, strict=True)
        }

    async def _values(
        self, name: str, judge: Judge, problem: Problem, texts: Counter[str]
    ) -> dict[str, float | VerifierError]:
        """Grade each text once. texts: how many responses each is."""
        if judge.kind == "reward_model":
            scores = await self._models[name].rewards([(problem.prompt, text) for text in texts])
            found = [_normalised(name, judge, score) for score in scores]
            return dict(zip(texts, found, strict=True))
        said = {"prompt": _as_text(problem.prompt), "reference": _reference(problem.reference)}
        if judge.kind == "pairwise":
            return await self._pairwise(name, judge, said, texts)
        grades = await _all(self._pointwise(name, judge, said, one) for one in texts)
        return dict(zip(texts, grades, strict=True))

    async def _pointwise(
        self, name: str, judge: Judge, said: dict[str, str], text: str
    ) -> float | VerifierError:
        lowest, highest = judge.scale
        grades = list(range(lowest, highest + 1))
        facts = {
            "response": text,
            "criteria": ", ".join(judge.criteria),
            "lowest": str(lowest),
            "highest": str(highest),
        }
        allowed = dict.fromkeys(judge.criteria, grades)
        given = await self._ask(name, judge, POINTWISE, said | facts, allowed)
        if isinstance(given, VerifierError):
            return given
        mean = sum(given[key] for key in judge.criteria) / len(judge.criteria)
        return (mean - lowest) / (highest - lowest)

    async def _pairwise(
        self, name: str, judge: Judge, said: dict[str, str], texts: Counter[str]
    ) -> dict[str, float | VerifierError]:
        """Share of the other responses that each text beats, equal ones by half."""
        pairs, choices = list(permutations(texts, 2)), list(_SHARES)

        async def shares(first: str, second: str) -> float | VerifierError:
            facts = said | {"first": first, "second": second}
            given = await self._ask(name, judge, PAIRWISE, facts, {"better": choices})
            return given if isinstance(given, VerifierError) else _SHARES[given["better"]]

        given = await _all(shares(*pair) for pair in pairs)
        by_pair = dict(zip(pairs, given, strict=True))
        others, found = texts.total() - 1, dict[str, float | VerifierError]()
        for one, copies in texts.items():
            won = (copies - 1) / 2
            for other in texts.keys() - {one}:
                ahead, behind = by_pair[one, other], by_pair[other, one]
                if isinstance(ahead, VerifierError) or isinstance(behind, VerifierError):
                    found[one] = ahead if isinstance(ahead, VerifierError) else behind
                    break
                won += texts[other] * (ahead + 1 - behind) / 2
            else:
                found[one] = won / others
        return found

    async def _ask(
        self,
        name: str,
        judge: Judge,
        default: str,
        facts: dict[str, str],
        allowed: Mapping[str, list[Any]],
    ) -> dict[str, Any] | VerifierError:
        """Ask, unless the same was answered before. Only what is a verdict is remembered."""
        content = filled(judge.prompt or default, facts)
        key = blake2b(f"{name}\0{content}".encode("utf-8", "replace"), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        properties: dict[str, Any] = {"reasoning": {"type": "string"}} if judge.reasoning else {}
        for one, values in allowed.items():  # some addresses refuse a property without a type
            kind = "integer" if isinstance(values[0], int) else "string"
            properties[one] = {"type": kind, "enum": values}
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        form = f"Answer with JSON alone, with the keys {', '.join(properties)}."
        if judge.reasoning:
            form += " The reasoning is one or two sentences."
        messages = [{"role": "user", "content": f"{content}\n\n{form}"}]
        try:
            answer = await self._models[name].answer(Question(messages, schema, judge.max_tokens))
        except TextRefused as error:
            return JudgeError(name, str(error))
        try:
            given = verdict(answer, allowed, judge.reasoning)
        except ValueError as error:
            return JudgeError(name, str(error))
        self._known[key] = given
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return given


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all results; the first error cancels the others, whose answers nobody wants."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def verdict(answer: str, allowed: Mapping[str, list[Any]], reasoning: bool) -> dict[str, Any]:
    """Return what a judge says for each key. Raises ValueError for anything but JSON with exactly
    these keys, and `reasoning` where it is asked for, and allowed values.
    """
    shown = f"{answer[:_SHOWN]!r}"
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"answered {shown}, which is no JSON") from error
    if not isinstance(found, dict) or found.keys() != {*allowed, *["reasoning"] * reasoning}:
        raise ValueError(f"answered {shown}, which has not the keys {', '.join(allowed)}")
    for key, values in allowed.items():
        if not any(type(found[key]) is type(one) and found[key] == one for one in values):
            raise ValueError(f"answered {shown}, where {key} is not allowed")
    return {key: found[key] for key in allowed}


def _normalised(name: str, judge: Judge, score: float | None) -> float | VerifierError:
    if score is None:
        return JudgeError(name, f"has no room for it (frozen.{judge.model}.context_length)")
    if not math.isfinite(score):
        return JudgeError(name, f"gave {score}")
    value = (score - judge.mean) / judge.std
    return value if judge.clip is None else max(-judge.clip, min(judge.clip, value))


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _reference(reference: Any) -> str:
    """Return the answer of a row as text."""
    if isinstance(reference, Mapping) and "answer" in reference:
        reference = reference["answer"]
    return reference if isinstance(reference, str) else json.dumps(reference, default=str)
