"""Answers held-out problems, and gives the probe responses that compare engine and learner.

Runs in: rollout actors, whose engine may generate training groups at the same time. Hides how many
requests run at once, which prompts are probes, and that `evaluation.task` starts with the first
evaluation.

Invariant: every answer comes whole from the weights that the caller names, or the call fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_grpo.algo.accuracy import ProblemOutcome
from async_grpo.config.schema import Config, RolloutConfig
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.base import Completion, Engine, EngineError, Sampling
from async_grpo.rollout.episodes import Episode, PromptTooLong
from async_grpo.rollout.players import Player
from async_grpo.rollout.posed import PosedTask
from async_grpo.runtime.text import dialogue
from async_grpo.tasks.base import Problem, Problems, Score, Task
from async_grpo.tasks.registry import create_task
from async_grpo.tasks.verifier import VerifierError


@dataclass(frozen=True, slots=True)
class _Answer:
    """Responses to one problem, the greedy one first; none, with the error, for a long prompt."""

    texts: list[str]
    lengths: list[int]
    refused: PromptTooLong | None = None


class EngineEvaluator:
    """Answers the held-out problems of a run."""

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        task: Problems,
        posed: Mapping[str, PosedTask],
        pose: Callable[[Config, Task], PosedTask],
        encode: Callable[[Problem], list[int]],
        text: Callable[[Completion], str],
    ) -> None:
        """task, posed: of training. pose: another task. encode: or PromptTooLong."""
        self._config, self._engine = config, engine
        self._encode, self._text = encode, text
        self._task, self._posed = task, posed
        if config.evaluation.task is not None:
            other = create_task(config.evaluated_task, config.seed)
            own = config.unchecked_copy(update={"task": config.evaluated_task, "tasks": {}})
            self._task, self._posed = other, {"": pose(own, other)}

    async def answer(
        self, *, indices: Sequence[int], total: int, label: str, samples: int
    ) -> tuple[list[ProblemOutcome], list[dict[str, Any]]]:
        """Outcomes of these held-out problems (of the first `total`) from the weights `label`, and
        `samples` greedy responses. A long prompt or an unscored response is an error and counts as
        wrong.

        Raises EngineError for a response that other weights have sampled.
        """
        problems = await asyncio.to_thread(self._task.evaluation, total)  # may read data
        n = self._config.evaluation.n
        # so few that training groups come soon after
        slots = asyncio.Semaphore(max(1, 2 * self._engine.max_num_seqs // (n + 1)))
        judged = await asyncio.gather(
            *[self._one(problems[index], index, label, slots) for index in indices]
        )
        shown = list(zip(indices, judged, strict=True))[:samples]
        rows = [_row(problems[index], *one) for index, one in shown]
        outcomes = [
            _outcome(answer, results, n=n, task=problems[index].task)
            for index, (answer, results) in zip(indices, judged, strict=True)
        ]
        return outcomes, rows

    async def close(self) -> None:
        """Stop the verifiers of `evaluation.task`."""
        if self._config.evaluation.task is not None:
            await self._posed[""].close()

    async def _one(
        self, problem: Problem, index: int, label: str, slots: asyncio.Semaphore
    ) -> tuple[_Answer, list[Score | VerifierError]]:
        """Answer and score a problem, inside one slot: training groups need the verifiers too."""
        posed = self._posed[problem.task]
        await posed.start()
        evaluation, rollout = self._config.evaluation, posed.config.rollout
        greedy = Sampling(
            n=1,
            max_tokens=rollout.response_length,
            temperature=0.0,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            repetition=rollout.repetition,
        )
        temperature = evaluation.temperature or rollout.temperature
        sampled = replace(greedy, n=evaluation.n, temperature=temperature)
        async with slots:
            if posed.player is not None:
                wanted = [greedy, *[replace(sampled, n=1)] * sampled.n]
                return await self._played(posed.player, problem, wanted, index, label)
            try:
                prompt = self._encode(problem)
            except PromptTooLong as error:
                return _Answer([], [], error), []
            answers = await asyncio.gather(
                *[
                    self._engine.generate(prompt, sampling, purpose="evaluated")
                    for sampling in (greedy, sampled)
                    if sampling.n
                ]
            )
            responses = [completion for answer in answers for completion in answer]
            _check_labels({one for done in responses for one, _, _ in done.labels}, label)
            answer = _Answer(
                [self._text(completion) for completion in responses],
                [len(completion.token_ids) for completion in responses],
            )
            return answer, await posed.verifiers.score_many(
                [(text, problem.reference) for text in answer.texts]
            )

    async def _played(
        self, player: Player, problem: Problem, wanted: Sequence[Sampling], index: int, label: str
    ) -> tuple[_Answer, list[Score | VerifierError]]:
        """Play a problem's episodes; an environment that fails is an error like a verifier's."""

        async def one(sampling: Sampling) -> Episode | EnvironmentFailed | PromptTooLong:
            try:
                return await player.play(problem, sampling, seed=index, purpose="evaluated")
            except (EnvironmentFailed, PromptTooLong) as error:
                return error

        played = await asyncio.gather(*[one(sampling) for sampling in wanted])
        refused = next((each for each in played if isinstance(each, PromptTooLong)), None)
        if refused is not None:
            return _Answer([], [], refused), []
        answer = _Answer([], [])
        results: list[Score | VerifierError] = []
        for each in played:
            if isinstance(each, Episode):
                _check_labels(each.labels, label)
                results.append(Score(dict(each.rewards), each.verdict))
                answer.texts.append(dialogue(each.said))
                answer.lengths.append(each.session.sampled)
            elif isinstance(each, EnvironmentFailed):
                results.append(VerifierError(each.reason, str(each)))
                answer.texts.append("")
                answer.lengths.append(0)
        return answer, results


def _check_labels(labels: set[str], label: str) -> None:
    if others := labels - {label}:
        raise EngineError(
            f"the evaluation of {label} got tokens that {', '.join(sorted(others))} has sampled"
        )


def _outcome(
    answer: _Answer, results: list[Score | VerifierError], *, n: int, task: str
) -> ProblemOutcome:
    if answer.refused is not None:
        return ProblemOutcome(
            greedy=False,
            right=0,
            judged=0,
            errors=1 + n,
            greedy_tokens=0,
            sampled_tokens=0,
            task=task,
        )
    verdicts = [result.correct if isinstance(result, Score) else None for result in results]
    right = [verdict is not None and verdict >= 1.0 for verdict in verdicts]
    return ProblemOutcome(
        greedy=right[0],
        right=sum(right[1:]),
        judged=sum(verdict is not None for verdict in verdicts),
        errors=sum(isinstance(result, VerifierError) for result in results),
        greedy_tokens=answer.lengths[0],
        sampled_tokens=sum(answer.lengths[1:]),
        task=task,
    )


def _row(problem: Problem, answer: _Answer, results: list[Score | VerifierError]) -> dict[str, Any]:
    """Return the greedy response, for the sample table."""
    if answer.refused is not None:
        return {"prompt": problem.prompt, "response": "", "tokens": 0, "error": str(answer.refused)}
    result = results[0]
    row = {"prompt": problem.prompt, "response": answer.texts[0], "tokens": answer.lengths[0]}
    if isinstance(result, Score):
        return row | {"rewards": result.rewards, "correct": result.correct}
    return row | {"error": str(result)}


PROMPTS, CANDIDATES, TOKENS = 16, 64, 32
PROMPT_TOKENS = 16_384
"""With so many tokens, prompts of `probe_sequences` are enough: they are computed several times."""


async def probe_sequences(
    engine: Engine, task: Problems, encode: Callable[[Problem], list[int]], rollout: RolloutConfig
) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Return a few short responses as (prompt, response, log-probs [L] at the training
    temperature). They go on behind an end, so that a model that ends at once shows something, too.
    """
    # to score a row, the engine generates one more token, for which the longest one has no room
    room = rollout.longest_row - 1
    limit, refused = min(rollout.response_length, TOKENS), "there is no room for an answer"
    prompts = []
    for problem in map(task.train, range(min(CANDIDATES, len(task)))):
        try:
            prompt = encode(problem)
        except PromptTooLong as error:
            refused = str(error)
            continue
        if len(prompt) < room:
            prompts.append(prompt)
        if len(prompts) == PROMPTS or sum(map(len, prompts)) >= PROMPT_TOKENS:
            break
    if not prompts:
        raise SetupError(
            f"none of the first problems fits: {refused}; raise rollout.prompt_length, or "
            "use shorter prompts"
        )
    samplings = [
        Sampling(
            n=1,
            max_tokens=min(limit, room - len(prompt)),
            temperature=rollout.temperature,
            seed=1,
            ignore_eos=True,
        )
        for prompt in prompts
    ]
    answers = await asyncio.gather(
        *[
            engine.generate(prompt, sampling, purpose="probes")
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    )
    return [
        (prompt, answer.token_ids.tolist(), answer.logprobs)
        for prompt, [answer] in zip(prompts, answers, strict=True)
    ]
