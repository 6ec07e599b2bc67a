"""Write questions of four kinds that a model of 135 million parameters answers now and then:

    python examples/real_model/make_rows.py [DIRECTORY]     default: runs/real_model

    sums      What is 17 + 25?                    correct: the answer contains 42
    larger    Which number is larger, 37 or 52?   correct: 52, and no other number
    yes_no    Is 37 larger than 52?               correct: begins with no, and does not say yes
    passkey   The pass key is 56993. ...          correct: the answer contains 56993
              What is the pass key?               hidden in about 4,000 tokens of other text

SmolLM2-135M-Instruct samples 5 % of the sums correctly, 9 % of the larger numbers, 19 % of the
yes-or-no questions and 34 % of the pass keys (responses of 16 tokens, temperature 1; chosen before
any training). For every kind KIND.jsonl is trained, and KIND_held_out.jsonl has other questions.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

NUMBER_ONLY = "Answer with the number only."
HELD_OUT, LINES = 100, 125
FILLER = (
    "The road goes on through the hills. The river is cold and clear. "
    "A bird sits on the fence and sings. Nobody is at home today."
)


def sums() -> Iterator[tuple[str, str]]:
    """Give questions, and what the answer contains."""
    for a, b in itertools.product(range(10, 100), repeat=2):
        yield f"What is {a} + {b}? {NUMBER_ONLY}", str(a + b)


def larger() -> Iterator[tuple[str, str]]:
    """Give questions, and a regular expression of the right answer."""
    for a, b in itertools.permutations(range(10, 100), 2):
        yield f"Which number is larger, {a} or {b}? {NUMBER_ONLY}", rf"\A\D*{max(a, b)}\D*\Z"


def yes_no() -> Iterator[tuple[str, str]]:
    """Give questions, and a regular expression of the right answer."""
    for a, b in itertools.permutations(range(10, 100), 2):
        yes, no = ("yes", "no") if a > b else ("no", "yes")
        yield f"Is {a} larger than {b}? Answer yes or no.", rf"(?is)\A\W*{yes}\b(?!.*\b{no}\b)"


def passkey() -> Iterator[tuple[str, str]]:
    """Give long texts with a number in one of their lines, and the number."""
    drawn = random.Random(1)
    for _ in range(4 * HELD_OUT):
        key, line = drawn.randrange(10_000, 100_000), drawn.randrange(LINES + 1)
        lines = [FILLER] * LINES
        lines.insert(line, f"The pass key is {key}. Remember it: {key} is the pass key.")
        yield "\n".join([*lines, f"What is the pass key? {NUMBER_ONLY}"]), str(key)


def main(directory: Path) -> None:
    """Write the rows of every kind, in an order that is the same every time."""
    directory.mkdir(parents=True, exist_ok=True)
    for kind in (sums, larger, yes_no, passkey):
        rows = list(kind())
        random.Random(0).shuffle(rows)
        for name, part in (("", rows[HELD_OUT:]), ("_held_out", rows[:HELD_OUT])):
            lines = [
                json.dumps({"messages": [{"role": "user", "content": text}], "answer": answer})
                for text, answer in part
            ]
            (directory / f"{kind.__name__}{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/real_model"))
