"""Frozen models as rollout actors see them, and with which settings their engines start.

    rows --prompt, response of each--> Teacher --log-probs--> those of the sampled tokens -> planes
    prompt --> Demonstrator, or the problem's own solution --> a row that is imitated

Runs in: rollout actors, after the group is scored; settings also in the driver. Knows no process:
`cluster.frozen_models` has those. Invariant: a group either has a finite log-prob of a teacher for
every sampled token, or is failed. Judges: see `rollout.judges`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import Engine, stop_tokens
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.runtime.text import filled
from async_grpo.tasks.base import Problem, Prompt
from async_grpo.wire.groups import Row, VersionSpan

TEMPLATE, INSTRUCTIONS = 64, 1024
"""Tokens of a chat template around a row, and of what a judge is told."""


Taught = tuple[np.ndarray, np.ndarray]
"""Log-probs [L, 1 + k] float32 of a response, and ids [L, k] int32 of the k tokens beside it."""


class FrozenFailed(RuntimeError):
    """A frozen model does not answer: the group is issued again."""


class TextRefused(RuntimeError):
    """A text that a model cannot be asked; it can be asked others."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a model is asked: chat messages, and the JSON schema that its answer must have."""

    messages: list[dict[str, str]]
    schema: dict[str, Any]
    max_tokens: int


class Teacher(Protocol):
    """A frozen model with the policy's vocabulary. Raises FrozenFailed, as all of them."""

    async def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Taught]:
        """Give what `Engine.top_logprobs` does of each response, behind its prompt, both as token
        ids, with the `top_k` of `algorithm.distill`.
        """


class Demonstrator(Protocol):
    """A frozen model with the policy's vocabulary whose responses are imitated."""

    async def respond(self, prompt: list[int], limit: int, seed: int | None) -> list[int]:
        """Sample a response of at most `limit` tokens at temperature 1, with its end token."""


class LivePolicy:
    """The policy as its own teacher, with the weights that its engine serves."""

    def __init__(self, engine: Engine, top_k: int) -> None:
        self._engine, self._top_k = engine, top_k

    async def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Taught]:
        """See `Teacher.score`."""
        return await self._engine.top_logprobs(sequences, self._top_k)


class Answerer(Protocol):
    """A frozen model that generates."""

    async def answer(self, question: Question) -> str:
        """Answer at temperature 0; the text follows the schema unless it was cut off. Raises
        TextRefused.
        """


class RewardModel(Protocol):
    """A frozen sequence classifier."""

    async def rewards(self, conversations: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        """Score of the last token of each response, behind its prompt, without activation; None
        for a text that is too long.
        """


def engine_config(config: Config, name: str) -> Config:
    """Return the settings with which the engine of a frozen model starts. Its context is one token
    longer than asked for, since an engine that scores samples one token.
    """
    frozen, rollout = config.frozen[name], config.rollout
    kinds = {one.kind for one in config.judges.values() if one.model == name}
    context = frozen.context_length or rollout.longest_row
    if kinds and frozen.context_length is None:
        asked = [one for one in config.judges.values() if one.model == name]
        answer = max(judge.max_tokens for judge in asked)
        scores = "reward_model" in kinds
        context = context + TEMPLATE if scores else 2 * context + INSTRUCTIONS + answer
    longest = "response_length" if rollout.context_length is None else "context_length"
    longer = {longest: context + 1 - rollout.prompt_length}
    engine = frozen.engine
    if kinds:
        engine = ENGINE.serving(engine, scores="reward_model" in kinds)
    model: dict[str, object] = {
        "path": frozen.path,
        "dtype": frozen.dtype,
        "lora": None,
        "freeze": [],
    }
    return config.unchecked_copy(
        update={
            "model": config.model.unchecked_copy(update=model),
            "learner": config.learner.unchecked_copy(update={"routing_replay": "off"}),
            "rollout": rollout.unchecked_copy(update=longer),
            "cluster": config.cluster.unchecked_copy(update={"engine": engine}),
        }
    )


def tokenizer_of(config: Config, name: str) -> tuple[Any, list[int]]:
    """Return the tokenizer of a frozen model, and the tokens that end its answers; (None, []) for
    one that neither reads nor writes. config: of its engine.
    """
    from transformers import AutoTokenizer

    judges = [judge for judge in config.judges.values() if judge.model == name]
    responds = name == config.algorithm.sft_model
    if not judges and not responds:
        return None, []
    model = str(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(
        model, trust_remote_code=config.model.trust_remote_code
    )
    answers = responds or any(judge.kind != "reward_model" for judge in judges)
    return tokenizer, stop_tokens(model, tokenizer.eos_token_id) if answers else []


async def teacher_planes(
    teacher: Teacher, prompts: Sequence[np.ndarray], rows: Sequence[Row]
) -> dict[str, np.ndarray]:
    """Return the planes of the S sampled tokens of all rows, one after the other: log-probs
    [S, 1 + k], and where there are others beside the sampled one, their ids [S, k]. Raises
    FrozenFailed, also for an answer of another length.
    """
    asked = [(prompts[row.prompt].tolist(), row.response_ids.tolist()) for row in rows]
    answers = await teacher.score(asked)
    lengths = [len(logprobs) for logprobs, _ in answers]
    if lengths != [len(response) for _, response in asked]:
        raise FrozenFailed(f"gave {lengths} log-probs for {[len(one) for _, one in asked]}")
    logprobs, ids = (
        np.concatenate([part[row.sampled] for part, row in zip(parts, rows, strict=True)])
        for parts in zip(*answers, strict=True)
    )
    planes = {"teacher_logprobs": logprobs.astype(np.float32)}
    return planes | ({"teacher_ids": ids.astype(np.int32)} if ids.shape[1] else {})


def teacher_prompt(problem: Problem, template: str) -> Prompt:
    """Return the prompt as a teacher sees it (`algorithm.distill.teacher_prompt`). Raises
    FrozenFailed for a problem without what the template names.
    """
    prompt, facts = problem.prompt, dict[str, str]()
    facts["prompt"] = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if isinstance(problem.solution, str):
        facts["solution"] = problem.solution
    elif "{solution}" in template:
        raise FrozenFailed("is to be told a solution, and the problem has none")
    told = filled(template, facts)
    return told if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": told}]


def demonstration(ids: Sequence[int], *, limit: int, version: int, ends: Collection[int]) -> Row:
    """Return the row of a given response, cut as one that is sampled. version: of its tokens, which
    no policy sampled; ends: tokens that end a response.
    """
    kept = np.asarray(ids[:limit], np.int32)
    return Row(
        response_ids=kept,
        behavior_logprobs=np.zeros(len(kept), np.float32),
        segments=[(0, len(kept))],
        versions=[VersionSpan(version, 0, len(kept))],
        rewards={},
        verdict=None,
        finish_reason="stop" if kept[-1] in ends else "length",
        role="demonstration",
    )
