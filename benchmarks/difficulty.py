"""What is saved where problems are posed by their pass rates: `python -m benchmarks.difficulty
[tiny] [real] [--rows benchmarks/results/difficulty.jsonl] [--docs docs/explanation/benchmarks.md]`.

    tiny      the quickstart's model, after a part of its training. What it says to others tells
              which problems are solved (all of 8 responses right) and which are not (1 to 4 right):
              training has as many of both, held out are others not solved
    real      SmolLM2-135M-Instruct: as many sums of one digit as of two, held out are others; only
              *all* and *measured*
    rates     of these problems, by one pass of that model over them without learning
    runs      five seeds of each arm, in an order that alternates: every problem in turn, and
              `replay.difficulty.choose` window, gaussian and bandit, everything else by default;
              *measured* is window that begins with those rates

Compared are the response tokens trained until the accuracy that posing all reaches in the mean of
its last three evaluations, of the same seed. Nothing is tuned. One row per run is appended to the
file, so that it can be stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    aim,
    aims_table,
    append,
    commit,
    json_lines,
    machine,
    quiet,
    read_rows,
    real_model,
    run_logged,
    spread,
    until,
    write_docs,
)

SEEDS, AIM = 5, 0.7
STILL = "learner.lr=1e-12"
BEFORE, MEASURED = 80, 80
"""Steps of the tiny model, and of the measurement that tells which problems it has solved."""
SOLVED, UNSOLVED, HELD_OUT = 100, 100, 200
SUMS = {1: (30, 15), 2: (30, 49)}
"""By digits: sums to train, and held out."""


@dataclass(frozen=True)
class Workload:
    """A recipe with what all runs have, their length, and what is compared. groups: of a step."""

    recipe: str
    same: tuple[str, ...]
    groups: int
    steps: int
    every: int
    arms: tuple[str, ...]


WORKLOADS = {
    "tiny": Workload(
        "configs/quickstart.yaml",
        ("model.warm_start=null", "rollout.rollout_batch_size=16", "learner.lr=1e-4"),
        groups=16,
        steps=75,
        every=5,
        arms=("all", "window", "gaussian", "bandit", "measured"),
    ),
    "real": Workload(
        "examples/real_model/smollm2_sums.yaml",
        ("learner.lr=2e-5",),
        groups=8,
        steps=12,
        every=3,
        arms=("all", "measured"),
    ),
}


def train(workload: Workload, directory: Path, *settings: str) -> list[str]:
    """Train as a user would; the command."""
    command = ["async_grpo.run", str(ROOT / workload.recipe), *settings]
    run_logged(
        [sys.executable, "-m", *command, f"run.dir={directory}"],
        directory.with_suffix(".txt"),
        limit_s=1_800.0,
    )
    return command


def prepare(name: str, folder: Path) -> tuple[str, ...]:
    """Make model and problems, and measure their rates; the settings that name them."""
    workload = WORKLOADS[name]
    prepared, problems = (tiny if name == "tiny" else real)(workload, folder)
    train(
        workload,
        folder / "rates",
        *workload.same,
        *prepared,
        STILL,
        f"run.total_steps={-(-problems // workload.groups)}",
        "evaluation={before: false, every_steps: 0}",
        "replay.difficulty={choose: window, width: 1.0}",  # which is all
    )
    return prepared


def real(_: Workload, folder: Path) -> tuple[tuple[str, ...], int]:
    """Take the real model, and sums of one and of two digits; how many to train."""
    kinds: dict[str, list[str]] = {"train": [], "eval": []}
    for digits, (count, held_out) in SUMS.items():
        numbers = range(10 ** (digits - 1), 10**digits)
        pairs = list(itertools.combinations_with_replacement(numbers, 2))
        chosen = random.Random(digits).sample(pairs, count + held_out)
        for kind, some in (("train", chosen[:count]), ("eval", chosen[count:])):
            for a, b in some:
                text = f"What is {a} + {b}? Answer with the number only."
                said = [{"role": "user", "content": text}]
                answer = rf"(?<!\d){a + b}(?!\d)"
                kinds[kind].append(json.dumps({"messages": said, "answer": answer}))
    for kind, rows in kinds.items():
        (folder / f"{kind}.jsonl").write_text("\n".join(rows))
    data = f"train: {folder}/train.jsonl, eval: {folder}/eval.jsonl, options: {{match: regex}}"
    problems = sum(count for count, _ in SUMS.values())
    return (*real_model(), f"task={{name: jsonl, {data}}}"), problems


def tiny(workload: Workload, folder: Path) -> tuple[tuple[str, ...], int]:
    """Make a model that has solved some problems; how many to train."""
    from transformers import AutoTokenizer

    from async_grpo.replay.history import read_history
    from async_grpo.wire.codec import decode_group

    train(
        workload,
        folder / "model",
        f"run.total_steps={BEFORE}",
        "seed=50",
        "evaluation.every_steps=0",
    )
    [model] = map(str, (folder / "model" / "checkpoints").glob("*/hf"))
    train(
        workload,
        folder / "measure",
        "model.warm_start=null",
        f"model.path={model}",
        f"run.total_steps={MEASURED}",
        "seed=51",
        STILL,
        "checkpoint={every_steps: 20, keep: 10}",  # else the journal's beginning goes
        "evaluation.every_steps=0",
    )
    history, words = (
        read_history(folder / "measure" / "journal"),
        AutoTokenizer.from_pretrained(model),
    )
    rates: dict[str, int] = {}
    for group_id in sorted(one for step in history.steps.values() for one in step):
        group = decode_group(history.frame(group_id))
        prompt = words.decode(group.prompts[0], skip_special_tokens=True)
        rates[prompt] = sum(row.verdict == 1.0 for row in group.rows)
    solved = [prompt for prompt, right in rates.items() if right == 8][:SOLVED]
    others = [prompt for prompt, right in rates.items() if 1 <= right <= 4]
    kinds = {"train": [*solved, *others[:UNSOLVED]], "eval": others[UNSOLVED : UNSOLVED + HELD_OUT]}
    if len(kinds["train"]) < SOLVED + UNSOLVED or len(kinds["eval"]) < HELD_OUT:
        raise RuntimeError(f"{len(solved)} solved, {len(others)} others: too few")
    for name, prompts in kinds.items():
        rows = [{"prompt": one, "answer": answer(one)} for one in prompts]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = f"{{name: jsonl, train: {folder}/train.jsonl, eval: {folder}/eval.jsonl}}"
    return (f"model.path={model}", f"task={data}"), SOLVED + UNSOLVED


def answer(prompt: str) -> str:
    """The digits of the sum in reverse, as the quickstart's task wants them."""
    one, other = prompt.removesuffix("=").split("+")
    return str(int(one) + int(other))[::-1]


