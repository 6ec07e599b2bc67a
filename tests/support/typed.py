"""Tables of what is typed behind `async-grpo check CONFIG`, and of what is answered."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest


def settings(line: str, short: Mapping[str, str]) -> list[str]:
    """The settings of a line, as a shell splits it; a word of `short` stands for some of them."""
    words = shlex.split(line)
    return [one for word in words for one in (short[word].split() if word in short else [word])]


def admitted(table: str, **short: str) -> list[Any]:
    """A case per line."""
    lines = textwrap.dedent(table).strip().splitlines()
    return [pytest.param(settings(line, short), id=line) for line in lines]


def refused(table: str, **short: str) -> list[Any]:
    """A case per two lines: what is typed and, indented, parts of the answer between bars."""
    lines = textwrap.dedent(table).strip().splitlines()
    assert all(line.startswith("    ") for line in lines[1::2]), "an answer is indented"
    return [
        pytest.param(settings(line, short), answer.strip().split(" | "), id=line)
        for line, answer in zip(lines[::2], lines[1::2], strict=True)
    ]
