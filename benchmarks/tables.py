"""What the benchmarks print and write alike.

Runs in: the process of a benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path


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
