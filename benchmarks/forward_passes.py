"""What the learner's forward passes cost against packed rows: `python -m benchmarks.forward_passes
[--turns 7] [--smoke] [--docs FILE]`.

One model, of the passes' common kind, so that all of them compute the same log-probs: the passes
take turns on the same rows, forward and backward, with one thread in float32. Two kinds of rows:
prompts longer than their responses, which packed rows compute once for a group, and short prompts.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from async_grpo.learner.forward_choice import PASSES
from async_grpo.learner.model import ForwardPass, PolicyModel
from async_grpo.learner.packing import Packed, PackedRow, pack, response_row
from benchmarks.machine import machine
from benchmarks.tables import spread, write_docs
from benchmarks.tails import MODELS, TailModel

GROUP = 8
SHAPES = {"128 of prompt, 64 of response": (128, 64), "16 of prompt, 128 of response": (16, 128)}
"""Tokens, where responses have half to all of theirs."""
HEADER = [
    "| rows of a group | attention | head | tokens computed | seconds, of packed |",
    "|---|---|---|---|---|",
]


def group_of(prompt: int, response: int, *, vocabulary: int) -> list[PackedRow]:
    """The rows of a group."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, vocabulary, prompt)
    lengths = draw.integers(response // 2, response + 1, GROUP)
    return [response_row(ids, draw.integers(3, vocabulary, length)) for length in lengths]


def seconds(policy: PolicyModel, one: ForwardPass, packed: Packed) -> float:
    """Of the log-probs and their gradients."""
    policy.use(one)
    policy.zero_grad()
    started = time.perf_counter()
    policy(packed, 1.0, False)[0].sum().backward()
    return time.perf_counter() - started


def table(model: TailModel, *, turns: int) -> list[str]:
    """Lines of the table."""
    torch.manual_seed(0)
    policy = PolicyModel(model.build(), float32_head=False).train()
    lines = list(HEADER)
    for name, (prompt, response) in SHAPES.items():
        rows = group_of(prompt, response, vocabulary=model.vocabulary)
        packed = pack(rows, torch.device("cpu"))
        shared = prompt + sum(len(row[1]) for row in rows)
        apart = sum(len(row[0]) + len(row[1]) for row in rows)
        ratios: dict[ForwardPass, list[float]] = {one: [] for one in PASSES}
        for turn in range(turns + 1):
            found = {one: seconds(policy, one, packed) for one in (*PASSES, PASSES[0])}
            if turn:  # the first one allocates
                for one in PASSES:
                    ratios[one].append(found[one] / found[PASSES[0]])
        for one in PASSES[1:]:
            tokens = shared if one.rows == "packed" else apart
            lines.append(
                f"| {one.rows}: {name} | {one.attention} | {one.head} | {tokens / shared:.2f} | "
                f"{spread(ratios[one])} |"
            )
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward_passes")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="shows that it runs, not how fast")
    parser.add_argument("--docs", type=Path, help="a file whose table between markers is replaced")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = MODELS["14M"]
    if arguments.smoke:
        model = replace(model, hidden=64, layers=2)
    lines = [
        machine("torch", "transformers"),
        "",
        *table(model, turns=1 if arguments.smoke else arguments.turns),
    ]
    print("\n".join(lines))
    if arguments.docs:
        write_docs(arguments.docs, ["", *lines, ""], benchmark="forward_passes")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
