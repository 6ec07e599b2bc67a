"""What the benchmarks share: the machine, rows that survive a stop, and what tables are made of.

Runs in: the process of a benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import inspect
import json
import math
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
REAL_MODEL = "examples/real_model"
"""Where recipes for a pretrained model are."""
STUDENT_95 = dict(
    zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), strict=True)
)
"""Two-sided 95 % quantile of Student's t for so many values."""


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    """Median, smallest and largest."""
    ordered = sorted(values)
    return (
        f"{statistics.median(ordered):{digits}} ({ordered[0]:{digits}} to {ordered[-1]:{digits}})"
    )


def aim(what: str, figure: str, *, met: bool) -> str:
    """A line of the list of aims."""
    return f"| {what} | {figure} | {'met' if met else 'not met'} |"


def write_docs(path: Path, lines: Sequence[str], *, benchmark: str) -> None:
    """Replace what stands between the markers of this benchmark."""
    begin, end = f"<!-- benchmarks.{benchmark}: begin -->", f"<!-- benchmarks.{benchmark}: end -->"
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{path} needs the lines {begin} and {end}, once each")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    path.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


Part = tuple[list[str], list[str], Any]
"""Lines of a table, lines of the list of aims, and values for the JSON."""


def arguments_of(benchmark: str, what: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks: where the results go. what: one sentence."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=what)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--docs", type=Path, help="a file whose tables between the markers are replaced"
    )
    return parser


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """Take `--smoke`."""
    text = "tiny and short: shows that it runs, not how fast"
    parser.add_argument("--smoke", action="store_true", help=text)


class Report:
    """The parts of a benchmark: printed as they come, then written where --out and --docs say."""

    def __init__(self, benchmark: str, where: str) -> None:
        self._benchmark, self._shown, self._aims = benchmark, [where], list[str]()
        self._results: dict[str, Any] = {"machine": where}
        print(where, flush=True)

    def keep(self, name: str, part: Part) -> None:
        """Print a part."""
        lines, reached, self._results[name] = part
        self._shown += ["", *lines]
        self._aims += reached
        print("\n".join(["", *lines]), flush=True)

    def end(self, arguments: argparse.Namespace) -> None:
        """Print the aims, and write."""
        aims = list(self._aims)
        self.keep("aims", (aims_table(aims), [], aims))
        if arguments.out:
            text = json.dumps(self._results, indent=1) + "\n"
            arguments.out.write_text(text, encoding="utf-8")
        if arguments.docs:
            write_docs(arguments.docs, self._shown, benchmark=self._benchmark)


def aims_table(aims: Sequence[str]) -> list[str]:
    """Aims below their head."""
    return ["| aim | measured | |", "|---|---|---|", *aims]


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])


def run_logged(
    command: Sequence[str], log: Path, *, limit_s: float, environment: dict[str, str] | None = None
) -> None:
    """Run a command to its end, its output in `log`. Raises RuntimeError with the end of it."""
    with open(log, "w", encoding="utf-8") as out:
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no end within {limit_s:g} s:\n" + tail(log)) from error
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}:\n" + tail(log))


def json_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def apart(work: Callable[..., T], *arguments: Any, limit_s: float) -> T:
    """Do the work in a process of its own, with one thread; a coroutine function on a loop."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_alone, work, arguments, limit_s).result(timeout=limit_s + 60)


def _alone(work: Callable[..., Any], arguments: Sequence[Any], limit_s: float) -> Any:
    import torch

    torch.set_num_threads(1)
    if inspect.iscoroutinefunction(work):
        return asyncio.run(asyncio.wait_for(work(*arguments), limit_s))
    return work(*arguments)


def quiet() -> None:
    """Set what keeps libraries quiet in this process and its children, unless it is set."""
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1")):
        os.environ.setdefault(name, value)


def rank_environment(rank: int, ranks: int, port: int) -> None:
    """Make this process a learner rank."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port below those that the system gives to outgoing connections: one of theirs could be
    taken before the ranks meet there.
    """
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no port below 32,000 is free for the learner's ranks to meet")


def memory_level() -> int:
    """Resident memory of this process now, in kB; VmHWM counts from here on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what loading has freed would hide what comes
    Path("/proc/self/clear_refs").write_text("5")
    return kilobytes("/proc/self/status", "VmRSS")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), STUDENT_95[len(values)] * deviation


def cell(values: Sequence[float]) -> str:
    """Mean and 95 % interval in percent."""
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.1%}" + ("" if math.isnan(half) else f" ± {100 * half:.1f}")


def until(points: Sequence[Sequence[float]], goal: float, column: int) -> float | None:
    """Steps (column 0), seconds (1) or more until the accuracy, the last column, first reaches a
    goal, by straight lines between evaluations; None where it never does.
    """
    before: Sequence[float] | None = None
    for point in points:
        if point[-1] >= goal:
            if before is None:
                return point[column]
            share = (goal - before[-1]) / (point[-1] - before[-1])
            return before[column] + share * (point[column] - before[column])
        before = point
    return None


def difference(values: Sequence[float]) -> str:
    """Mean and 95 % interval in points; bold where 0 lies outside."""
    if not values:
        return "-"
    mean, half = interval(values)
    text = f"{100 * mean:+.1f}" + ("" if math.isnan(half) else f" ± {100 * half:.1f}")
    return f"**{text}**" if abs(mean) > half else text


def kilobytes(path: str, field: str) -> int:
    """A line `field:  123 kB` of a file in /proc. VmRSS is the resident memory of a process now,
    VmHWM its peak.
    """
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path} has no {field}: memory is measured on Linux only")
    return int(found[1])


def machine(*packages: str) -> str:
    """Processor, cores, versions, and how busy it was before the start."""
    found = re.search(
        r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    name = found[1] if found else platform.machine()
    versions = [
        f"Python {platform.python_version()}",
        *(f"{one} {_version(one)}" for one in packages),
    ]
    return (
        ", ".join([name, f"{len(os.sched_getaffinity(0))} cores", *versions])
        + f"; load before the start {os.getloadavg()[0]:.1f}"
    )


def commit() -> str:
    """The commit that is checked out; `-dirty` where files differ from it, results apart."""
    name = ["git", "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(name, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    compare = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"]
    dirty = subprocess.run(compare, cwd=ROOT, check=False).returncode != 0
    return found.stdout.strip() + "-dirty" * dirty


def real_model() -> list[str]:
    """Make the questions for the pretrained model, and get it; the setting that names it."""
    subprocess.run([sys.executable, f"{REAL_MODEL}/make_rows.py"], cwd=ROOT, check=True)
    command = [sys.executable, f"{REAL_MODEL}/get_model.py"]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return [f"model.path={found.stdout.strip()}"]


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError(f"{package} is not installed")


class OfRow:
    """A dataclass of what tells runs apart, whose fields stand in the row of a run."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """The run that a row came from."""
        return cls(*(row[name] for name in cls.__dataclass_fields__))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of finished runs; a line that was cut off is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            print(f"a line of {path} is cut off and left out", file=sys.stderr)
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row in one write, since another part may write to the same file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
