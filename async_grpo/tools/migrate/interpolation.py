"""References between keys, as hydra writes them: `${data.max_prompt_length}`, `${.n}`,
`${oc.env:HOME,/tmp}`; and `???`, a value that is missing.

Runs in: a terminal. Hides their grammar. OmegaConf would look into the environment of this machine,
and give up at a reference that leads out of the file. Invariant: what refers to itself, to the
environment or to something that the file does not hold stays as it is, and its key is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from async_grpo.config import yaml12

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MISSING = object()
_LONGEST = 10_000
"""Characters of a value, references replaced."""


def resolve_all(given: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the values with their references replaced, and the keys where one could not be."""
    resolver = _Resolver(given)
    values = {key: resolver.value(key) for key in given}
    return values, {key for key, value in values.items() if _is_open(value)}


def _is_open(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, str) and ("${" in part or part == "???") for part in parts)


class _Resolver:
    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._done = given, dict[str, Any]()
        self._under_way: set[str] = set()

    def value(self, key: str) -> Any:
        """Return a key's value with its references replaced where they can be."""
        if key not in self._done:
            if key in self._under_way or len(self._under_way) > 100:
                return self._given[key]  # refers to itself
            self._under_way.add(key)
            value = self._given[key]
            if isinstance(value, list):
                value = [self._text(key, part) if isinstance(part, str) else part for part in value]
            elif isinstance(value, str):
                value = self._text(key, value)
            self._under_way.discard(key)
            self._done[key] = value
        return self._done[key]

    def _text(self, key: str, text: str) -> Any:
        position = 0
        while (found := _INNERMOST.search(text, position)) is not None:
            value = self._reference(key, found[1].strip())
            if value is _MISSING or (isinstance(value, str) and "${" in value):
                position = found.end()
                continue
            if found.span() == (0, len(text)):
                return value
            text = f"{text[: found.start()]}{value}{text[found.end() :]}"
            position = 0
            if len(text) > _LONGEST:
                return text[:_LONGEST] + "${...}"
        return text

    def _reference(self, key: str, inside: str) -> Any:
        name, colon, rest = inside.partition(":")
        if colon:
            first, comma, default = rest.partition(",")
            if name == "oc.select" and self._absolute(key, first) in self._given:
                return self.value(self._absolute(key, first))
            # the environment of the machine that the file was written for is not here
            if name in ("oc.env", "env", "oc.select") and comma:
                return _scalar(default)
            return _scalar(rest) if name == "oc.decode" else _MISSING
        path = self._absolute(key, name)
        return self.value(path) if path in self._given else _MISSING

    @staticmethod
    def _absolute(key: str, name: str) -> str:
        """Return the whole path; `.x` is beside the key, `..x` beside the section around it."""
        inner = name.lstrip(".")
        dots = len(name) - len(inner)
        if not dots:
            return name
        around = key.split(".")[:-dots]
        return ".".join([*around, inner])


def _scalar(text: str) -> Any:
    try:
        value, _ = yaml12.read(text)
    except yaml12.YamlError:
        return text.strip()
    return value
