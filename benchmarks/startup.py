"""Seconds from the command to the first learner step: `python -m benchmarks.startup [CONFIG]
[--runs 5] [--smoke] [--out JSON] [--docs FILE] [a.b=c ...]`.

Each run is one whole command of one learner step in a process of its own; nothing is read of it but
the lines that it prints, with the time at which they come. The first run fills the caches
(bytecode, the warm-start model) and is shown apart.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.harness import (
    ROOT,
    Part,
    Report,
    add_smoke,
    aim,
    arguments_of,
    machine,
    quiet,
    spread,
)

START_AIM_S = 25.0
TIMEOUT_S = 600.0
_PHASE = re.compile(r"^(?P<name>.+) \.\.\. (?P<seconds>[\d.]+) s$")
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
        took = min(float(found["seconds"]), at - covered_until)  # it is rounded
        phases["between phases"] = phases.get("between phases", 0.0) + at - covered_until - took
        phases[found["name"]] = took
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


def part(config: str, starts: list[Start]) -> Part:
    """Table, aims and values; the first of several starts is shown apart."""
    first, counted = starts[0], starts[1:] or starts
    lines = [
        f"{config}, {len(counted)} runs",
        "",
        "| phase | seconds | first run |",
        "|---|---|---|",
    ]

    def row(what: str, seconds: Callable[[Start], float]) -> str:
        whole = spread([seconds(one) for one in counted], ".1f")
        lines.append(f"| {what} | {whole} | {seconds(first):.1f} |")
        return whole

    for name in counted[0].phases:
        row(name, lambda one, name=name: one.phases.get(name, 0.0))
    whole = row("from the command to the first learner step", lambda one: one.to_first_step)
    row("until the command has ended", lambda one: one.total)
    met = statistics.median(one.to_first_step for one in counted) <= START_AIM_S
    reached = aim(f"first learner step within {START_AIM_S:g} s", f"{whole} s", met=met)
    return lines, [reached], [asdict(one) for one in starts]


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("startup", "Seconds from the command to the first learner step.")
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("--runs", type=int, default=5, help="after the first, which is shown apart")
    add_smoke(parser)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args(argv)
    report = Report("startup", machine("ray", "vllm", "deepspeed"))
    command = [sys.executable, "-m", "async_grpo.run", arguments.config]
    settings = ["run.total_steps=1", "evaluation.before=false", *arguments.overrides]
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="startup-") as temporary:
        for number in range(1 if arguments.smoke else 1 + arguments.runs):
            starts.append(run_once([*command, f"run.dir={temporary}/{number}", *settings]))
            print(f"{starts[-1].to_first_step:.1f} s", file=sys.stderr, flush=True)
    report.keep("starts", part(arguments.config, starts))
    report.end(arguments)


if __name__ == "__main__":
    quiet()
    main()
