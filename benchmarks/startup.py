"""Seconds from the command to the first learner step: `python -m benchmarks.startup [CONFIG]
[--runs 5] [--smoke] [--out JSON] [--docs FILE] [a.b=c ...]`.

Each run is one whole command of one learner step in a process of its own; nothing is read of it but
the lines that it prints, with the time at which they come. The first run fills the caches
(bytecode, the warm-start model) and is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import ROOT, aim, machine, spread, write_docs

START_AIM_S = 25.0
TIMEOUT_S = 600.0
_PHASE = re.compile(r"^(?P<name>.+) \.\.\.(?: (?P<seconds>[\d.]+) s)?$")
_STEP = re.compile(r"^step +1/")
BEFORE, FIRST = "until the first line (imports, checks)", "first learner step"


@dataclass(frozen=True)
class Start:
    """One run: seconds from the command to the end of the first step, by phase, and until it had
    ended.
    """

    to_first_step: float
    phases: dict[str, float]
    total: float


def read(lines: list[tuple[float, str]], total: float) -> Start:
    """From what a run printed, with the seconds since the command. The phases add up to the first
    step, `between phases` included.
    """
    phases: dict[str, float] = {}
    covered_until = 0.0
    for at, line in lines:
        if not phases:
            phases[BEFORE] = covered_until = at
        if _STEP.match(line):
            phases[FIRST] = at - covered_until
            covered_until = at
            break
        found = _PHASE.match(line)
        if found is None:
            continue
        if found["seconds"] is None:
            phases["between phases"] = phases.get("between phases", 0.0) + at - covered_until
        else:
            phases[found["name"]] = at - covered_until
        covered_until = at
    else:
        raise RuntimeError(
            "the run printed no first step:\n" + "\n".join(line for _, line in lines[-15:])
        )
    return Start(covered_until, phases, total)


def run_once(command: list[str]) -> Start:
    """Run the command and time its lines."""
    started, lines = time.perf_counter(), []
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            lines.append((time.perf_counter() - started, line.rstrip()))
        code = process.wait()
    finally:
        timer.cancel()
    if code != 0:
        raise RuntimeError(
            f"the run ended with exit code {code}:\n" + "\n".join(line for _, line in lines[-15:])
        )
    return read(lines, time.perf_counter() - started)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description="Seconds from the command to the first learner step.",
    )
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("--runs", type=int, default=5, help="after the first, which is shown apart")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="one run, which may fill the caches: shows that it runs, not how fast",
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--docs", type=Path, help="a file whose table between the markers is replaced"
    )
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args(argv)
    about = machine("ray", "vllm", "deepspeed")
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="startup-") as temporary:
        for number in range(1 if arguments.smoke else 1 + arguments.runs):
            starts.append(
                run_once(
                    [
                        sys.executable,
                        "-m",
                        "async_grpo.run",
                        arguments.config,
                        f"run.dir={temporary}/{number}",
                        "run.total_steps=1",
                        "evaluation.before=false",
                        *arguments.overrides,
                    ]
                )
            )
            print(f"{starts[-1].to_first_step:.1f} s", file=sys.stderr, flush=True)
    first, counted = starts[0], starts[1:] or starts
    lines = [
        about,
        "",
        f"{arguments.config}, {len(counted)} runs",
        "",
        "| phase | seconds | first run |",
        "|---|---|---|",
    ]
    for name in counted[0].phases:
        lines.append(
            f"| {name} | {spread([one.phases.get(name, 0.0) for one in counted], '.1f')} | "
            f"{first.phases.get(name, 0.0):.1f} |"
        )
    whole = spread([one.to_first_step for one in counted], ".1f")
    lines.append(
        f"| from the command to the first learner step | {whole} | {first.to_first_step:.1f} |"
    )
    lines.append(
        f"| until the command has ended | {spread([one.total for one in counted], '.1f')} "
        f"| {first.total:.1f} |"
    )
    met = statistics.median(one.to_first_step for one in counted) <= START_AIM_S
    lines += [
        "",
        "| aim | measured | |",
        "|---|---|---|",
        aim(f"first learner step within {START_AIM_S:g} s", f"{whole} s", met=met),
    ]
    print("\n".join(lines))
    if arguments.out:
        record = {
            "machine": about,
            "config": arguments.config,
            "starts": [asdict(one) for one in starts],
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.docs:
        write_docs(arguments.docs, lines, benchmark="startup")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    main()
