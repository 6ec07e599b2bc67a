"""Command lines of the pages, checked as far as that goes without running them: `check` raises
Refused for one that could not work.

Words in capitals (`RUN_DIR`, `STEP`) stand for what the reader puts there, `[...]` for what may be
left out, as in the usage of a command. A YAML file that the checkout does not have is one of the
reader's own.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import tomllib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click

from async_grpo.cli import VERBS
from async_grpo.config.load import ConfigError, load_config
from async_grpo.config.recipes import recipes
from tests.support.real_parsers import OURS, Incomplete, Refused, answered, file_of, names, parsed
from tests.support.snippets import ROOT

BASE = """
run: {total_steps: 100, dir: runs/base}
model: {path: an-organisation/a-model}
"""
"""The settings of a file that is the reader's own."""
SHARED = {"/shared/async_grpo/": f"{ROOT}/"}
"""Where a page has a copy of the checkout -> the checkout."""
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*")
STAND_IN = "1"
"""The value of a placeholder: a number, and a name."""
ANY_SETTING = ("section.key=value", "a.b=c")
OPERATORS = ("|", "||", "&&", ";", "&")
CODE = re.compile(r"\.(py|sh|sbatch|yaml|yml|toml|txt)$")


def check(line: str, home: Path) -> None:
    """Check the commands of a line. home: a directory for files of the reader's own. Raises Refused
    or, where a command only lacks arguments, Incomplete.
    """
    for command in _split(_words(line)):
        _check(command, home)


def _words(line: str) -> list[str]:
    """Its words without comments, brackets of a usage and `...`, with a value for placeholders."""
    line = re.sub(r"(?<=\s)\[([^]\n]*)\](?=\s|$)", r"\1", line)
    reader = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    reader.whitespace_split = True
    try:
        words = [word for word in reader if word not in ("...", *ANY_SETTING)]
    except ValueError as error:
        raise Refused(f"{line}: {error}") from None
    return [STAND_IN if PLACEHOLDER.fullmatch(word) else word for word in words]


