"""What is saved where problems are posed by their pass rates: `python -m benchmarks.difficulty
[--rows benchmarks/results/difficulty.jsonl] [--docs docs/explanation/benchmarks.md]`.

    model     the quickstart's, after a part of its training
    problems  what it says to others tells which are solved (all of 8 responses right) and which are
              not (1 to 4 right): training has as many of both, held out are others not solved
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
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
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
    run_logged,
    spread,
    until,
    write_docs,
)

ARMS, SEEDS = ("all", "window", "gaussian", "bandit", "measured"), 5
BEFORE, MEASURED, STEPS = 80, 80, 75
"""Steps of the model, of the measurement and of a run."""
SOLVED, UNSOLVED, HELD_OUT = 100, 100, 200
AIM = 0.7
STILL = "learner.lr=1e-12"
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SAME = ("model.warm_start=null", "rollout.rollout_batch_size=16", "learner.lr=1e-4")


def train(directory: Path, *settings: str) -> list[str]:
    """Train as a user would; the command."""
    command = ["async_grpo.run", QUICKSTART, *settings]
    run_logged(
        [sys.executable, "-m", *command, f"run.dir={directory}"],
        directory.with_suffix(".txt"),
        limit_s=1_800.0,
    )
    return command


def prepare(folder: Path) -> tuple[str, ...]:
    """Make model and problems; the settings that name them."""
    from transformers import AutoTokenizer

    from async_grpo.replay.history import read_history
    from async_grpo.wire.codec import decode_group

    train(folder / "model", f"run.total_steps={BEFORE}", "seed=50", "evaluation.every_steps=0")
    [model] = map(str, (folder / "model" / "checkpoints").glob("*/hf"))
    train(
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
    prepared = (f"model.path={model}", f"task={data}")
    train(
        folder / "rates",
        *SAME,
        *prepared,
        STILL,
        f"run.total_steps={-(-(SOLVED + UNSOLVED) // 16)}",
        "evaluation.every_steps=0",
        "replay.difficulty={choose: window, width: 1.0}",  # which is all
    )
    return prepared


def answer(prompt: str) -> str:
    """The digits of the sum in reverse, as the quickstart's task wants them."""
    one, other = prompt.removesuffix("=").split("+")
    return str(int(one) + int(other))[::-1]


def run(arm: str, seed: int, directory: Path, prepared: Sequence[str]) -> dict[str, Any]:
    """Train one arm; points of (step, tokens trained, held-out accuracy)."""
    command = train(
        directory,
        *SAME,
        *prepared,
        f"seed={seed}",
        f"run.total_steps={STEPS}",
        "evaluation.every_steps=5",
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
    return {"arm": arm, "seed": seed, "points": points, **where, "machine": machine()}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    found = {(row["arm"], row["seed"]): row["points"] for row in rows}
    seeds = [seed for seed in range(SEEDS) if all((arm, seed) in found for arm in ARMS)]
    if not seeds:
        return ["Not measured yet."]
    goals = {seed: statistics.mean(one[2] for one in found["all", seed][-3:]) for seed in seeds}
    lines = [
        f"{rows[0]['machine'].split(';')[0]}; {len(seeds)} seeds, {STEPS} steps of 16 x 8.",
        "",
        "| posed | accuracy before | at the end | tokens until as accurate as with all |",
        "|---|---|---|---|",
    ]
    aims = []
    for arm in ARMS:
        ends = [statistics.mean(one[2] for one in found[arm, seed][-3:]) for seed in seeds]
        took = [
            [until(found[name, seed], goals[seed], 1) for name in (arm, "all")] for seed in seeds
        ]
        ratios = [mine / theirs for mine, theirs in took if mine is not None and theirs]
        missed = f", never in {len(seeds) - len(ratios)}" if len(ratios) < len(seeds) else ""
        before = statistics.mean(found[arm, seed][0][2] for seed in seeds)
        said = (spread(ratios) if ratios else "-") + missed
        lines.append(f"| {arm} | {before:.1%} | {statistics.mean(ends):.1%} | {said} |")
        if arm != "all":
            met = not missed and statistics.median(ratios) <= AIM
            aims.append(aim(f"at most {AIM} of the tokens, {arm}", said, met=met))
    return [*lines, "", *aims_table(aims)]


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs that are not there, and show all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.difficulty")
    default = ROOT / "benchmarks" / "results" / "difficulty.jsonl"
    parser.add_argument("--rows", type=Path, default=default, help="one JSON row per run")
    parser.add_argument("--docs", type=Path, help="write the table into that page")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments = parser.parse_args(argv)
    done = {(row["arm"], row["seed"]) for row in read_rows(arguments.rows)}
    wanted = [(arm, seed) for seed in range(SEEDS) for arm in sorted(ARMS, reverse=seed % 2 > 0)]
    left = [] if arguments.table else [one for one in wanted if one not in done]
    with tempfile.TemporaryDirectory(prefix="difficulty-") as folder:
        prepared = prepare(Path(folder)) if left else ()
        for arm, seed in left:
            row = run(arm, seed, Path(folder) / f"{arm}-{seed}", prepared)
            append(arguments.rows, row)
            print(f"{arm}, seed {seed}: {row['points'][-1][2]:.1%}", flush=True)
    lines = table(read_rows(arguments.rows))
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="difficulty")


if __name__ == "__main__":
    quiet()
    main()
