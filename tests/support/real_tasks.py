"""Tasks for a small pretrained model: rows of sums, an environment of several turns, and a program
around an unmodified `openai` client.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, ClassVar

from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import Problem, Score
from async_grpo.tasks.data import RowTask


def question(number: int) -> tuple[list[dict[str, str]], str]:
    draws = random.Random(number)
    one, other = draws.randint(2, 9), draws.randint(2, 9)
    text = f"What is {one} + {other}? Answer with the number only."
    return [{"role": "user", "content": text}], str(one + other)


def write_rows(path: Path, *, start: int, count: int) -> Path:
    rows = [question(number) for number in range(start, start + count)]
    lines = [json.dumps({"messages": messages, "answer": answer}) for messages, answer in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def share_of_digits(text: str) -> float:
    return sum(letter.isdigit() for letter in text) / (len(text) or 1)


class Rows(RowTask):
    """Rows of sums. Digits are worth something: of a few responses of this model none may be right,
    and equal rewards in every group train nothing.
    """

    weights: ClassVar = {"correct": 1.0, "digits": 0.5}

    def problem(self, row: dict[str, Any]) -> Problem:
        return Problem(row["messages"], reference=row["answer"])

    def score(self, response: str, reference: str) -> Score:
        right = float(reference in response)
        return Score({"correct": right, "digits": share_of_digits(response)}, correct=right)


class Sums:
    """A sum, and another try for who is wrong: messages go through the model's chat template.
    Digits are worth something, so that there is something to learn where no answer is right.
    """

    weights: ClassVar = {"correct": 1.0, "digits": 0.5}
    fingerprint = "sums-2"

    def __init__(self, settings: Any, seed: int) -> None: ...

    def __len__(self) -> int:
        return 64

    def train(self, index: int) -> Problem:
        messages, answer = question(index)
        return Problem(messages, reference=answer)

    def evaluation(self, n: int) -> list[Problem]:
        return [self.train(1000 + index) for index in range(n)]

    def environment(self) -> Tries:
        return Tries()


class Tries:
    def reset(self, reference: str, seed: int) -> Observation:
        self.answer, self.tries = reference, 0
        return Observation()

    def step(self, action: Action) -> Observation:
        self.tries += 1
        # the first word is never taken, so that every episode has a second turn
        right = float(self.tries > 1 and self.answer in action.text)
        if right or self.tries == 3:
            rewards = {"correct": right, "digits": share_of_digits(action.text)}
            return Observation(rewards=rewards, done=True, correct=right)
        return Observation("Are you sure? Answer again.")

    def close(self) -> None: ...


def main() -> None:
    """A program that plays an episode of two turns with the client as it is. Digits are worth
    something here too.
    """
    from openai import OpenAI

    problem, client = json.load(sys.stdin), OpenAI()
    messages, text = list(problem["prompt"]), ""
    for _ in range(2):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [said, {"role": "user", "content": "Are you sure? Answer again."}]
        text = said.content or ""
    right, digits = float(problem["reference"]["answer"] in text), share_of_digits(text)
    print(json.dumps({"rewards": {"correct": right, "digits": digits}, "correct": right}))


if __name__ == "__main__":
    main()
