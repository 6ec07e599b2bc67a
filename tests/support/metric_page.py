"""The names of metrics that docs/reference/metrics.md explains."""

from __future__ import annotations

import re
from functools import cache

from tests.support.snippets import ROOT

PAGE = ROOT / "docs" / "reference" / "metrics.md"
NAME = re.compile(
    "(?:train|rollout|replay|time|weights|eval|cluster|checkpoint|tracking|goodput|plan)"
    "(?:/[a-z0-9_]+)+"
)


def explained(page: str) -> set[str]:
    """Names in the page: each `word` below a heading with a path, under that path. A word that
    begins with `_` or `/` continues the one before.
    """
    names: set[str] = set()
    path = last = ""
    for line in page.splitlines():
        if line.startswith("## "):
            found = re.match(r"## `([a-z]+)/`", line)
            path = found[1] if found else ""
        for word in re.findall(r"`([a-z0-9_/<>]+)`", line) if path else []:
            for base in [last, *(last[:at] for at, sign in enumerate(last) if sign == "_")]:
                if word[0] in "_/":
                    names.add(f"{path}/{base}{word}")
            if word[0] not in "_/":
                last = word
                names.add(word if NAME.fullmatch(word) else f"{path}/{word}")
    return names


@cache
def _patterns() -> re.Pattern[str]:
    names = explained(PAGE.read_text(encoding="utf-8"))
    return re.compile("|".join(re.sub(r"<\w+>", r"[\\w.]+", re.escape(name)) for name in names))


def documented(name: str) -> bool:
    """Whether the page explains a metric of this name; `<k>` in it stands for anything."""
    return _patterns().fullmatch(name) is not None
