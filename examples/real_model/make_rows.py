"""Write questions of four kinds that a model of 135 million parameters answers now and then:

    python examples/real_model/make_rows.py [DIRECTORY]     default: runs/real_model

    sums      What is 17 + 25?                    correct: the answer contains 42
    larger    Which number is larger, 37 or 52?   correct: 52, and no other number
    yes_no    Is 37 larger than 52?               correct: begins with no, and does not say yes
    stations  Station 417 reports 38. ...         correct: 38, and no other number
              What does station 417 report?       behind 320 lines, about 4,000 tokens

SmolLM2-135M-Instruct samples 5 % of the sums correctly, 9 % of the larger numbers and 19 % of the
yes-or-no questions (responses of 16 tokens, temperature 1; chosen before any training). For every
kind KIND.jsonl is trained, and KIND_held_out.jsonl has other questions.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

NUMBER_ONLY = "Answer with the number only."
HELD_OUT, LINES = 100, 320


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


def stations() -> Iterator[tuple[str, str]]:
    """Give long reports with a question about one line, and a regular expression of the answer."""
    drawn = random.Random(1)
    for _ in range(4 * HELD_OUT):
        reports = {one: drawn.randrange(10, 100) for one in drawn.sample(range(100, 1_000), LINES)}
        lines = [f"Station {one} reports {value}." for one, value in reports.items()]
        asked = drawn.choice(list(reports))
        question = f"What does station {asked} report? {NUMBER_ONLY}"
        yield "\n".join([*lines, question]), rf"\A\D*{reports[asked]}\D*\Z"


def main(directory: Path) -> None:
    """Write the rows of every kind, in an order that is the same every time."""
    directory.mkdir(parents=True, exist_ok=True)
    for kind in (sums, larger, yes_no, stations):
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
