r"""Competition mathematics (MATH): `problem` with `answer`, or with `\boxed{answer}` in `solution`.

Runs in: the driver, the rollout actors and verifier children. Hides the answer format. Reward
`correct`: the response's last `\boxed{...}` equals the reference. A response without a box is
wrong.
"""

from __future__ import annotations

from typing import Any

from async_grpo.config import schema
from async_grpo.tasks import answers
from async_grpo.tasks.base import Problem, Score, parse_options
from async_grpo.tasks.chat import BOXED, PromptOptions
from async_grpo.tasks.data import RowTask, text_of
from async_grpo.tasks.sources import BadRow


class Math(RowTask):
    """MATH-style rows from a data set or a JSONL file."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        super().__init__(settings, seed)
        self._options = parse_options(PromptOptions, settings)

    def problem(self, row: dict[str, Any]) -> Problem:
        """Parse `problem` and `answer` or `solution`; see `RowTask.problem`."""
        question = text_of(row, "problem").strip()
        solution = text_of(row, "solution") if row.get("solution") is not None else None
        reference = answers.boxed(solution or "")
        if row.get("answer") is not None:
            reference = text_of(row, "answer").strip()
        if not reference:
            raise BadRow("no key 'answer' and no \\boxed{} in 'solution'")
        prompt = self._options.prompt(question, system=BOXED)
        return Problem(prompt, reference, solution or f"\\boxed{{{reference}}}")

    def score(self, response: str, reference: Any) -> Score:
        """Compare the last box with the reference."""
        answer = answers.boxed(response)
        correct = float(answer is not None and answers.equal(answer, reference))
        return Score({"correct": correct}, correct)

    def warm_up(self) -> None:
        """Import math-verify."""
        answers.warm_up()
