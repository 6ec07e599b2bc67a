"""What another system's configuration says: one value per dotted key, whatever it was written in.

Runs in: a terminal (`async-grpo migrate`). Hides YAML, TOML, command lines, and hydra's
`${...}`. Invariants: every value of the file is a `given` one, or among what is `left`;
whatever the file holds, `read_source` returns or raises SetupError with one sentence.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.config import yaml12
from async_grpo.config.docs import single_line
from async_grpo.errors import SetupError
from async_grpo.tools.migrate import command_lines

TRUE = ("true", "yes", "on", "1")
"""Words of YAML 1.1, in lower case."""
LARGEST_BYTES, MOST_KEYS = 2**20, 5_000
"""Sizes beyond which a file is no configuration."""
_NUMBER = re.compile(r"\s*[-+]?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][-+]?\d{1,3})?\s*")


@dataclass(frozen=True)
class Source:
    """A configuration of another system, flat. program: what its command starts; left: what counts
    for nothing there, as (key, value, reason).
    """

    name: str
    given: Mapping[str, Any]
    program: str = ""
    left: tuple[tuple[str, Any, str], ...] = ()
    unresolved: frozenset[str] = field(default=frozenset())
    """Keys whose values refer to something that the file does not hold."""

    def find(self, key: str, default: Any = None) -> Any:
        """Return the value of the key, given in full or by the end of its path; `default` for none,
        null, and what cannot be resolved.
        """
        for path in (key, *(path for path in self.given if path.endswith(f".{key}"))):
            if path in self.given and path not in self.unresolved:
                value = self.given[path]
                return default if value is None else value
        return default

    def number(self, key: str, default: float = 0) -> float:
        """Return the number under the key, also of a text; `default` for anything else."""
        value = self.find(key, default)
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return value if known and abs(value) < 2**63 else default

    def on(self, *keys: str) -> bool:
        """Whether one of the keys is true, also in YAML 1.1's words."""
        return any(str(self.find(key)).lower() in TRUE for key in keys)

    def has(self, *keys: str) -> bool:
        """Whether one of the keys is given a value."""
        return any(self.find(key) is not None for key in keys)


def read_source(path: Path) -> Source:
    """Read a file. Raises SetupError."""
    shown, text = single_line(str(path)), text_of(path)
    kind = _kind(path.suffix, text)
    line = command_lines.CommandLine()
    if kind == "command":
        line = command_lines.command_line_of(text)
        if not line.options:
            raise SetupError(f"{shown} holds no command line with options.")
    else:
        line.options += _flat(shown, _tree(kind, shown, text))
    given: dict[str, Any] = {}
    for key, value in line.options:
        if key in given:
            line.left.append((key, given[key], "given again further on, which counts"))
        given[key] = value
    values, unresolved = resolve_all(given)
    name, left = single_line(path.name), tuple(line.left)
    return Source(name, values, line.program, left, frozenset(unresolved))


