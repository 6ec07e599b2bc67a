"""What a frozen model costs the rollouts that ask it: `python -m benchmarks.frozen [--rounds 3]
[--rows FILE] [--docs docs/how-to/distill.md]`.

    none      SmolLM2-135M-Instruct samples one large batch of sums, nothing else runs
    teacher   a frozen model of the same weights gives the log-prob of every sampled token
    judge     a frozen model of the same weights grades every response, in the form of a schema

One run of each in turn, in rounds, on the same cores, `max_staleness` 0: `time/wait` of its only
step is what the batch took, while the learner has nothing to do. Compared are groups per second
with over without, round by round. One row per run is appended to the file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    REAL_MODEL,
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
    write_docs,
)

GROUPS, AIM = 32, 0.45
TIMEOUT_S = 1_200.0


def asked(kind: str, model: str) -> list[str]:
    """Settings of an arm. model: the policy's."""
    frozen = f"frozen={{other: {{path: {model}, context_length: 1024}}}}"
    return {
        "none": [],
        "teacher": [frozen, "algorithm.distill={teacher: other}"],
        "judge": [
            frozen,
            "task.judges={quality: {model: other, criteria: [right], max_tokens: 64}}",
        ],
    }[kind]


def run(kind: str, round_: int, directory: Path, *, model: str) -> dict[str, Any]:
    """Sample one batch as a run does."""
    settings = [
        *(f"model.path={model}", f"seed={round_}", "run.total_steps=1", "replay.max_staleness=0"),
        *(f"rollout.rollout_batch_size={GROUPS}", "evaluation={before: false, every_steps: 0}"),
        *asked(kind, model),
    ]
    command = ["async_grpo.run", f"{REAL_MODEL}/smollm2_sums.yaml", *settings]
    run_logged(
        [sys.executable, "-m", *command, f"run.dir={directory}"],
        directory.with_suffix(".txt"),
        limit_s=TIMEOUT_S,
    )
    [step] = [line for line in json_lines(directory / "metrics.jsonl") if "time/wait" in line]
    said = shlex.join(["python", "-m", *command]).replace(str(Path.home()), "~")
    figures = {"wait": step["time/wait"], "tokens": step["rollout/response_length"]}
    where = {"command": said, "commit": commit(), "machine": machine()}
    return {"kind": kind, "round": round_} | figures | where


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    waits = {(row["kind"], row["round"]): row["wait"] for row in rows}
    rounds = sorted(number for kind, number in waits if kind == "none")
    kinds = [kind for kind in ("teacher", "judge") if (kind, rounds[-1]) in waits]
    lines = [
        f"{rows[0]['machine'].split(';')[0]}; {GROUPS} groups of 8 responses.",
        "",
        "| asked | seconds of the batch | groups per second, with over without |",
        "|---|---|---|",
    ]
    ratios = {
        kind: [waits["none", one] / waits[kind, one] for one in rounds] for kind in ("none", *kinds)
    }
    for kind, found in ratios.items():
        seconds = spread([waits[kind, one] for one in rounds], ".1f")
        lines.append(f"| {kind} | {seconds} | {'' if kind == 'none' else spread(found)} |")
    met = min(ratios["teacher"]) >= AIM
    what = f"{AIM:g} of the groups per second with a teacher of the policy's size"
    return [*lines, "", *aims_table([aim(what, spread(ratios["teacher"]), met=met)])]


def main(argv: Sequence[str] | None = None) -> None:
    """Do the rounds that are not there, and show all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frozen")
    default = ROOT / "benchmarks" / "results" / "frozen.jsonl"
    parser.add_argument("--rows", type=Path, default=default, help="one JSON row per run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--docs", type=Path, help="write the table into that page")
    arguments = parser.parse_args(argv)
    done = {(row["kind"], row["round"]) for row in read_rows(arguments.rows)}
    [named] = real_model()
    model = named.removeprefix("model.path=")
    for number in range(arguments.rounds):
        for kind in ("none", "teacher", "judge"):
            if (kind, number) not in done:
                with tempfile.TemporaryDirectory(prefix="frozen-") as home:
                    row = run(kind, number, Path(home) / "run", model=model)
                append(arguments.rows, row)
                print(f"round {number}, {kind}: {row['wait']:.1f} s", flush=True)
    lines = table(read_rows(arguments.rows))
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="frozen")


if __name__ == "__main__":
    quiet()
    main()
