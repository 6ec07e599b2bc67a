"""What each setting may hold, in words: for error messages and for the reference page.

Runs in: any process (imports pydantic only, through the schema). Hides the JSON-schema form in which pydantic reports types and
ranges. Invariant: everything said here is derived from the schema, so it cannot disagree with what is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from async_grpo.config.schema import Config

_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


@dataclass(frozen=True)
class Setting:
    """One key of the configuration. `name` is its dotted path; `section` says that it holds keys of its own."""

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
    """Every setting and section by dotted name, in the order of the schema; a section comes before its keys."""
    schema = Config.model_json_schema()
    found: dict[str, Setting] = {}

    def visit(node: dict[str, Any], prefix: str) -> None:
        for key, spec in node.get("properties", {}).items():
            name = f"{prefix}{key}"
            target = _section_of(spec)
            inner = schema["$defs"][target] if target else None
            description = spec.get("description") or (inner or {}).get("description", "")
            allowed = _section_words(inner, spec) if inner else _words(spec)
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


def _section_of(spec: dict[str, Any]) -> str | None:
    """Name of the section class that `spec` refers to, if any."""
    for option in (spec, *spec.get("anyOf", ()), *spec.get("allOf", ())):
        if "$ref" in option:
            return option["$ref"].rsplit("/", 1)[-1]
    return None


def _section_words(inner: dict[str, Any], spec: dict[str, Any]) -> str:
    optional = ", or null" if "anyOf" in spec else ""
    return f"a section with the keys {', '.join(inner['properties'])}{optional}"


def _words(spec: dict[str, Any]) -> str:
    """The values that a JSON-schema fragment admits, in words."""
    if "anyOf" in spec:
        options = [_words(option) for option in spec["anyOf"] if option.get("type") != "null"]
        return ", or ".join([*options, "null"])
    if "enum" in spec:
        return "one of " + ", ".join(spec["enum"])
    if "const" in spec:
        return f"only {spec['const']}"
    kind = spec.get("type")
    if kind in ("integer", "number"):
        bounds = " and ".join(f"{sign} {_plain(spec[bound])}" for bound, sign in _BOUNDS if bound in spec)
        return ("an integer" if kind == "integer" else "a number") + (f" {bounds}" if bounds else "")
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return f"text that matches {spec['pattern']}" if "pattern" in spec else "text"
    if kind == "array":
        low, high = spec.get("minItems", 0), spec.get("maxItems")
        return f"a list{f' of {low}' if low == high else ', not empty' if low else ''}, each {_words(spec['items'])}"
    if kind == "object":
        values = spec.get("additionalProperties")
        return f"a mapping from names to {_words(values)} each" if isinstance(values, dict) else "a mapping"
    raise AssertionError(f"the reference has no words for the type {spec}")


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
