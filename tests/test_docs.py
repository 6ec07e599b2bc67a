"""The pages agree with each other and with the product: links lead somewhere, settings and modules
that they name exist.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_grpo.config.docs import settings

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = {name for name, setting in settings().items() if setting.section and "." not in name}
FREE = tuple(
    name
    for name, setting in settings().items()
    if not setting.section and setting.allowed.startswith("a mapping")
)
"""Settings that hold keys of others: `learner.deepspeed`, `task.options`, `task.rewards`."""


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links to {target}, and there is no such heading"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    if page.name == "migration.md":  # its other columns are other systems'
        text = "\n".join(
            line if not line.startswith("|") else line.split("|")[1] for line in text.splitlines()
        )
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[:=][^`]*)?`", text):
        if name.partition(".")[0] in SECTIONS and not name.endswith(
            (".py", ".md", ".yaml", ".json", ".jsonl", ".db")
        ):
            assert name in settings() or name.startswith(tuple(f"{free}." for free in FREE)), (
                f"{page.name} names {name}"
            )


def test_every_page_is_found_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in text] == []
