"""Steps per second of `for result in trainer.steps(n)` and of `trainer.train(n)`, which is the same
loop, and of `n` calls of `trainer.train(1)`, each of which waits for its publication.

    python -m benchmarks.library_steps

Pieces of one run of the recipe `quickstart`, in turn: ratios to `train(n)` by pairs.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from async_grpo import Trainer, load_config
from async_grpo.observe.console.console import Console

WARM_UP = 20


def whole(trainer: Trainer, steps: int) -> None:
    """Train in one call."""
    trainer.train(steps)


def iterated(trainer: Trainer, steps: int) -> None:
    """Look at each result."""
    for result in trainer.steps(steps):
        assert result["train/loss"] is not None


def single(trainer: Trainer, steps: int) -> None:
    """Train a step per call."""
    for _ in range(steps):
        trainer.train(1)


WAYS: dict[str, Callable[[Trainer, int], None]] = {
    "train(n)": whole,
    "steps(n)": iterated,
    "n x train(1)": single,
}


def rates(directory: Path, *, steps: int, rounds: int) -> dict[str, list[float]]:
    """Steps per second of every way, by round, in an order that turns."""
    total = WARM_UP + rounds * steps * len(WAYS)
    settings = [
        f"run={{dir: {directory}/run, total_steps: {total + 1}}}",
        "evaluation.before=false",
        "checkpoint.every_steps=0",
        "tracking={mlflow: false, report: false}",
    ]
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    names = list(WAYS)
    with Trainer(load_config("quickstart", settings), console=Console(io.StringIO())) as trainer:
        trainer.train(WARM_UP)
        for number in range(rounds):
            turned = names[number % len(names) :] + names[: number % len(names)]
            for name in turned:
                began = time.monotonic()
                WAYS[name](trainer, steps)
                found[name].append(steps / (time.monotonic() - began))
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=16, help="learner steps per piece")
    parser.add_argument("--rounds", type=int, default=9, help="pieces of every way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = rates(Path(directory), steps=arguments.steps, rounds=arguments.rounds)
    print("| way | steps/s | to train(n) |\n|---|---|---|")
    for name, values in found.items():
        ratios = [one / base for one, base in zip(values, found["train(n)"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"| `{name}` | {statistics.median(values):.2f} | {statistics.median(ratios):.2f} "
            f"({low:.2f} to {high:.2f}) |"
        )


if __name__ == "__main__":
    main()
