"""The Dockerfile: what it copies exists, what it calls is known, its Python and Ray are the
package's, nothing runs as root. Building it needs docker, which tests do not.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.dockerfile import Instruction, instructions, left_out
from tests.support.installer import installer
from tests.support.snippets import ROOT

DOCKERFILE, IGNORE = ROOT / "Dockerfile", ROOT / ".dockerignore"
FOUND = instructions(DOCKERFILE)
KNOWN = {"apt-get", "install", "mkdir", "python3", "rm", "touch", "useradd"}
PYTHON_OF = {"debian:bookworm-slim": (3, 11)}
"""Base image -> the Python that its package `python3` is."""


def only(word: str) -> Instruction:
    [one] = [one for one in FOUND if one.word == word]
    return one


def before(word: str, rest: str) -> list[Instruction]:
    return FOUND[: next(i for i, one in enumerate(FOUND) if one == (word, rest))]


def calls() -> list[list[str]]:
    return [command for one in FOUND if one.word == "RUN" for command in one.commands]


def test_each_instruction_is_read_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("# a\nFROM b\nRUN A=1 c d \\\n  # between\n  && e\nCOPY --chown=1 f g/ .\n")
    base, run, copy = instructions(file)
    assert base == ("FROM", "b") and run.commands == [["c", "d"], ["e"]]
    assert copy.sources == ["f", "g/"]
    file.write_text("FORM b\n")
    with pytest.raises(ValueError, match="FORM"):
        instructions(file)


def test_every_command_is_a_known_one() -> None:
    assert FOUND[0].word == "FROM" and {command[0] for command in calls()} == KNOWN


def test_it_installs_by_the_installer() -> None:
    [install] = [command for command in calls() if command[0] == "python3"]
    assert install == ["python3", "install.py", "--set", "$SET", "--no-gpu"]
    text = (ROOT / "install.py").read_text(encoding="utf-8")
    assert all(f'"{option}"' in text for option in install if option.startswith("--"))
    name, default = only("ARG").rest.split("=")
    assert name == "SET" and default in installer.FREE_GB


def test_what_is_copied_exists_and_is_in_the_context() -> None:
    copied = [name for one in FOUND if one.word == "COPY" for name in one.sources]
    assert copied[-1] == "."
    for name in copied[:-1]:
        assert (ROOT / name).is_file() and not left_out(name, IGNORE), name
    for name in ("async_grpo/cli.py", "configs/quickstart.yaml", "benchmarks/gpu_check/machine.py"):
        assert not left_out(name, IGNORE), name
    for name in (".git/config", ".venv/bin/python", "runs/a/b", "tests/__pycache__/a.pyc"):
        assert left_out(name, IGNORE), name


def test_packages_come_before_the_source_and_need_no_more_of_it() -> None:
    """What setup.py and install.py read is copied or made before they run."""
    [install] = [one for one in FOUND if one.word == "RUN" and "install.py" in one.rest]
    earlier = before("RUN", install.rest)
    assert FOUND.index(install) < FOUND.index(Instruction("COPY", "--chown=1000:1000 . ."))
    there = {name for one in earlier if one.word == "COPY" for name in one.sources}
    made = {name for command in install.commands for name in command[1:] if command[0] == "touch"}
    read = set()
    for source in ("setup.py", "install.py"):
        text = (ROOT / source).read_text(encoding="utf-8")
        read |= set(re.findall(r'"([\w.]+\.(?:toml|md|py))"', text))
    assert read - {"install.py"} <= there | made | {"setup.py"}
    # without a package in sight, the editable installation would map nothing
    assert "async_grpo/__init__.py" in made


def test_nothing_runs_as_root() -> None:
    user = only("USER").rest
    uid = user.partition(":")[0]
    assert uid != "0" and f"{uid}:{uid}" == user
    [account] = [command for command in calls() if command[0] == "useradd"]
    assert account[account.index("--uid") + 1] == uid
    later = FOUND[FOUND.index(only("USER")) :]
    assert not any(c[0] == "apt-get" for one in later if one.word == "RUN" for c in one.commands)
    assert all(f"--chown={user} " in one.rest for one in later if one.word == "COPY")
    directory = only("WORKDIR").rest
    assert any(c[0] == "install" and c[-1] == directory for c in calls())
    assert only("ENV").rest.startswith(f"PATH={directory}/.venv/bin:$PATH ")


def test_the_system_has_what_compiles_and_what_probes() -> None:
    [packages] = [command for command in calls() if command[:2] == ["apt-get", "install"]]
    needed = {"ca-certificates", "g++", "make", "python3-dev", "python3-venv", "wget"}
    assert needed <= set(packages)
    assert PYTHON_OF[only("FROM").rest] in installer.PYTHONS


def test_what_it_does_by_default_is_ours(tmp_path: Path) -> None:
    commands.check(" ".join(json.loads(only("CMD").rest)), tmp_path)


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
def test_it_has_no_lint() -> None:
    subprocess.run(["hadolint", DOCKERFILE], check=True, timeout=60)
