"""Tables of what is typed behind `async-grpo check CONFIG`, and of what is answered."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping

import pytest


def settings(line: str, short: Mapping[str, str]) -> list[str]:
    """The settings of a line, as a shell splits it; a word of `short` stands for some of them."""
    words = shlex.split(line)
    return [one for word in words for one in (short[word].split() if word in short else [word])]


def admitted(table: str, **short: str) -> Iterator[object]:
    """A case per line."""
    for line in textwrap.dedent(table).strip().splitlines():
        yield pytest.param(settings(line, short), id=line)


def refused(table: str, **short: str) -> Iterator[object]:
    """A case per two lines: what is typed and, indented, parts of the answer between bars."""
    lines = textwrap.dedent(table).strip().splitlines()
    for line, answer in zip(lines[::2], lines[1::2], strict=True):
        assert answer.startswith("    "), f"no answer to {line}"
        yield pytest.param(settings(line, short), answer.strip().split(" | "), id=line)