def _split(words: list[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word in OPERATORS:
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _check(command: list[str], home: Path) -> None:
    while re.match(r"[A-Z_]+=", command[0]):  # variables of one command
        if not (command := command[1:]):
            return
    first, rest = command[0].rpartition("/")[2], command[1:]
    if first in ("python", "python3") and rest[:1] == ["-m"]:
        _module(rest[1], rest[2:], home)
    elif first in CHECKS:
        CHECKS[first](rest, home)
    elif first not in PLAIN:
        raise Refused(
            f"nobody knows how to check `{first}`: add it to tests/support/commands.py, or, if it "
            "is no command but what one prints, say ```text"
        )


# ---- ours ----


def _module(module: str, words: list[str], home: Path) -> None:
    if module.split(".")[0] not in OURS:
        if module != "pytest":
            raise Refused(f"python -m {module} is nothing of this project")
        return
    if file_of(module) is None:
        raise Refused(f"there is no {module}")
    for there, here in SHARED.items():
        words = [word.replace(there, here) for word in words]
    _files(words)
    if module in ("async_grpo", "async_grpo.run"):
        return _verb(words if module == "async_grpo" else ["train", *words], home)
    parsed(file_of(module), words)


def _verb(words: list[str], home: Path) -> None:
    """A verb of our command line, read by its own parser; its settings are read too."""
    if words[:1] in ([], ["--version"], ["--help"], ["VERB"]):
        return
    verb, *rest = words
    if verb not in VERBS:
        raise Refused(f"{verb} is no verb")
    given = vars(answered(verb, rest))
    settings = given.get("settings") or []
    if given.get("config") or "source" in given:
        task = [f"task.name={given['task']}"] if given.get("task") else []
        name = given.get("config") or str(given["source"])
        recipe = bool(given.get("config")) and name != STAND_IN and not Path(name).suffix
        _configuration(name, [*task, *settings], home, is_recipe=recipe)
    if given.get("assume"):
        _assumed(given["assume"])


def _assumed(nodes: str) -> None:
    dry_run = names(file_of("async_grpo.tools.check.dry_run"))
    try:
        dry_run["assumed_nodes"](nodes)
    except dry_run["SetupError"] as error:
        raise Refused(str(error)) from None


def _configuration(name: str, settings: list[str], home: Path, *, is_recipe: bool) -> None:
    """Read the settings: of a recipe, of a file of the checkout, or of one of the reader's own."""
    if is_recipe or name in recipes():
        path = name
    elif (ROOT / name).is_file():
        path = str(ROOT / name)
    else:
        own = home / Path(name).name
        path = str(own if own.is_file() else _base(home))
    try:
        load_config(path, settings, cwd=home)
    except ConfigError as error:
        raise Refused(str(error)) from None


def _base(home: Path) -> Path:
    path = home / ".base.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def _files(words: list[str]) -> None:
    """Code and settings of the checkout that are named by a path exist."""
    for word in words:
        name = word.rpartition("=")[2] if word.startswith("-") else word
        folder, _, rest = name.partition("/")
        ours = rest and folder.islower() and folder != "runs" and "=" not in name
        if ours and CODE.search(name) and not (ROOT / name).is_file():
            raise Refused(f"there is no {name}")


# ---- other programs ----


@cache
def makefile() -> tuple[frozenset[str], frozenset[str]]:
    """Targets of the Makefile, and the variables that a user may give it."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    return frozenset(targets), frozenset(re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE))


def _make(words: list[str], home: Path) -> None:
    targets, variables = makefile()
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else targets):
            raise Refused(f"the Makefile has no {word}")


@cache
def _rays_own() -> Any:
    with warnings.catch_warnings(action="ignore"):  # of the libraries of `ray serve`
        return importlib.import_module("ray.scripts.scripts").cli


def _ray(words: list[str], home: Path) -> None:
    """Ray's own parser, of the command that `words` names."""
    command: Any = _rays_own()
    with click.Context(command, info_name="ray") as context:
        while isinstance(command, click.Group):
            found = command.get_command(context, words[0]) if words else None
            if not words:
                raise Incomplete(f"which command of {command.name}?")
            if found is None:
                raise Refused(f"ray has no command {words[0]}")
            command, words = found, words[1:]
        try:
            told = command.make_context("ray", list(words), resilient_parsing=False).params
        except click.MissingParameter as error:
            raise Incomplete(error.format_message()) from None
        except click.ClickException as error:
            raise Refused(error.format_message()) from None
    if told.get("runtime_env_json"):
        env = json.loads(told["runtime_env_json"])
        if set(env) - {"env_vars", "working_dir", "pip"}:
            raise Refused(f"what is {env} to a job?")
    if told.get("entrypoint"):
        _check(list(told["entrypoint"]), home)


def _pip(words: list[str], home: Path) -> None:
    """The extras of this package that are asked for exist."""
    extras = set(tomllib.loads((ROOT / "packages.toml").read_text(encoding="utf-8"))["extras"])
    for word in words:
        found = re.fullmatch(r"(?:\.|dist/.*)\[([a-z,]+)\]", word)
        if found and (unknown := set(found[1].split(",")) - extras):
            raise Refused(f"the package has no extras {unknown}")


def _script(words: list[str], home: Path) -> None:
    """A file of the checkout, with its own parser if it has one."""
    _files(words)
    if (file := ROOT / words[0]).is_file():
        parsed(file, words[1:])


def _watch(words: list[str], home: Path) -> None:
    start = next(i for i, word in enumerate(words) if word in ("python", "ray", "async-grpo"))
    _check(words[start:], home)


def _kubectl(words: list[str], home: Path) -> None:
    """Files exist, and what is executed in a pod could be."""
    _files(words)
    if "--" in words:
        _check(words[words.index("--") + 1 :], home)


def _docker(words: list[str], home: Path) -> None:
    """Arguments of a build are the Dockerfile's; what is executed in a container could be."""
    if "async-grpo" in words:
        _check(words[words.index("async-grpo") :], home)
    known = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    for option, value in itertools.pairwise(words):
        if option == "--build-arg" and value.partition("=")[0] not in known:
            raise Refused(f"the Dockerfile has no {value}")


def _sky(words: list[str], home: Path) -> None:
    """The task is there."""
    _files(words)


def _sbatch(words: list[str], home: Path) -> None:
    """The script exists; what follows is for the run that it starts."""
    _files(words)
    first = next(i for i, word in enumerate(words) if not word.startswith("--"))
    if (ROOT / words[first]).is_file():
        _module("async_grpo.run", words[first + 1 :], home)


def _console_script(words: list[str], home: Path) -> None:
    _module("async_grpo", words, home)


CHECKS: dict[str, Callable[[list[str], Path], None]] = {
    "async-grpo": _console_script,
    "docker": _docker,
    "kubectl": _kubectl,
    "make": _make,
    "pip": _pip,
    "python": _script,
    "ray": _ray,
    "sbatch": _sbatch,
    "sky": _sky,
    "watch": _watch,
}
PLAIN = (".", "cd", "export", "git", "jq", "pre-commit", "scancel", "squeue")
"""Commands of other programs, whose words are not looked at."""