def run(name: str, arm: str, seed: int, directory: Path, prepared: Sequence[str]) -> dict[str, Any]:
    """Train one arm; points of (step, tokens trained, held-out accuracy)."""
    workload = WORKLOADS[name]
    command = train(
        workload,
        directory,
        *workload.same,
        *prepared,
        f"seed={seed}",
        f"run.total_steps={workload.steps}",
        f"evaluation.every_steps={workload.every}",
        *(
            [f"replay.difficulty={{choose: window, rates_from: {directory.parent}/rates}}"]
            if arm == "measured"
            else [f"replay.difficulty.choose={arm}"]
        ),
    )
    lines = json_lines(directory / "metrics.jsonl")
    tokens, points = 0.0, []
    for line in sorted(lines, key=lambda line: (line["step"], "eval/accuracy_greedy" in line)):
        tokens += line.get("rollout/response_tokens", 0.0)
        if "eval/accuracy_greedy" in line:
            points.append((int(line["step"]), tokens, line["eval/accuracy_greedy"]))
    said = shlex.join(["python", "-m", *command]).replace(f"{ROOT}/", "")
    where = {"command": said.replace(str(directory.parent), "DIR"), "commit": commit()}
    facts = {"workload": name, "arm": arm, "seed": seed, "points": points}
    return {**facts, **where, "machine": machine()}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    lines = [
        f"{rows[0]['machine'].split(';')[0]}." if rows else "Not measured yet.",
        "",
        "| | posed | seeds | accuracy before | at the end | tokens until as accurate as with all |",
        "|---|---|---|---|---|---|",
    ]
    aims = []
    for name, workload in WORKLOADS.items():
        found = {
            (row["arm"], row["seed"]): row["points"] for row in rows if row["workload"] == name
        }
        seeds = [n for n in range(SEEDS) if all((arm, n) in found for arm in workload.arms)]
        if not seeds:
            continue
        goals = {seed: statistics.mean(one[2] for one in found["all", seed][-3:]) for seed in seeds}
        for arm in workload.arms:
            ends = [statistics.mean(one[2] for one in found[arm, seed][-3:]) for seed in seeds]
            took = [
                [until(found[one, seed], goals[seed], 1) for one in (arm, "all")] for seed in seeds
            ]
            ratios = [mine / theirs for mine, theirs in took if mine is not None and theirs]
            never = sum(mine is None for mine, _ in took)
            missed = f", never in {never}" if never else ""
            before = statistics.mean(found[arm, seed][0][2] for seed in seeds)
            said = (spread(ratios) if ratios else "-") + missed
            facts = f"{before:.1%} | {statistics.mean(ends):.1%} | {said}"
            lines.append(f"| {name} | {arm} | {len(seeds)} | {facts} |")
            if arm != "all":
                met = not missed and bool(ratios) and statistics.median(ratios) <= AIM
                aims.append(aim(f"at most {AIM} of the tokens, {name}, {arm}", said, met=met))
    return [*lines, "", *aims_table(aims)]


def _workload(name: str) -> str:
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(WORKLOADS)}")
    return name


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs that are not there, and show all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.difficulty")
    default = ROOT / "benchmarks" / "results" / "difficulty.jsonl"
    known = ", ".join(WORKLOADS)
    parser.add_argument("workloads", nargs="*", type=_workload, help=known, metavar="WORKLOAD")
    parser.add_argument("--rows", type=Path, default=default, help="one JSON row per run")
    parser.add_argument("--docs", type=Path, help="write the table into that page")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments = parser.parse_args(argv)
    done = {(row["workload"], row["arm"], row["seed"]) for row in read_rows(arguments.rows)}
    for name in () if arguments.table else arguments.workloads or WORKLOADS:
        arms = sorted(WORKLOADS[name].arms)
        wanted = [(arm, n) for n in range(SEEDS) for arm in (arms[::-1] if n % 2 else arms)]
        left = [one for one in wanted if (name, *one) not in done]
        with tempfile.TemporaryDirectory(prefix="difficulty-") as folder:
            prepared = prepare(name, Path(folder)) if left else ()
            for arm, seed in left:
                row = run(name, arm, seed, Path(folder) / f"{arm}-{seed}", prepared)
                append(arguments.rows, row)
                print(f"{name}, {arm}, seed {seed}: {row['points'][-1][2]:.1%}", flush=True)
    lines = table(read_rows(arguments.rows))
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="difficulty")


if __name__ == "__main__":
    quiet()
    main()
