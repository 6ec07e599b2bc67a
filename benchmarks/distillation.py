"""How fast a pretrained model learns from a teacher, without rewards: `python -m
benchmarks.distillation [--teacher runs/taught] [--rows benchmarks/results/distillation.jsonl]
[--docs docs/how-to/distill.md]`.

    teacher   SmolLM2-135M-Instruct learns sums by rewards; its last checkpoint
    students  three seeds each: the model as it came learns from that teacher alone, by its
              log-prob of the sampled token, or by its eight most probable ones

All have the same rate, batch and staleness; nothing is tuned. The gain of the teacher is its
held-out accuracy at the end, above that of the model as it came. What is compared are the learner
steps until 0.9 of that gain, by straight lines between evaluations: of the teacher's own training,
and of each student's. One row per run is appended to the file, so that it can be stopped and
started again.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
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
    until,
    write_docs,
)

TEACHER, STUDENTS = "teacher", {"top 8": 8, "sampled token": 0}
"""Kinds of runs; of students, with `teacher_top_k`."""
SEEDS = {TEACHER: (100,), **dict.fromkeys(STUDENTS, (0, 1, 2))}
STEPS, STUDENT_STEPS = 30, 10
SHARE, AIM = 0.9, 1 / 3
"""Of the teacher's gain, and of its steps."""
TIMEOUT_S = 3_600.0
SAME = ("learner.lr=2e-5", "replay.max_staleness=1", "evaluation.max_samples=100")


def run(kind: str, seed: int, directory: Path, *, teacher: Path) -> dict[str, Any]:
    """Train as a user would; what it reached. teacher: run directory of the teacher."""
    settings = [f"seed={seed}", *SAME, *real_model()]
    if kind == TEACHER:
        settings += [f"run.total_steps={STEPS}", "evaluation.every_steps=3"]
    else:
        [checkpoint] = (teacher / "checkpoints").glob("*/hf")
        distill = f"teacher: teacher, reward_coef: 0.0, teacher_top_k: {STUDENTS[kind]}"
        settings += [
            f"run.total_steps={STUDENT_STEPS}",
            "evaluation.every_steps=1",
            f"frozen={{teacher: {{path: {checkpoint}}}}}",
            f"algorithm.distill={{{distill}}}",
        ]
    command = ["async_grpo.run", f"{REAL_MODEL}/smollm2_sums.yaml", *settings]
    run_logged(
        [sys.executable, "-m", *command, f"run.dir={directory}"],
        directory.with_suffix(".txt"),
        limit_s=TIMEOUT_S,
    )
    lines = json_lines(directory / "metrics.jsonl")
    steps = {int(line["step"]): line for line in lines if "time/step" in line}
    began = steps[1]["time"] - steps[1]["time/step"]
    points = [
        (step, steps[step]["time"] - began if step else 0.0, line["eval/accuracy_greedy"])
        for line in lines
        if "eval/accuracy_greedy" in line
        for step in [int(line["step"])]
    ]
    kl = [line["train/teacher_kl"] for line in steps.values() if "train/teacher_kl" in line]
    said = shlex.join(["python", "-m", *command]).replace(str(Path.home()), "~")
    where = {"command": said, "commit": commit(), "machine": machine()}
    return {"kind": kind, "seed": seed, "points": points, "teacher_kl": kl} | where


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    teachers = [row for row in rows if row["kind"] == TEACHER]
    students = [row for row in rows if row["kind"] != TEACHER]
    if not teachers or not students:
        return ["Not measured yet."]
    first, last = teachers[0]["points"][0][2], teachers[0]["points"][-1][2]
    goal = first + SHARE * (last - first)
    needed = until(teachers[0]["points"], goal, 0)
    lines = [
        f"{teachers[0]['machine'].split(';')[0]}; teacher: {first:.1%} -> {last:.1%} in "
        f"{STEPS} learner steps, {goal:.1%} after {needed:.1f}.",
        "",
        f"| student | before | after {STUDENT_STEPS} steps | the teacher's steps until then | "
        f"{SHARE:g} of the gain after | KL to the teacher, first and last step |",
        "|---|---|---|---|---|---|",
    ]
    took = [until(row["points"], goal, 0) for row in students]
    for row, steps in zip(students, took, strict=True):
        before, after = row["points"][0][2], row["points"][-1][2]
        kl = f"{row['teacher_kl'][0]:.3f}, {row['teacher_kl'][-1]:.3f}"
        when = "never" if steps is None else f"{steps:.1f} steps"
        equal = until(teachers[0]["points"], after, 0)
        theirs = "more than it took" if equal is None else f"{equal:.1f}"
        who = f"{row['kind']}, seed {row['seed']}"
        cells = f"{who} | {before:.1%} | {after:.1%} | {theirs} | {when} | {kl}"
        lines.append(f"| {cells} |")
    aims = []
    for kind in STUDENTS:
        mine = [steps for row, steps in zip(students, took, strict=True) if row["kind"] == kind]
        shares = [steps / needed for steps in mine if steps is not None and needed]
        met = 0 < len(shares) == len(mine) and max(shares) <= AIM
        missed = f", never in {len(mine) - len(shares)}" if len(shares) < len(mine) else ""
        what = f"{SHARE:g} of the gain in at most a third of the teacher's steps, {kind}"
        aims.append(aim(what, (spread(shares) if shares else "-") + missed, met=met))
    return [*lines, "", *aims_table(aims)]


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs that are not there, and show all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distillation")
    default = ROOT / "benchmarks" / "results" / "distillation.jsonl"
    parser.add_argument("--rows", type=Path, default=default, help="one JSON row per run")
    parser.add_argument("--teacher", type=Path, default=ROOT / "runs" / "taught", help="its run")
    parser.add_argument("--docs", type=Path, help="write the table into that page")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments = parser.parse_args(argv)
    done = {(row["kind"], row["seed"]) for row in read_rows(arguments.rows)}
    wanted = [(kind, seed) for kind, seeds in SEEDS.items() for seed in seeds]
    for kind, seed in [] if arguments.table else wanted:
        if (kind, seed) not in done:
            home = arguments.teacher
            student = f"{home.name}-{kind.replace(' ', '-')}-{seed}"
            directory = home if kind == TEACHER else home.with_name(student)
            shutil.rmtree(directory, ignore_errors=True)  # of a run that was stopped
            row = run(kind, seed, directory, teacher=home)
            append(arguments.rows, row)
            print(f"{kind}, seed {seed}: {row['points'][-1][2]:.1%}", flush=True)
    lines = table(read_rows(arguments.rows))
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="distillation")


if __name__ == "__main__":
    quiet()
    main()
