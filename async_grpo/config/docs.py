"""The reference page of all settings, written from the schema; and what a setting may hold, in
words.

Runs in: a terminal (`python -m async_grpo.config.docs` writes docs/configuration.md, `--check`
compares), and any process that reports errors. Hides pydantic's JSON schema. Invariants: the page
holds every setting once; all of it is derived from the schema, so it cannot disagree with it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.config.yaml12 import write

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


PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m async_grpo.config.docs` from the schema: change it there. -->

A run is described by one YAML file and any number of overrides:

```
python -m async_grpo.run configs/quickstart.yaml rollout.group_size=16 learner.lr=5e-5
```

- An override is `section.key=value`; the value is YAML (`null`, `[0.9, 0.99]`, `{a: 1}`) and
  replaces the whole value of its key.
- Scalars follow YAML 1.2: `1e-4` is a number, `on` and `off` are text, only `true` and `false` are
  booleans. A key given twice is an error.
- An unknown key, a value of the wrong type, a combination that cannot work, and a setting without
  effect because the setting that it belongs to is off (`kl_loss_coef` without `use_kl_loss`) end
  the start with one message. Two things pass: what the run that is continued has stored, and what
  the file says for a setting that an override turns off, as in an ablation.
- A relative `run.dir` is relative to the current directory. In a Ray job with `--working-dir` the
  current directory is a package that is thrown away, so there it is relative to
  `$ASYNC_GRPO_HOME`, and where that is not set to `~/async_grpo`.
- The column `resume` says whether a run that continues from a checkpoint may have another value:
  `free` yes; `warn` yes, and one line says what it changes; `fixed` no, the start ends with exit
  code 2. With `warn*` the learner computes something else from then on, so learner steps that were
  lost with an interruption cannot be repeated from the journal as they were.
- `config.yaml` in the run directory holds the complete configuration of the run, defaults included,
  and can be run again.
"""


def render() -> str:
    """Return the page as Markdown."""
    known = settings()
    keys: dict[str, list[Setting]] = defaultdict(list)
    for setting in known.values():
        if not setting.section:
            keys[setting.name.rpartition(".")[0]].append(setting)
    parts = [_INTRODUCTION, *_table(keys[""])]
    for section in (setting for setting in known.values() if setting.section):
        parts.append(f"\n## `{section.name}`\n")
        if section.description:
            null = section.default is None
            resume = f" Default: `null`. Resume: {_resume(section.name)}." if null else ""
            parts.append(f"{section.description}{resume}\n")
        parts += _table(keys[section.name])
    return "\n".join(parts) + "\n"


def _table(keys: list[Setting]) -> list[str]:
    if not keys:
        return []
    rows = ["| key | allowed | default | resume | meaning |", "| --- | --- | --- | --- | --- |"]
    for key in keys:
        cells = (
            f"`{key.name.rpartition('.')[2]}`",
            key.allowed,
            f"`{_default(key)}`",
            _resume(key.name),
            key.description,
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _resume(name: str) -> str:
    from async_grpo.config.resume import marks  # which reads this module's table of settings

    mark = marks()[name]
    return mark.level + ("*" if mark.trains and mark.level == "warn" else "")


def _default(setting: Setting) -> str:
    if isinstance(setting.default, (list, dict)):
        return str(setting.default)
    return write(setting.default).removesuffix("...\n").strip()


def keep(page: Path, text: Callable[[], str], arguments: list[str], *, command: str) -> int:
    """Write a page that `command` makes, or `--check` it; the exit code: 0 when it is up to date
    afterwards, 1 if not, 2 outside a checkout.
    """
    if not page.parent.is_dir():
        print("error: the page is written in a checkout of the source only", file=sys.stderr)
        return 2
    if arguments == ["--check"]:
        fresh = page.is_file() and page.read_text(encoding="utf-8") == text()
        print(f"{page} is {'up to date' if fresh else f'out of date: run {command}'}")
        return 0 if fresh else 1
    page.write_text(text(), encoding="utf-8")
    print(f"wrote {page}")
    return 0


def main(arguments: list[str]) -> int:
    """Write the page, or `--check` it; 0 when it is up to date afterwards, 2 outside a checkout."""
    return keep(PAGE, render, arguments, command="python -m async_grpo.config.docs")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
