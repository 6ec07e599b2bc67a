"""The reference pages that are written from the code: of all settings, and of the API.

    python docs/pages.py            writes docs/configuration.md and docs/api.md
    python docs/pages.py --check    compares them; 1 if one is out of date

Invariant: the first page holds every setting once, and all of it is derived from the schema.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import api_page

from async_grpo.config.docs import Setting, options, settings
from async_grpo.config.resume import marks
from async_grpo.config.yaml12 import write

DOCS = Path(__file__).parent

_INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from the schema: change it there. -->

A run is described by one YAML file and any number of overrides:

```
async-grpo train configs/quickstart.yaml rollout.group_size=16 learner.lr=5e-5
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
- A setting that names one of several (`policy_loss`, `adv_estimator`, `clip_schedule`, `backend`)
  is a bare name, or a mapping of its `name` and its options: `policy_loss: {name: sapo, tau_pos:
  2.0}`. What a plugin registers is chosen in the same way. An override may set one option:
  `algorithm.policy_loss.tau_pos=2.0`.
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
        rows.append(_row(cells))
    for key in (key for key in keys if key.kind):
        rows += _options(key)
    return rows


def _options(choice: Setting) -> list[str]:
    """Return the table of the options of what a setting may choose, if there are some."""
    own = [one for one in options().values() if one.name.startswith(f"{choice.name}.")]
    if not own:
        return []
    key = choice.name.rpartition(".")[2]
    rows = [
        f"\nOptions of `{key}`, beside its `name`:\n",
        "| name | option | allowed | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in own:
        name, option = one.name.split(".")[-2:]
        default = f"`{_default(one)}`"
        rows.append(_row((f"`{name}`", f"`{option}`", one.allowed, default, one.description)))
    return rows


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _resume(name: str) -> str:
    mark = marks()[name]
    return mark.level + ("*" if mark.trains and mark.level == "warn" else "")


def _default(setting: Setting) -> str:
    if isinstance(setting.default, (list, dict)):
        return str(setting.default)
    return write(setting.default).removesuffix("...\n").strip()


def main(arguments: list[str], *, folder: Path = DOCS) -> int:
    """Write the pages, or `--check` them; 0 when they are up to date afterwards."""
    stale = 0
    for name, text in (("configuration.md", render()), ("api.md", api_page.render())):
        page = folder / name
        if arguments != ["--check"]:
            page.write_text(text, encoding="utf-8")
        elif not page.is_file() or page.read_text(encoding="utf-8") != text:
            print(f"{page} is out of date: run `make docs`")
            stale = 1
    return stale


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
