"""The code blocks of the pages, with their places.

Every block is fenced. Its language says what may be done with it:

    python, yaml, json       run, loaded
    bash, console, none      commands; in `console` the lines that begin with `$ ` are, the rest is
                             what they print
    text                     what a program prints, or a drawing: nothing that could be run
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = ("", "bash", "sh", "console")
EXECUTED = ("python", "yaml", "json")
LANGUAGES = (*EXECUTED, *COMMANDS, "text")
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A fenced block. line: of its first line of code in the page."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"

    @property
    def name(self) -> str:
        """Its page and first line, which stay when something above is changed."""
        return f"{self.page}: {self.code.partition(chr(10))[0]}"

    @property
    def module(self) -> str | None:
        """The name of its file, where the first line gives one: `# mine.py`, `# in mine.py`."""
        found = re.search(r"# (?:in )?(\w+)\.py$", self.code.partition("\n")[0])
        return found and found[1]

    def commands(self) -> Iterator[str]:
        """Command lines, those that go on in the next line joined; nothing of other languages."""
        if self.language not in COMMANDS:
            return
        lines = self.code.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from (line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def snippets(page: str, text: str) -> list[Snippet]:
    """Every block of a page, in order."""
    found = []
    for indent, language, code in _BLOCK.findall(text):
        at = text.index(f"{indent}```{language}\n{code}")
        plain = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        found.append(Snippet(page, text[:at].count("\n") + 2, language.strip(), plain))
    return found


def of_pages() -> dict[str, list[Snippet]]:
    """Page, relative to the checkout -> its blocks; pages without any are left out."""
    named = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in PAGES}
    found = {name: snippets(name, text) for name, text in named.items()}
    return {name: blocks for name, blocks in found.items() if blocks}


def prose(text: str) -> str:
    """A page without its blocks, as many lines long."""
    return _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
