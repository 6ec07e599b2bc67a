"""The instructions of our Dockerfile, read as docker reads them, as far as we use its language."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

WORDS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


class Instruction(NamedTuple):
    """`RUN make` is `Instruction("RUN", "make")`; a line that goes on is one."""

    word: str
    rest: str

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a RUN, without the variables before them."""
        commands = [shlex.split(one) for one in re.split(r"&&|;|\|\|?", self.rest)]
        return [
            words[next(i for i, word in enumerate(words) if "=" not in word) :]
            for words in commands
        ]

    @property
    def sources(self) -> list[str]:
        """What a COPY copies."""
        return [word for word in shlex.split(self.rest) if not word.startswith("--")][:-1]


def instructions(path: Path) -> list[Instruction]:
    """All instructions in order. Raises ValueError for one that is not in WORDS."""
    text = re.sub(r"^[ \t]*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for line in re.sub(r"[ \t]*\\\n[ \t]*", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word and word not in WORDS:
            raise ValueError(f"what is {word}?")
        found += [Instruction(word, rest.strip())] if word else []
    return found


def left_out(name: str, ignore: Path) -> bool:
    """Whether a path of the checkout stays out of the context, by the lines of .dockerignore."""
    parts = name.split("/")
    heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(
        fnmatch(part, line[3:]) if line.startswith("**/") else fnmatch(head, line)
        for line in ignore.read_text(encoding="utf-8").split()
        for head, part in zip(heads, parts, strict=True)
        if line.startswith("**/") or head.count("/") == line.count("/")
    )
