"""Grade-school word problems (GSM8K): `question`, and `answer` ending in `#### 42`.

Runs in: the driver, the rollout actors and verifier children. Hides the answer format. Rewards:
`correct` (the final answer equals the reference) and `format` (the response is exactly a reasoning
block and an answer block), weighted 2.0 and 0.8. Invariant: the two are independent; a right answer
without tags is still right.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from async_grpo.config import schema
from async_grpo.tasks import answers
from async_grpo.tasks.base import Problem, Score, parse_options
from async_grpo.tasks.chat import TAGS, PromptOptions
from async_grpo.tasks.data import RowTask, text_of
from async_grpo.tasks.sources import BadRow

_TAGS_IN_ORDER = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


class Gsm8k(RowTask):
    """GSM8K, or any JSONL file of the same form."""

    weights: ClassVar[dict[str, float]] = {"correct": 2.0, "format": 0.8}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        super().__init__(settings, seed)
        self._options = parse_options(PromptOptions, settings)

    def problem(self, row: dict[str, Any]) -> Problem:
        """Parse `question` and `answer`; see `RowTask.problem`."""
        question, worked = text_of(row, "question").strip(), text_of(row, "answer")
        reasoning, marker, final = worked.rpartition("####")
        reference = answers.last_number(final)
        if not marker or reference is None:
            raise BadRow("'answer' must end in '#### ' and a number")
        # <<48/2=24>> are notes for a calculator, not part of the reasoning.
        reasoning = re.sub(r"<<[^<>]*>>", "", reasoning).strip()
        solution = f"<reasoning>{reasoning}</reasoning>\n<answer>{reference}</answer>"
        return Problem(self._options.prompt(question, system=TAGS), reference, solution)

    def score(self, response: str, reference: Any) -> Score:
        """Score the final answer and the form; see the top of this module."""
        answer = final_answer(response)
        correct = float(answer is not None and answers.equal(answer, reference))
        return Score({"correct": correct, "format": float(has_format(response))}, correct)

    def warm_up(self) -> None:
        """Import math-verify."""
        answers.warm_up()


def final_answer(response: str) -> str | None:
    """Text of the last `<answer>` block (of prose, its last number), else the last number."""
    answer = answers.tagged(response, "answer")
    if answer is None:
        return answers.last_number(response)
    answer = answers.boxed(answer) or answer
    return answer if answers.is_safe(answer) else answers.last_number(answer)


def has_format(response: str) -> bool:
    """Whether the response is only a non-empty `<reasoning>`, then a non-empty `<answer>` block."""
    rest, inside = response, []
    for tag in _TAGS_IN_ORDER:
        before, found, rest = rest.partition(tag)
        if not found or tag in rest:
            return False
        inside.append(before.strip())
    before, reasoning, between, answer = inside
    return bool(reasoning and answer) and not (before or between or rest.strip())
