"""What the benchmarks share: the machine, rows that survive a stop, and what tables are made of.

Runs in: the process of a benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
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


class Report:
    """The parts of a benchmark: printed as they come, then written where --out and --docs say."""

    def __init__(self, benchmark: str, where: str) -> None:
        self._benchmark, self._shown, self._aims = benchmark, [where], list[str]()
        self._results: dict[str, Any] = {"machine": where}
        print(where, flush=True)

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        """Take where the results go."""
        parser.add_argument("--out", type=Path, help="where the JSON goes")
        parser.add_argument(
            "--docs", type=Path, help="a file whose tables between the markers are replaced"
        )

    def keep(self, name: str, part: Part) -> None:
        """Print a part."""
        lines, reached, self._results[name] = part
        self._shown += ["", *lines]
        self._aims += reached
        print("\n".join(["", *lines]), flush=True)

    def end(self, arguments: argparse.Namespace) -> None:
        """Print the aims, and write."""
        aims = list(self._aims)
        self.keep("aims", (["| aim | measured | |", "|---|---|---|", *aims], [], aims))
        if arguments.out:
            text = json.dumps(self._results, indent=1) + "\n"
            arguments.out.write_text(text, encoding="utf-8")
        if arguments.docs:
            write_docs(arguments.docs, self._shown, benchmark=self._benchmark)


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
