"""The package without its checkout: what a wheel holds, and recipes by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest

from async_grpo.config import recipes
from async_grpo.config.load import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {path.name: path for path in (ROOT / "configs").glob("*.yaml")}
REPOSITORY = "https://example.org/owner/async_grpo"


def python(
    arguments: Sequence[str], *, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python in `cwd` with nothing of the checkout on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": ""} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an sdist or a wheel as pip does, with the setuptools that is installed."""
    target.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    done = python(["-c", code], cwd=source, ASYNC_GRPO_REPOSITORY=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return next(target.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel that is built from the unpacked sdist of a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
        elif path.name in ("async_grpo", "configs", "docs"):
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(build("sdist", copy, folder / "sdist")) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since 3.11.4
        archive.extractall(folder / "unpacked", **safely)
    return zipfile.ZipFile(build("wheel", next((folder / "unpacked").iterdir()), folder / "wheel"))


def test_a_wheel_holds_the_package_and_its_recipes(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "async_grpo").rglob("*.py")}
    others = {"async_grpo/py.typed", "async_grpo/tools/watch/page.html"}
    assert held == modules | others | {f"async_grpo/recipes/{name}" for name in RECIPES}
    for name, path in RECIPES.items():
        assert wheel.read(f"async_grpo/recipes/{name}") == path.read_bytes()


def test_the_metadata_names_licence_readme_and_addresses(wheel: zipfile.ZipFile) -> None:
    folder = next(name for name in wheel.namelist() if name.endswith("/METADATA"))[
        : -len("METADATA")
    ]
    metadata = Parser().parsestr(wheel.read(folder + "METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert wheel.read(folder + "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    text = str(metadata.get_payload())
    assert text.strip().startswith("# async_grpo")
    assert f"]({REPOSITORY}/blob/main/docs/explanation/staleness.md)" in text
    assert "](docs/" not in text
    for page in ("CITATION.cff", "CHANGELOG.md"):
        assert metadata["Version"] in (ROOT / page).read_text(encoding="utf-8"), page
    addresses = [line.split(", ")[1] for line in metadata.get_all("Project-URL", [])]
    assert addresses and all(address.startswith(REPOSITORY) for address in addresses)


def test_a_wheel_trains_a_recipe_by_its_name_anywhere(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    wheel.extractall(site)
    empty.mkdir()
    listed = python(["-m", "async_grpo.run", "--recipes"], cwd=empty, PYTHONPATH=str(site))
    assert listed.returncode == 0, listed.stderr
    assert {f"{line.split()[0]}.yaml" for line in listed.stdout.splitlines()} == RECIPES.keys()
    code = (
        "from async_grpo.config.load import load_config as load;"
        "config = load('quickstart', ['run.total_steps=7']);"
        "print(config.run.total_steps, config.run.dir)"
    )
    loaded = python(["-c", code], cwd=empty, PYTHONPATH=str(site))
    assert loaded.stdout.startswith(f"7 {empty}/runs/quickstart-"), loaded.stderr
    wrong = python(["-m", "async_grpo.run", "quikstart"], cwd=empty, PYTHONPATH=str(site))
    assert wrong.returncode == 2
    assert "Did you mean the recipe `quickstart`?" in wrong.stdout + wrong.stderr
    assert list(empty.iterdir()) == []


def test_a_name_is_a_recipe_and_a_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in RECIPES.items():
        assert recipes.locate(path.stem) == path
        assert recipes.locate(name) == name
        assert recipes.locate(f"./{path.stem}") == f"./{path.stem}"
    (tmp_path / "gspo").mkdir()
    assert recipes.locate("gspo") == RECIPES["gspo.yaml"]
    (tmp_path / "dapo").write_text("run: {total_steps: 3}\n", encoding="utf-8")
    assert recipes.locate("dapo") == "dapo"
    written = load_config("quickstart", cwd=tmp_path).model_dump()
    read = load_config(RECIPES["quickstart.yaml"], cwd=tmp_path).model_dump()
    assert written | {"run": None} == read | {"run": None}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("quikstart", "Did you mean the recipe `quickstart`?"),
        ("configs/quickstart.yaml", "Did you mean the recipe `quickstart`?"),
        ("dr-grpo", "Did you mean the recipe `dr_grpo`?"),
        (
            "nothing",
            f"The recipes are {', '.join(sorted(path.stem for path in RECIPES.values()))}.",
        ),
        ("mine/nothing.yaml", None),
    ],
)
def test_a_misspelled_recipe_is_answered_with_a_name(
    given: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    first, *rest = str(caught.value).splitlines()
    assert (
        first == f"The configuration file {given} does not exist (current directory: {tmp_path})."
    )
    assert rest == ([says] if says else [])
