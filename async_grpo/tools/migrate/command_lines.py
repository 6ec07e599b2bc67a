"""Command lines in shell scripts: the options of the command that trains.

Runs in: a terminal. Hides how programs take options: `--key value`, hydra's `key=value`, those of
what launches a program. Invariant: every word behind the program is an option, part of one, or
among what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from async_grpo.config import yaml12
from async_grpo.errors import SetupError
from async_grpo.tools.migrate.shell import ShellScript

PROGRAMS = ("openrlhf", "verl", "roll", "start_rlvr_pipeline", "recipe", "areal", "prime_rl", "trl")
"""What the path of a command that trains has in it, as a word."""
_OVERRIDE = re.compile(r"(?:~|\+{0,2}(?=[^=]*=))([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
"""What hydra sets, `key=value`, or deletes, `~key`."""
_REDIRECTION = re.compile(r"\d*[<>]")
_ALONE = re.compile(r"-[A-Za-z]\w*|\$\{[@*]\}")
"""A short option, or what the script itself is given: no value of the option in front of it."""
_MOST = 10_000
"""Words beyond which a command is no configuration."""
_PROCESSES = ("num_processes", "nproc_per_node", "nnodes")
"""Options of accelerate and torchrun that sizes per process are multiplied by."""
_STARTED = re.compile(r"\w+(\.\w+)+|.*\.py")
"""A module or a script, and no name in the command of something else."""
_OTHER = "it has no more options than the one that is read; give it a separate file"
_BESIDE = "next to the options"
"""Stands for the key of a word that has none."""
_UNKNOWN = "what this word means there is not known"


@dataclass
class CommandLine:
    """What a command starts, its options in their order, and the rest: key, value, reason."""

    program: str = ""
    options: list[tuple[str, Any]] = field(default_factory=list)
    left: list[tuple[str, Any, str]] = field(default_factory=list)


def looks_like_a_command(text: str) -> bool:
    """Whether the text is a script or a command line, and no YAML."""
    return text.startswith("#!") or bool(
        re.search(r"(^|\s)(--[a-z][\w.-]*[ =]|python3?\s+(-\w\s+)*-m\s)", text)
    )


def command_line_of(text: str) -> CommandLine:
    """Return the command of a script that trains. Raises SetupError."""
    script, best, others = ShellScript(text), CommandLine(), list[CommandLine]()
    for words in script.commands():
        if len(words) > _MOST:
            raise SetupError(f"A command of {len(words):,} words is no configuration.")
        found = _read(words)
        if (bool(found.program), len(found.options)) > (bool(best.program), len(best.options)):
            best, found = found, best
        others += [found] if _STARTED.fullmatch(found.program) and found.options else []
    best.left += [("another command", one.program, _OTHER) for one in others]
    best.left += script.conditional()
    return best


def _read(words: list[str]) -> CommandLine:
    at = _program(words)
    found = CommandLine(words[at] if at < len(words) and _trains(words[at]) else "")
    launching, arguments = words[:at], words[at + 1 :]
    while "--" in launching:  # behind what submits a job
        launching = launching[launching.index("--") + 1 :]
    launcher = CommandLine()
    _take([word for word in launching if not _OVERRIDE.fullmatch(word)], launcher)
    for key, value in launcher.options:
        if key in _PROCESSES:
            found.options.append((key, value))
        else:
            found.left.append((key, value, "an option of what launches the program"))
    script = bool(arguments) and arguments[0].endswith(".py")  # what the program starts
    _take(arguments[script:], found)
    return found


def _program(words: list[str]) -> int:
    """Find the word that trains: of a known name, else a module or script, else the command."""
    places = range(len(words))
    named = [at for at in places if _trains(words[at])]
    modules = [at for at in places if at and words[at - 1] == "-m"]
    scripts = [at for at in places if words[at].endswith(".py") and "=" not in words[at]]
    started = [at for at in named if words[at].endswith(".py") or words[at - 1] == "-m"]
    return next(iter([*started, *named, *modules, *scripts]), 0)


def _trains(word: str) -> bool:
    known = not word.startswith("-") and "=" not in word
    return known and bool(set(re.split(r"[./]", word)) & set(PROGRAMS))


def _take(words: list[str], found: CommandLine) -> None:
    """Pair options with their values: `--key value`, `--key=value`, `--switch`, `key=value`."""
    option, values, given = "", list[str](), list[tuple[str, Any, str]]()
    for word in [*_without_redirections(words), "--"]:
        wanted = bool(option) and not values
        set_or_deleted = None if wanted else _OVERRIDE.fullmatch(word)
        if not (word.startswith("--") or set_or_deleted or _ALONE.fullmatch(word)):
            values.append(word)
            continue
        if option:
            given.append((option, _value(values), ""))
        else:
            found.left += [(_BESIDE, value, _UNKNOWN) for value in values]
        option, values = "", []
        if set_or_deleted and word.startswith("~"):
            given.append((set_or_deleted[1], word, word))
        elif set_or_deleted:
            given.append((set_or_deleted[1], _value([set_or_deleted[2]]), ""))
        elif word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            option, values = option.replace("-", "_"), [value] if equals else []
        else:
            found.left.append((_BESIDE, word, _UNKNOWN))
    _delete(given, found)


def _delete(given: list[tuple[str, Any, str]], found: CommandLine) -> None:
    """Take in the options that hydra does not delete further on: a key, or all of a section."""
    later: dict[str, str] = {}
    options, left = list[tuple[str, Any]](), list[tuple[str, Any, str]]()
    for key, value, deletion in reversed(given):
        section = key if later else ""
        while section and section not in later:
            section = section.rpartition(".")[0]
        if deletion:
            left.append((key, value, "deleted there, so it counts as not given"))
            later[key] = deletion
        elif section:
            left.append((key, value, f"deleted further on, by {later[section]}"))
        else:
            options.append((key, value))
    found.options += reversed(options)
    found.left += reversed(left)


def _without_redirections(words: list[str]) -> Iterator[str]:
    """Leave out `> file` and `2>file`; an option in front of one ends there."""
    a_file = False
    for word in words:
        redirection = _REDIRECTION.match(word) is not None
        if redirection or not a_file:
            yield "--" if redirection else word
        a_file = redirection and word.endswith(("<", ">"))


def _value(words: list[str]) -> Any:
    values = [_scalar(word) for word in words]
    return (values[0] if len(values) == 1 else values) if values else True


def scalar(text: str) -> Any:
    """Return what YAML makes of a text, the text itself where that is nothing."""
    try:
        value, _ = yaml12.read(text)
    except yaml12.YamlError:
        return text.strip()
    return value


def _scalar(text: str) -> Any:
    value = scalar(text)
    return value if isinstance(value, int | float | list | None) else text
