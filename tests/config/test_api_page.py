"""docs/reference/api.md is what the code says: compared with the sources, and with the objects."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import api_page
import pages
import pytest

import async_grpo
from async_grpo.environments import base as environments
from async_grpo.tasks import base as tasks

TEXT = (pages.REFERENCE / "api.md").read_text(encoding="utf-8")
SOURCES = {
    "__init__": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from small import sweep
    from small.work import Runner, run
__all__ = ["Runner", "run", "sweep"]
""",
    "work": '''
from small.base import Base
class Runner(Base[int]):
    """Run.

    Not on the page.
    """
    def __init__(self, a: int, *more: str, b: float = 0.5) -> None:
        self.steps: list[int] = []
        """Done so far."""
    @property
    def done(self) -> int: "How many."
    def __iter__(self): "Step by step."
    def __len__(self): return 1
    def _hidden(self): ...
    @staticmethod
    def plain(x, *, y=None): ...
async def run(*, to: str = 'x', **rest: int) -> None: """Run it."""
''',
    "base": """
from typing import Generic
class Base(Generic[T]):
    kind: str
    'Of which kind.'
    async def wait(self) -> bool: 'Wait.'
    def done(self): 'Replaced.'
""",
    "sweep": '"""Try many."""\ndef best(n: int): "The best."\ndef _worst(): ...\n',
}


def test_the_page_is_up_to_date() -> None:
    assert api_page.render() == TEXT, "run make docs"


def section(name: str) -> str:
    return re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("name", async_grpo.__all__)
def test_every_public_name_is_there_with_all_that_it_has(name: str) -> None:
    found, text = getattr(async_grpo, name), section(name)
    if inspect.isfunction(found):
        check_parameters(found, text)
    elif inspect.isclass(found) and name != "Config":  # whose fields have a page
        check_members(found, text)


@pytest.mark.parametrize(
    "of", [tasks.Task, environments.Environment, environments.HasEnvironment, environments.HasTools]
)
def test_what_a_user_writes_is_there(of: type) -> None:
    check_members(of, section(of.__name__))


def check_members(of: type, text: str) -> None:
    for name, member in inspect.getmembers(of):
        home = getattr(getattr(member, "fget", member), "__module__", "")
        if not name.startswith("_") and home == of.__module__:
            line = re.search(rf"^- `(?:async )?{name}\b.*$", text, re.MULTILINE)
            assert line, f"{name} is missing"
            if inspect.isfunction(member):
                check_parameters(member, line[0])


def check_parameters(function: object, text: str) -> None:
    for name in inspect.signature(function).parameters:
        assert name in ("self", "cls") or re.search(rf"[(* ]{name}\b", text), name


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small package in the place of ours."""
    for name, source in SOURCES.items():
        path = tmp_path / "small" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    monkeypatch.setattr(api_page, "PACKAGE", tmp_path / "small")
    monkeypatch.setattr(api_page, "SECTIONS", {})


def test_names_are_followed_and_members_inherited(small: None) -> None:
    told = api_page.render().partition("### ")[2].replace("\n\n", "\n").splitlines()
    assert told == [
        "`run`",
        '`small.run(*, to: str = "x", **rest: int) -> None`',
        "Run it.",
        "### `Runner`",
        "`small.Runner(a: int, *more: str, b: float = 0.5)`",
        "Run.",
        "- `steps: list[int]`<br>Done so far.",
        "- `done: int`<br>How many.",
        "- `__iter__()`<br>Step by step.",
        "- `plain(x, *, y=None)`",
        "- `kind: str`<br>Of which kind.",
        "- `async wait() -> bool`<br>Wait.",
        "### `sweep`",
        "`module small.sweep`",
        "Try many.",
        "- `best(n: int)`<br>The best.",
    ]


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--check"]) == 0
    assert pages.main(["--check"], folder=tmp_path) == 1
    assert "api.md is out of date: run `make docs`" in capsys.readouterr().out
    assert pages.main([], folder=tmp_path) == 0 and pages.main(["--check"], folder=tmp_path) == 0
    (tmp_path / "api.md").write_text("another")
    assert pages.main(["--check"], folder=tmp_path) == 1


def test_nothing_heavy_is_imported_for_the_page() -> None:
    code = "import sys; import api_page; api_page.render(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(pages.__file__).parent,
    )
    assert not {"torch", "ray", "vllm", "numpy"} & set(done.stdout.split())


def test_a_name_without_a_definition_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_page, "SECTIONS", {"Tasks": ("", {"tasks.base": "Prompt walk"})})
    with pytest.raises(KeyError, match="walk"):
        api_page.render()
