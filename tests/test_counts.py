"""What pages count is as many as there are, and pages speak the field's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES
from async_grpo.config.recipes import recipes

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen"""
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety"
WORDS = {
    **{
        f"{ten}-{one}": 10 * tens + ones
        for tens, ten in enumerate(TENS.split())
        for ones, one in enumerate(SMALL.split()[:10])
        if tens > 1 and ones
    },
    **{ten: 10 * tens for tens, ten in enumerate(TENS.split()) if tens > 1},
    **{word: number for number, word in enumerate(SMALL.split())},
}
N = rf"(?<![\w.,/-])(?:(\d[\d,]*)|({'|'.join(sorted(WORDS, key=len, reverse=True))}))"
"""A number, in figures or in a word."""


@cache
def model_types() -> tuple[str, ...]:
    """The model type of each small model that the tests use; read, since they import torch."""
    source = (ROOT / "tests/support/families.py").read_text(encoding="utf-8")
    [families] = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES"
    ]
    assert isinstance(families, ast.Dict)
    return tuple(ast.literal_eval(one.args[0]) for one in families.values)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Count:
    """What is counted: the words behind a number, the least number that means all there are (fewer
    are some of them), and how many the code has.
    """

    words: str
    least: int
    there_are: Callable[[], int]

    def found(self, text: str) -> Iterator[tuple[str, int]]:
        """Each place in a text that counts them all, with its number."""
        for match in re.finditer(rf"{N} (?:{self.words})\b", text, re.IGNORECASE):
            figures, word = match[1], match[2]
            number = int(figures.replace(",", "")) if figures else WORDS[word.lower()]
            if number >= self.least:
                yield match[0], number


COUNTS = (
    Count("(?:built-in |bundled )?recipes", 10, lambda: len(recipes())),
    Count("(?:policy )?losses", 9, lambda: len(POLICY_LOSSES.built_in)),
    Count("(?:advantage )?estimators", 9, lambda: len(ESTIMATORS.built_in)),
    Count("small models", 20, lambda: len(model_types())),
    Count("(?:small |model )?architectures|model types", 20, lambda: len(set(model_types()))),
)
"""Some page counts each of these; a sentence that does has to be right, on any page."""

PRIVATE = {
    "publication": r"publications?",
    "kept set": r"kept sets?",
    "starved": r"starved?|starves",
    "stand-in": r"stand-ins?",
    "newcomer": r"newcomers?",
    "one's own": r"(?:of )?one's own",
    "lag": r"lags?",
    "verdict": r"verdicts?",
    "rehearse": r"rehears\w+",
    "invented": r"invented",
}
"""Words that this project once used in a sense of its own; pages use the field's."""
ALLOWED: dict[str, tuple[str, ...]] = {}
"""Page -> private words that it may use, such as names of other systems."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The sentences of a page, without code, addresses and comments, in one line."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "`", text)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name_of(page): prose(page) for page in PAGES}


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.words)
def test_what_pages_count_is_as_many(count: Count, pages: dict[str, str]) -> None:
    told = [(page, *found) for page, text in pages.items() for found in count.found(text)]
    assert told, "no page counts them"
    wrong = [f"{page}: {said}" for page, said, number in told if number != count.there_are()]
    assert not wrong, f"there are {count.there_are()}: {wrong}"


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.words)
def test_a_wrong_count_is_found(count: Count) -> None:
    number = count.there_are()
    assert number >= count.least
    what = re.sub(r"\(.*?\)\??", "", count.words).rpartition("|")[2]
    told = f"It has {number + 1:,} {what}, not {number} {what}; 0.{number} {what} is no number."
    assert [found for _, found in count.found(told)] == [number + 1, number]


def test_numbers_are_read_in_words() -> None:
    count = Count("losses", 0, lambda: 42)
    told = list(count.found("Forty-two losses, sixteen losses and ninety losses."))
    assert [number for _, number in told] == [42, 16, 90]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_uses_the_words_of_the_field(page: Path, pages: dict[str, str]) -> None:
    name = name_of(page)
    found = {word: places for word, places in private(pages[name]) if places}
    unexpected = {word: found[word] for word in found if word not in ALLOWED.get(name, ())}
    assert not unexpected, f"{name}: {unexpected}"
    assert set(ALLOWED.get(name, ())) <= set(found), f"{name} needs no exception any more"


def private(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each private word, with where a text has it."""
    for word, pattern in PRIVATE.items():
        words = rf".{{0,30}}(?<![\w-])(?:{pattern})(?![\w-]).{{0,20}}"
        yield word, re.findall(words, text, re.IGNORECASE)


def test_a_private_word_is_found() -> None:
    text = "Each publication lags; flag, lagging and one's ownership pass."
    assert [word for word, places in private(text) if places] == ["publication", "lag"]
