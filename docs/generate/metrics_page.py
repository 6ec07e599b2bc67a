"""The reference page of the metrics, written from `metrics.toml`.

Invariants: a metric has one entry; a table has a column only if one of its metrics fills it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("metrics.toml")
_HEAD = ("metric", "meaning", "what to do")
_INTRODUCTION = """\
# Metrics

<!-- Written by `make docs` from `docs/generate/metrics.toml`: change it there. -->

"""


def render() -> str:
    """Return the page as Markdown. Raises ValueError for a metric with two entries."""
    content = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    parts = [_INTRODUCTION + content["introduction"].strip()]
    for section in content["section"]:
        parts += [f"## {section['title']}", section.get("text", "").strip()]
        known: set[str] = set()
        for table in section.get("table", []):
            parts += [table.get("text", "").strip(), _table(table, known)]
            parts.append(table.get("after", "").strip())
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: dict[str, Any], known: set[str]) -> str:
    rows = []
    for names, *cells in table["rows"]:
        each = [name.strip() for name in names.split(",")]
        if twice := {name for name in each if name[0] not in "_/"} & known:
            raise ValueError(f"two entries for {', '.join(sorted(twice))}")
        known.update(each)
        rows.append([", ".join(f"`{name}`" for name in each), *cells])
    width = max(len(row) for row in rows)
    head = table.get("head", _HEAD)[:width]
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([first, "|" + "---|" * width, *others])