def text_of(path: Path) -> str:
    """Read a file of text. Raises SetupError."""
    shown = single_line(str(path))
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise SetupError(f"{shown} is a directory; name the configuration file in it.")
        if not stat.S_ISREG(found.st_mode):
            raise SetupError(f"{shown} is no regular file.")
        if found.st_size > LARGEST_BYTES:
            raise SetupError(
                f"{shown} has {found.st_size:,} bytes, which is no configuration; allowed are "
                f"{LARGEST_BYTES:,}."
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SetupError(f"{shown} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # what is not UTF-8, and a path with a null character
        raise SetupError(f"{shown} cannot be read: it is not UTF-8 text.") from error
    if "\0" in text:
        raise SetupError(f"{shown} cannot be read: it is not text.")
    if not text.strip():
        raise SetupError(f"{shown} is empty.")
    return text.replace("\r\n", "\n")


def _kind(suffix: str, text: str) -> str:
    known = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
    return known.get(suffix) or ("command" if command_lines.looks_like_a_command(text) else "yaml")


def _tree(kind: str, shown: str, text: str) -> Any:
    try:
        return tomllib.loads(text) if kind == "toml" else yaml12.read(text)[0]
    except (ValueError, RecursionError) as error:
        line = getattr(error, "line", 0)
        at = f", line {line}" if line else ""
        why = single_line(str(error)) if isinstance(error, ValueError) else "nested too deeply"
        raise SetupError(f"{shown}{at}: this is not valid {kind.upper()}: {why}.") from error


def _flat(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Go through the values with their dotted keys; lists of tables are numbered."""
    if not isinstance(tree, dict) or not tree:
        raise SetupError(f"{path} holds no keys: a configuration is a mapping.")
    stack: list[tuple[str, Any]] = [("", tree)]
    count = 0
    while stack:
        key, value = stack.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            inner = [(str(name), part) for name, part in value.items()]
        elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
            inner = [(str(index), part) for index, part in enumerate(value)]
        if inner:
            stack += [(f"{key}.{name}" if key else name, part) for name, part in reversed(inner)]
            continue
        count += 1
        if count > MOST_KEYS:
            raise SetupError(f"{path} has more than {MOST_KEYS:,} keys, which is no configuration.")
        yield re.sub(r"\s", "_", key), value


# ---- references between keys, as hydra writes them: `${data.max_prompt_length}`, `${.n}`,
# `${oc.env:HOME,/tmp}`; and `???`, a value that is missing. OmegaConf would look into the
# environment of this machine, and give up at a reference that leads out of the file.

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MISSING = object()
_LONGEST = 10_000
"""Characters of a value, references replaced."""


def resolve_all(given: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the values with their references replaced, and the keys where one could not be: of
    what refers to itself, to the environment, or to something that the file does not hold.
    """
    done: dict[str, Any] = {}
    values = {key: _value(key, given, done, set()) for key in given}
    return values, {key for key, value in values.items() if _is_open(value)}


def _is_open(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, str) and ("${" in part or part == "???") for part in parts)


def _value(key: str, given: Mapping[str, Any], done: dict[str, Any], under_way: set[str]) -> Any:
    value = given[key]
    if key in done:
        return done[key]
    if key in under_way or len(under_way) > 100:
        return value  # refers to itself

    def found(inside: str) -> Any:
        name, colon, rest = inside.partition(":")
        first, comma, default = rest.partition(",")
        if not colon or name == "oc.select":
            path = _absolute(key, first if colon else name)
            if path in given:
                return _value(path, given, done, under_way)
        # the environment of the machine that the file was written for is not here
        if name in ("oc.env", "env", "oc.select") and comma:
            return command_lines.scalar(default)
        return command_lines.scalar(rest) if name == "oc.decode" else _MISSING

    under_way.add(key)
    parts = [_replaced(part, found) for part in (value if isinstance(value, list) else [value])]
    under_way.discard(key)
    done[key] = parts if isinstance(value, list) else parts[0]
    return done[key]


def _replaced(text: Any, found: Callable[[str], Any]) -> Any:
    """Put values in the place of references, the innermost first."""
    position = 0
    while isinstance(text, str) and (match := _INNERMOST.search(text, position)) is not None:
        value = found(match[1].strip())
        if value is _MISSING or (isinstance(value, str) and "${" in value):
            position = match.end()
        elif match.span() == (0, len(text)):
            return value
        else:
            text, position = f"{text[: match.start()]}{value}{text[match.end() :]}", 0
            if len(text) > _LONGEST:
                return text[:_LONGEST] + "${...}"
    return text


def _absolute(key: str, name: str) -> str:
    """Return the whole path; `.x` is beside the key, `..x` beside the section around it."""
    inner = name.lstrip(".")
    dots = len(name) - len(inner)
    return ".".join([*key.split(".")[:-dots], inner]) if dots else name
