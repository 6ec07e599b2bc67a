"""Files of finished runs, a JSON object per line, so that a benchmark can be stopped and started
again.

Runs in: the process of a benchmark; several may append to the same file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Self


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
