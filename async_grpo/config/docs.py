"""The reference page of all settings, written from the schema.

Runs in: a terminal, `python -m async_grpo.config.docs` writes docs/configuration.md (`--check` only compares). Hides nothing.
Invariant: the page holds every setting of the schema once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from async_grpo.config.describe import Setting, settings
from async_grpo.config.resume import marks
from async_grpo.config.yaml12 import write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m async_grpo.config.docs` from async_grpo/config/schema.py: change it there. -->

A run is described by one YAML file and any number of overrides:

    python -m async_grpo.run configs/quickstart.yaml rollout.group_size=16 learner.lr=5e-5

- An override is `section.key=value`; the value is YAML (`null`, `[0.9, 0.99]`, `{a: 1}`) and replaces the whole value of its key.
- Scalars follow YAML 1.2: `1e-4` is a number, `on` and `off` are text, only `true` and `false` are booleans. A key given twice is an error.
- An unknown key, a value of the wrong type and a combination that cannot work end the start with one message; nothing is ignored.
- A relative `run.dir` is relative to the current directory. In a Ray job the current directory is a package that is thrown away, so
  there it is relative to `$ASYNC_GRPO_HOME`, and where that is not set to `~/async_grpo`.
- The column `resume` says whether a run that continues from a checkpoint may have another value: `free` yes; `warn` yes, and one line
  says what it changes; `fixed` no, the start ends with exit code 2. With `warn*` the learner computes something else from then on, so
  learner steps that were lost with an interruption cannot be repeated from the journal as they were.
- `config.yaml` in the run directory holds the complete configuration of the run, defaults included, and can be run again.
"""


def render() -> str:
    """The page as Markdown."""
    known = settings()
    parts = [_INTRODUCTION, *_table([setting for setting in known.values() if not setting.section and "." not in setting.name])]
    for section in (setting for setting in known.values() if setting.section):
        keys = [setting for setting in known.values() if setting.name.rpartition(".")[0] == section.name and not setting.section]
        parts.append(f"\n## `{section.name}`\n")
        if section.description:
            null = f" Default: `null`. Resume: {_resume(section.name)}." if section.default is None else ""
            parts.append(f"{section.description}{null}\n")
        parts += _table(keys)
    return "\n".join(parts) + "\n"


def _table(keys: list[Setting]) -> list[str]:
    rows = ["| key | allowed | default | resume | meaning |", "| --- | --- | --- | --- | --- |"] if keys else []
    for key in keys:
        cells = (f"`{key.name.rpartition('.')[2]}`", key.allowed, f"`{_default(key)}`", _resume(key.name), key.description)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _resume(name: str) -> str:
    mark = marks()[name]
    return mark.level + ("*" if mark.trains and mark.level == "warn" else "")


def _default(setting: Setting) -> str:
    if isinstance(setting.default, (list, dict)):
        return str(setting.default)
    return write(setting.default).removesuffix("...\n").strip()


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` compare it; 0 when it is up to date afterwards."""
    if arguments == ["--check"]:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == render()
        print(f"{PAGE} is {'up to date' if fresh else 'out of date: run python -m async_grpo.config.docs'}")
        return 0 if fresh else 1
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
