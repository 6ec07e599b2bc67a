"""What the pages show works: code runs, settings load, commands are such that their programs take
them. A new page or block is covered by being there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.real_parsers import Incomplete, Refused
from tests.support.snippets import LANGUAGES, PAGES, ROOT, of_pages, prose

SNIPPETS = of_pages()
EXAMPLES = "python yaml json".split()
UNCHECKED: dict[str, str] = {}
"""`page, line n` of a block that cannot be checked -> why. At most three."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complain(place: object, problem: object) -> None:
    pytest.fail(f"{place}: {problem}", pytrace=False)


def test_every_block_says_what_it_is() -> None:
    assert len(UNCHECKED) <= 3
    blocks = [block for page in SNIPPETS.values() for block in page]
    assert set(UNCHECKED) <= {str(block) for block in blocks}
    for block in blocks:
        if block.language not in LANGUAGES:
            complain(block, f"a block of {block.language!r}; the languages are {LANGUAGES}")
        starts = r"^(\$ |python -m |make |ray (start|job)|pip install|import |from \w+ import )"
        if block.language == "text" and (found := re.search(starts, block.code, re.MULTILINE)):
            complain(block, f"`{found[0]}...` can be checked, so it is no ```text")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_fenced(page: Path) -> None:
    for number, line in enumerate(prose(page.read_text(encoding="utf-8")).splitlines(), 1):
        if line.startswith("    "):
            complain(f"{page.name}, line {number}", f"indented, not in a block: {line.strip()}")


@pytest.mark.parametrize("page", SNIPPETS)
def test_the_programs_would_take_the_commands(page: str, home: Path) -> None:
    for block in SNIPPETS[page]:
        if block.language == "yaml" and "\nmodel:" in block.code:
            (home / "own.yaml").write_text(block.code)
        for line in block.commands() if str(block) not in UNCHECKED else ():
            try:
                commands.check(line, home)
            except Refused as refusal:
                complain(block, f"`{line.strip()}`: {refusal}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_have_real_options(page: Path, home: Path) -> None:
    text = prose(page.read_text(encoding="utf-8"))
    for line in re.findall(r"`((?:python -m|make|ray|async-grpo) [^`]+)`", text):
        try:
            commands.check(" ".join(line.split()), home)
        except Incomplete:  # it is spoken of
            continue
        except Refused as refusal:
            complain(page.name, f"`{line}`: {refusal}")
