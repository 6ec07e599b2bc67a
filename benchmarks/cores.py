"""What learner and engines gain from each other's cores on CPU: `python -m benchmarks.cores CONFIG
[--model 14M] [--rounds 3] [--steps 8] [--out JSON] [a.b=c ...]`.

    apart    `cluster.cores: apart`: each on its own
    shared   `cluster.cores: shared`: those that wait lend theirs
    ideal    shared and synchronous: the learner alone with all cores, then the engines alone with
             all cores; the sum of both times is that of a machine that loses nothing

A round measures all three in turn, the order turned round each time, so that a machine that gets
slower favours none. Efficiency is ideal seconds over those of a run.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import aim, aims_table, arguments_of, machine, quiet, spread
from benchmarks.tails import MODELS
from benchmarks.throughput.run import PARTS, Row, measured

ARMS = {
    "apart": ["cluster.cores=apart"],
    "shared": ["cluster.cores=shared"],
    "ideal": ["cluster.cores=shared", "replay.max_staleness=0"],
}
AIM = 0.9


def seconds(row: Row) -> float:
    """Of a learner step; ideal: of its training, and of generating what it trains."""
    share = row["seconds"] / row["steps"]
    if row["arm"] != "ideal":
        return share
    return row["train_s"] + share * row["shares"]["engine/working"]


def lines(rows: list[Row], cores: int) -> list[str]:
    """The table, and the aim."""
    arms = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    found = [
        "| | seconds a step | efficiency | learner | engine | others | idle |",
        "|---|---|---|---|---|---|---|",
    ]
    ideal = {row["round"]: seconds(row) for row in arms["ideal"]}
    efficiency: dict[str, list[float]] = {}
    for arm, own in arms.items():
        efficiency[arm] = [ideal[row["round"]] / seconds(row) for row in own]
        cpu = [statistics.median(row["cpu"].get(part, 0.0) for row in own) for part in PARTS]
        others = statistics.median(
            sum(row["cpu"].values()) - sum(row["cpu"].get(part, 0.0) for part in PARTS)
            for row in own
        )
        idle = cores - sum(cpu) - others - statistics.median(row["foreign"] for row in own)
        parts = " | ".join(f"{part:.2f}" for part in (*cpu, others, idle))
        times = spread([seconds(row) for row in own])
        found.append(f"| {arm} | {times} | {spread(efficiency[arm])} | {parts} |")
    gain = [a / s for a, s in zip(efficiency["shared"], efficiency["apart"], strict=True)]
    found += ["", f"Steps of `shared` per step of `apart`: {spread(gain)}.", ""]
    reached = statistics.median(efficiency["shared"])
    figure = spread(efficiency["shared"])
    return [*found, *aims_table([aim(f"efficiency {AIM} shared", figure, met=reached >= AIM)])]


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("cores", "What learner and engines gain from each other's cores.")
    parser.add_argument("config")
    text = "a random model in place of the configuration's"
    parser.add_argument("--model", choices=list(MODELS), help=text)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="learner steps of a run")
    parser.add_argument("--skip", type=int, default=2, help="of which the first are not counted")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args(argv)
    where = machine("vllm", "ray", "deepspeed", "torch")
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cores-") as directory:
        if arguments.model:
            path = MODELS[arguments.model].write(Path(directory) / "model")
            arguments.overrides.append(f"model.path={path}")
        for number in range(arguments.rounds):
            for arm in list(ARMS)[:: -1 if number % 2 else 1]:
                run = Path(directory) / f"{arm}-{number}"
                settings = [
                    *arguments.overrides,
                    *ARMS[arm],
                    f"run.dir={run}",
                    f"run.total_steps={arguments.steps}",
                    "evaluation.before=false",
                    "evaluation.every_steps=0",
                ]
                command = ["async_grpo.run", arguments.config, *settings]
                row = measured(command, run, skip=arguments.skip, last=arguments.steps - 1)
                rows.append(row | {"arm": arm, "round": number})
                print(f"round {number}, {arm}: {seconds(rows[-1]):.2f} s a step", flush=True)
                if arguments.out:
                    results = {"machine": where, "cores": cores, "rows": rows}
                    arguments.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print("\n".join([where, "", *lines(rows, cores)]))


if __name__ == "__main__":
    quiet()
    main()
