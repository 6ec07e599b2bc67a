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


def scalar(text: str) -> Any:
    """Return what YAML makes of a text, the text itself where that is nothing."""
    try:
        value, _ = yaml12.read(text)
    except yaml12.YamlError:
        return text.strip()
    return value


def _is_open(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, str) and ("${" in part or part == "???") for part in parts)


class _Resolver:
    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._done = given, dict[str, Any]()
        self._under_way: set[str] = set()

    def value(self, key: str) -> Any:
        """Return a key's value with its references replaced where they can be."""
        value = self._given[key]
        if key in self._done:
            return self._done[key]
        if key in self._under_way or len(self._under_way) > 100:
            return value  # refers to itself
        self._under_way.add(key)
        parts = [self._text(key, part) for part in (value if isinstance(value, list) else [value])]
        self._under_way.discard(key)
        self._done[key] = parts if isinstance(value, list) else parts[0]
        return self._done[key]

    def _text(self, key: str, text: Any) -> Any:
        position = 0
        while isinstance(text, str) and (found := _INNERMOST.search(text, position)) is not None:
            value = self._reference(key, found[1].strip())
            if value is _MISSING or (isinstance(value, str) and "${" in value):
                position = found.end()
            elif found.span() == (0, len(text)):
                return value
            else:
                text, position = f"{text[: found.start()]}{value}{text[found.end() :]}", 0
                if len(text) > _LONGEST:
                    return text[:_LONGEST] + "${...}"
        return text

    def _reference(self, key: str, inside: str) -> Any:
        name, colon, rest = inside.partition(":")
        first, comma, default = rest.partition(",")
        if not colon or name == "oc.select":
            path = self._absolute(key, first if colon else name)
            if path in self._given:
                return self.value(path)
        # the environment of the machine that the file was written for is not here
        if name in ("oc.env", "env", "oc.select") and comma:
            return scalar(default)
        return scalar(rest) if name == "oc.decode" else _MISSING

    @staticmethod
    def _absolute(key: str, name: str) -> str:
        """Return the whole path; `.x` is beside the key, `..x` beside the section around it."""
        inner = name.lstrip(".")
        dots = len(name) - len(inner)
        return ".".join([*key.split(".")[:-dots], inner]) if dots else name
