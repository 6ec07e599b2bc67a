"""Every setting, and what it may hold in words.

Runs in: any process that reports errors. Hides pydantic's JSON schema. Invariant: all of it is
derived from the schema, so it cannot disagree with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from async_grpo.config.choice import OneOf
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
    kind: str = ""
    """Of a setting that names one of several with its options: the kind (`choice.REGISTRIES`)."""

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
            kind = _kind_of(spec)
            target = None if kind else _section_of(spec)
            inner = schema["$defs"][target] if target else None
            description = spec.get("description") or (inner or {}).get("description", "")
            allowed = _section_words(inner, spec) if inner else words(_inlined(spec, schema))
            found[name] = Setting(
                name=name,
                section=inner is not None,
                allowed=allowed,
                default=spec.get("default"),
                description=" ".join(description.split()),
                kind=kind,
            )
            if inner:
                visit(inner, f"{name}.")

    visit(schema, "")
    return found


@cache
def options() -> dict[str, Setting]:
    """Return every option of what is built in, by the setting that chooses it, its name and the
    option: `algorithm.policy_loss.sapo.tau_pos`.
    """
    found: dict[str, Setting] = {}
    for setting in settings().values():
        for name in OneOf(setting.kind).built_in if setting.kind else ():
            own = OneOf(setting.kind).options(name)
            schema = {} if own is None else TypeAdapter(own).json_schema()["properties"]
            for key, spec in schema.items():
                found[f"{setting.name}.{name}.{key}"] = Setting(
                    name=f"{setting.name}.{name}.{key}",
                    section=False,
                    allowed=words(spec),
                    default=spec["default"],
                    description=spec["description"],
                )
    return found


def spelled(name: str) -> str:
    """Write a setting, or an option, by its name: `learner.lr`, or `algorithm.policy_loss: {name:
    sapo, tau_pos: ...}`.
    """
    if name not in options():
        return name
    setting, chosen, key = name.rsplit(".", 2)
    return f"{setting}: {{name: {chosen}, {key}: ...}}"


def _kind_of(spec: dict[str, Any]) -> str:
    """Return the kind of the choice that `spec` is, or is a list of, or may be; else ""."""
    for part in (spec, *spec.get("anyOf", ()), spec.get("items", {})):
        if "kind" in part:
            return str(part["kind"])
    return ""


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
    if "kind" in spec:
        names = ", ".join(spec["enum"])
        own = f"one of {names}" if names else "the name of a plugin's"
        return f"{own}, or a mapping of `name` and its options"
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
