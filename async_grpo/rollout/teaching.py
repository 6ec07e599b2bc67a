"""What a group is taught beside its rewards: log-probs of a teacher, and a demonstration.

    problem -> Teaching.begin -> Lesson: who teaches, what it sees, a response of a frozen model
                                 that is under way while the policy generates
    rows    -> Lesson.finish  -> planes of the teacher (`algorithm.distill`), and the row that is
                                 imitated (`algorithm.sft_loss_coef`)

Runs in: rollout actors. Hides who teaches. Invariants: what can be known of the problem alone is
refused before anything is generated; a teacher says nothing of a demonstration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.config.algorithm import LIVE
from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import Engine
from async_grpo.rollout.episodes import PromptTooLong
from async_grpo.rollout.frozen import (
    FrozenFailed,
    LivePolicy,
    Teacher,
    demonstration,
    teacher_planes,
    teacher_prompt,
)
from async_grpo.tasks.base import Problem
from async_grpo.tasks.chat import prompt_ids, solved_ids
from async_grpo.wire.groups import Row

Asks = Callable[[str, str], None]
"""Told of the stage that begins, and who is asked."""


@dataclass
class Lesson:
    """One group. given: token ids of a demonstration, or the response that is waited for."""

    limit: int
    ends: Sequence[int]
    name: str = ""
    teacher: Teacher | None = None
    seen: np.ndarray | None = None
    """What the teacher sees instead of the prompt."""
    given: asyncio.Task[list[int]] | list[int] | None = None
    by: str = ""
    vocabulary: int = 0

    def close(self) -> None:
        """Ask nobody any more."""
        if isinstance(self.given, asyncio.Task):
            self.given.cancel()

    async def finish(
        self, prompts: list[np.ndarray], rows: Sequence[Row], asks: Asks
    ) -> tuple[dict[str, np.ndarray], list[Row]]:
        """Return planes of the sampled tokens, and the rows that are imitated. Raises FrozenFailed,
        EngineError.
        """
        planes: dict[str, np.ndarray] = {}
        if self.teacher is not None:
            asks("generating" if self.name == LIVE else "verifying", f"teacher {self.name}")
            told = prompts if self.seen is None else [self.seen]
            planes = await teacher_planes(self.teacher, told, rows)
        if self.given is None:
            return planes, []
        ids = self.given
        if isinstance(ids, asyncio.Task):
            asks("verifying", f"model {self.by}")
            if not (ids := await ids):
                raise FrozenFailed(f"{self.by} gave no token")
            if strange := [one for one in ids if one >= self.vocabulary]:
                raise FrozenFailed(f"{self.by} gave token {strange[0]}, which the policy has not")
        newest = max(row.versions[-1].policy_version for row in rows)
        row = demonstration(ids, limit=self.limit, version=newest, ends=self.ends)
        more = (0, len(row.response_ids)), (0, 0)
        return {key: np.pad(plane, more) for key, plane in planes.items()}, [row]


class Teaching:
    """Who teaches the groups of an actor. frozen: models by name (`rollout.frozen`)."""

    def __init__(self, config: Config, frozen: Mapping[str, Any]) -> None:
        self._config, self._frozen = config, frozen
        algorithm = config.algorithm
        self.asks = bool(algorithm.distill.teachers or algorithm.sft_loss_coef)
        """Whether a group is taught at all."""

    def begin(
        self, problem: Problem, *, engine: Engine, tokenizer: Any, seed: int | None
    ) -> Lesson:
        """Prepare for a group. seed: of a frozen model's response. Raises FrozenFailed for a
        problem that names no teacher or lacks a solution, PromptTooLong.
        """
        algorithm, rollout = self._config.algorithm, self._config.rollout
        lesson = Lesson(limit=rollout.response_length, ends=engine.stop_token_ids)
        distill = algorithm.distill
        if distill.teachers:
            lesson.name = name = self._teacher_of(problem)
            live = name == LIVE
            lesson.teacher = (
                LivePolicy(engine, distill.teacher_top_k) if live else self._frozen[name]
            )
        if distill.teacher_prompt is not None:
            seen = prompt_ids(tokenizer, teacher_prompt(problem, distill.teacher_prompt))
            if len(seen) >= rollout.prompt_length:  # scoring needs room for one token more
                raise PromptTooLong(
                    f"algorithm.distill.teacher_prompt makes a prompt of {len(seen)} tokens: "
                    f"rollout.prompt_length, {rollout.prompt_length}, must be more"
                )
            lesson.seen = np.asarray(seen, np.int32)
        if algorithm.sft_model is not None:
            lesson.by, lesson.vocabulary = algorithm.sft_model, len(tokenizer)
            ids = prompt_ids(tokenizer, problem.prompt)
            asked = self._frozen[algorithm.sft_model].respond(ids, lesson.limit, seed)
            lesson.given = given = asyncio.ensure_future(asked)
            given.add_done_callback(_looked_at)
        elif algorithm.sft_loss_coef and isinstance(problem.solution, str):
            lesson.given = solved_ids(tokenizer, problem.prompt, problem.solution, lesson.ends)
        return lesson

    def _teacher_of(self, problem: Problem) -> str:
        """Name the only one, or that of the row."""
        first, *others = self._config.algorithm.distill.teachers
        name = problem.teacher if others and problem.teacher is not None else first
        if name not in (first, *others):
            raise FrozenFailed(f"{name} is named by a row, and is no teacher")
        return name


def _looked_at(task: asyncio.Task[list[int]]) -> None:
    """Take an error of a response that nobody waits for any more."""
    with suppress(asyncio.CancelledError):
        task.exception()
