"""Every setting, and what it may hold in words.

Runs in: any process that reports errors. Hides pydantic's JSON schema. Invariant: all of it is
derived from the schema, so it cannot disagree with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from async_grpo.config.schema import Config

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Setting:
    """One key of the configuration: `name` is its dotted path, `section` that it holds keys."""

    name: str
    section: bool
    allowed: str
    default: Any
    description: str

    @property
    def path(self) -> tuple[str, ...]:
        """The dotted path as its parts."""
        return tuple(self.name.split("."))


@cache
def settings() -> dict[str, Setting]:
    """Every setting and section by dotted name, in schema order, a section before its keys."""
    schema = Config.model_json_schema()
    found: dict[str, Setting] = {}

    def visit(node: dict[str, Any], prefix: str) -> None:
        for key, spec in node.get("properties", {}).items():
            name = f"{prefix}{key}"
            target = _section_of(spec)
            inner = schema["$defs"][target] if target else None
            description = spec.get("description") or (inner or {}).get("description", "")
            allowed = _section_words(inner, spec) if inner else words(_inlined(spec, schema))
            found[name] = Setting(
                name=name,
                section=inner is not None,
                allowed=allowed,
                default=spec.get("default"),
                description=" ".join(description.split()),
            )
            if inner:
                visit(inner, f"{name}.")

    visit(schema, "")
    return found


def _inlined(spec: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return `spec` with the section that the entries of a list are, in place of its name."""
    target = _section_of(spec.get("items", {}))
    return spec if target is None else {**spec, "items": schema["$defs"][target]}


def _section_of(spec: dict[str, Any]) -> str | None:
    """Name of the section class that `spec` refers to, if any."""
    for option in (spec, *spec.get("anyOf", ()), *spec.get("allOf", ())):
        if "$ref" in option:
            return str(option["$ref"]).rsplit("/", 1)[-1]
    return None


def _section_words(inner: dict[str, Any], spec: dict[str, Any]) -> str:
    optional = ", or null" if "anyOf" in spec else ""
    return f"a section with the keys {', '.join(inner['properties'])}{optional}"


def words(spec: dict[str, Any]) -> str:
    """Return the values that a JSON-schema fragment admits, in words."""
    if "anyOf" in spec:
        return ", or ".join(words(option) for option in spec["anyOf"])
    if "enum" in spec:
        return "one of " + ", ".join(spec["enum"])
    if "const" in spec:
        return f"only {spec['const']}"
    kind = spec.get("type")
    if kind == "null":
        return "null"
    if kind in ("integer", "number"):
        bounds = " and ".join(
            f"{sign} {_plain(spec[bound])}" for bound, sign in _BOUNDS.items() if bound in spec
        )
        return f"{'an integer' if kind == 'integer' else 'a number'} {bounds}".rstrip()
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return f"text that matches {spec['pattern']}" if "pattern" in spec else "text"
    if kind == "array":
        low, high = spec.get("minItems", 0), spec.get("maxItems")
        return (
            f"a list{f' of {low}' if low == high else ', not empty' if low else ''}, each "
            f"{words(spec['items'])}"
        )
    if kind == "object":
        if "properties" in spec:
            keys = (f"{key} ({words(of)})" for key, of in spec["properties"].items())
            return f"a mapping with {', '.join(keys)}"
        values = spec.get("additionalProperties")
        names = " or ".join(spec.get("propertyNames", {}).get("enum", ["names"]))
        each = f" from {names} to {words(values)} each" if isinstance(values, dict) else ""
        return f"a mapping{each}"
    raise AssertionError(f"the reference has no words for the type {spec}")


def single_line(text: str) -> str:
    """`text` without line breaks and without characters that a terminal cannot print."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def show(value: Any) -> str:
    """`value` as JSON on one line, shortened."""
    text = single_line(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
