"""How a key of another system is written here: the words of the peers' tables.

Runs in: a terminal. Hides how a name of ours is found: where a rule names none, it is the one that
`config.peers` answers with, or the setting of the same name. Invariant: a converter returns what
the key sets here, or raises Untranslatable with the reason for which it sets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from async_grpo.config.docs import options, settings, show
from async_grpo.tools.migrate.answers import answer
from async_grpo.tools.migrate.names import PEERS
from async_grpo.tools.migrate.source import Source


class Untranslatable(Exception):
    """The key, or this value of it, has no counterpart; the text says why."""


@dataclass(frozen=True)
class Meant:
    """What a key sets here, and what changes with it."""

    values: Mapping[str, Any]
    note: str = ""


Convert = Callable[[Any, Source], Meant]
"""From the value of a key, and the file around it, to settings."""


@dataclass(frozen=True)
class KeyRule:
    """What becomes of the keys that end like one of the patterns (behind `^`: are like it)."""

    keys: str
    convert: Convert
    ours: str = ""
    """The setting, where it is always the same one."""

    def matches(self, key: str) -> bool:
        """Whether the rule is about the key."""
        for pattern in self.keys.split():
            if fnmatchcase(key, pattern.removeprefix("^")):
                return True
            if not pattern.startswith("^") and fnmatchcase(key, f"*.{pattern}"):
                return True
        return False


@dataclass(frozen=True)
class Peer:
    """Another system. option: its word for `--from`; signs: keys by which a file of its is known;
    programs: parts of what starts it; implied: what it does where the file says nothing, as
    (setting, value, why), and which its configuration here has to say.
    """

    name: str
    option: str
    signs: str
    programs: tuple[str, ...]
    rules: tuple[KeyRule, ...]
    implied: Callable[[Source], Iterable[tuple[str, Any, str]]]

    def marks(self, source: Source) -> int:
        """Count the signs by which the file is one of this system."""
        signs = [KeyRule(sign, _nothing) for sign in self.signs.split()]
        found = sum(any(sign.matches(key) for key in source.given) for sign in signs)
        started = any(part in source.program for part in self.programs)
        return found + 10 * started

    def rule(self, key: str) -> KeyRule | None:
        """Return the first rule that is about the key."""
        return next((rule for rule in self.rules if rule.matches(key)), None)


def _nothing(value: Any, source: Source) -> Meant:
    return Meant({})


@cache
def home(key: str) -> str:
    """Return our setting for a key of theirs: of `config.peers`, or the only one of its name."""
    leaf = key.rpartition(".")[2]
    if leaf in PEERS:
        return PEERS[leaf]
    same = [
        name
        for name, one in settings().items()
        if name.rpartition(".")[2] == leaf and not one.section
    ]
    if len(same) != 1:
        raise LookupError(f"{key} has no home of its own: name the setting")
    return same[0]


# ---- rules ----


def same(keys: str, ours: str = "", note: str = "") -> KeyRule:
    """Take a value as it is; for a setting that is a number, also a text that is one."""
    name = ours or home(keys.split()[0].removeprefix("^"))
    allowed = (settings() | options())[name].allowed

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(part) for part in value]
        if isinstance(value, str | float) and allowed.startswith("an integer"):
            return whole(value)
        numeric = allowed.startswith("a number") or "each a number" in allowed
        return number(value) if isinstance(value, str) and numeric else value

    return to(keys, name, change, note)


def to(keys: str, ours: str, change: Callable[[Any], Any], note: str = "") -> KeyRule:
    """Take what `change` makes of the value."""
    name = ours or home(keys.split()[0].removeprefix("^"))

    def convert(value: Any, source: Source) -> Meant:
        if value is None:
            raise Untranslatable("null there: what is not set here has our default")
        return Meant({name: change(value)}, note)

    return KeyRule(keys, convert, name)


def switch(keys: str, ours: str = "", note: str = "") -> KeyRule:
    """Take a boolean, also in YAML 1.1's words."""
    return to(keys, ours, boolean, note)


def words(keys: str, ours: str, table: Mapping[Any, Any], note: str = "") -> KeyRule:
    """Take the word of ours for each of theirs; a text in place of it behind `-` is a reason."""

    def change(value: Any) -> Any:
        known = {str(theirs).lower(): meant for theirs, meant in table.items()}
        meant = known.get(str(value).lower())
        if meant is None:
            raise Untranslatable(f"no counterpart of {show(value)} is here")
        if isinstance(meant, str) and meant.startswith("- "):
            raise Untranslatable(meant.removeprefix("- "))
        return meant

    return to(keys, ours, change, note)


def none(keys: str, reason: str) -> KeyRule:
    """Keys without counterpart, and the reason."""

    def convert(value: Any, source: Source) -> Meant:
        raise Untranslatable(reason)

    return KeyRule(keys, convert)


def answered(keys: str) -> KeyRule:
    """Keys that a start of a run answers with what to do (`config.peer_answers`)."""

    def convert(value: Any, source: Source) -> Meant:
        raise Untranslatable(spoken(keys.split()[0].strip("^*.").split("."), value))

    return KeyRule(keys, convert)


def spoken(path: list[str], value: Any) -> str:
    """Return what a start of a run says about an unknown key, "" for nothing special."""
    return answer(path, value).partition(": ")[2].removesuffix(".")


def every(keys: str, ours: str, note: str = "") -> KeyRule:
    """Take a period in steps, of which theirs is 0 or below for never."""
    return to(keys, ours, lambda value: max(0, whole(value)), note)


def by(keys: str, convert: Convert) -> KeyRule:
    """Leave it to a converter."""
    return KeyRule(keys, convert)


# ---- values ----


def boolean(value: Any) -> bool:
    """Return a boolean, also of text. Raises Untranslatable."""
    table = {"true": True, "yes": True, "on": True, "1": True}
    table |= {"false": False, "no": False, "off": False, "0": False, "none": False}
    meant = table.get(str(value).lower())
    if meant is None:
        raise Untranslatable(f"{show(value)} is not true or false")
    return meant


def number(value: Any) -> float:
    """Return a finite number, also of text. Raises Untranslatable."""
    if not isinstance(value, bool):
        try:
            result = float(value)
        except (TypeError, ValueError, OverflowError):
            result = math.nan
        if math.isfinite(result):
            return value if isinstance(value, int | float) else result
    raise Untranslatable(f"{show(value)} is not a number")


def whole(value: Any) -> int:
    """Return an integer. Raises Untranslatable."""
    result = number(value)
    if result != int(result):
        raise Untranslatable(f"{show(value)} is not an integer")
    return int(result)


def pair(value: Any) -> tuple[float, float]:
    """Return two numbers of a list, or of `lo_hi`. Raises Untranslatable."""
    parts = value.split("_") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise Untranslatable(f"{show(value)} is not a pair of numbers")
    return number(parts[0]), number(parts[1])


def text(value: Any) -> str:
    """Return a text. Raises Untranslatable."""
    if not isinstance(value, str) or not value.strip():
        raise Untranslatable(f"{show(value)} is not a text")
    return value.strip()


def groups_of(rows: float, group_size: float) -> int:
    """Return how many groups so many rows are, at least 1; parts of groups count as one."""
    return max(1, math.ceil(rows / max(1, group_size)))
