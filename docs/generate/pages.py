"""The reference pages that are written: settings, command line and API from the code, metrics from
`metrics.toml`.

    python docs/generate/pages.py            writes them into docs/reference
    python docs/generate/pages.py --check    compares them; 1 if one is out of date

Invariant: the pages in `configuration/` hold every setting once, and all of it is derived from the
schema.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import api_page
import cli_page
import metrics_page

from async_grpo.config.docs import Setting, options, settings
from async_grpo.config.resume import marks
from async_grpo.config.yaml12 import write

REFERENCE = Path(__file__).resolve().parents[1] / "reference"

_WRITTEN = "<!-- Written by `make docs` from the schema: change it there. -->"
_INTRODUCTION = f"""\
# Configuration

{_WRITTEN}

One YAML file describes a run. Settings on the command line replace those of the file:

```
async-grpo train configs/quickstart.yaml rollout.group_size=16 learner.lr=5e-5
```

- **Overrides** are written `section.key=value`. The value is YAML (`null`, `[0.9, 0.99]`,
  `{{a: 1}}`) and replaces the whole value of its key.
- **Scalars** follow YAML 1.2. `1e-4` is a number, `on` and `off` are text, and only `true` and
  `false` are booleans. A key given twice is an error.
- **Errors** end the start with one message: an unknown key, a value of the wrong type, a
  combination that cannot work, and a setting that has no effect because another one is off
  (`kl_loss_coef` without `use_kl_loss`). A continued run may keep what it has stored, and an
  override may turn off a setting on which others in the file depend.
- **Choices by name** (`policy_loss`, `adv_estimator`, `clip_schedule`, `backend`) are a bare name,
  or a mapping of the name and its options: `policy_loss: {{name: sapo, tau_pos: 2.0}}`. Plugins
  are chosen in the same way. An override may set one option: `algorithm.policy_loss.tau_pos=2.0`.
- **Paths**: a relative `run.dir` is relative to the current directory. A Ray job with
  `--working-dir` runs in a temporary copy, so there it is relative to `$ASYNC_GRPO_HOME`, by
  default `~/async_grpo`.
- **Resume**: the column says whether a run that continues from a checkpoint may have another
  value. `free`: yes. `warn`: yes, and one line says what changes. `fixed`: no, exit code 2. With
  `warn*` the learner computes something else from then on, so learner steps that were lost cannot
  be repeated from the journal.
- **The complete configuration** of a run, defaults included, is `config.yaml` in its directory. It
  can be run again.

| section | settings | what it is about |
|---|---|---|
"""


def configuration() -> dict[str, str]:
    """Return the pages of the settings by file name: an index, and one for each section."""
    keys: dict[str, list[Setting]] = defaultdict(list)
    for setting in settings().values():
        if not setting.section:
            keys[setting.name.rpartition(".")[0]].append(setting)
    sections = [setting for setting in settings().values() if setting.section]
    pages, index = {}, [_INTRODUCTION.rstrip("\n")]
    for top in (one for one in sections if "." not in one.name):
        parts, count = [], 0
        for section in (one for one in sections if f"{one.name}.".startswith(f"{top.name}.")):
            parts += _section(section, keys[section.name])
            count += len(keys[section.name])
        pages[f"{top.name}.md"] = "\n".join([f"# `{top.name}`\n", _WRITTEN, *parts]) + "\n"
        about = top.description.partition(". ")[0].rstrip(".")
        index.append(_row((f"[`{top.name}`]({top.name}.md)", str(count), about)))
    index += ["\nOutside of the sections:\n", *_table(keys[""])]
    return {"index.md": "\n".join(index) + "\n", **pages}


def _section(section: Setting, keys: list[Setting]) -> list[str]:
    head = [] if "." not in section.name else [f"\n## `{section.name}`"]
    null = " Default: `null`. Resume: {}." if section.default is None else ""
    null = null.format(_resume(section.name)) if null else ""
    about = [f"\n{section.description}{null}\n"] if section.description or null else [""]
    return [*head, *about, *_table(keys)]


def _table(keys: list[Setting]) -> list[str]:
    if not keys:
        return []
    rows = ["| key | allowed | default | resume | meaning |", "|---|---|---|---|---|"]
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
        f"\nOptions of `{key}`, besides its `name`:\n",
        "| name | option | allowed | default | meaning |",
        "|---|---|---|---|---|",
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


def render() -> dict[str, str]:
    """Return every page by its path in docs/reference."""
    return {
        **{f"configuration/{name}": text for name, text in configuration().items()},
        "cli.md": cli_page.render(),
        "api.md": api_page.render(),
        "metrics.md": metrics_page.render(),
    }


def main(arguments: list[str], *, folder: Path = REFERENCE) -> int:
    """Write the pages, or `--check` them; 0 when they are up to date afterwards."""
    stale = 0
    for name, text in render().items():
        page = folder / name
        if arguments != ["--check"]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        elif not page.is_file() or page.read_text(encoding="utf-8") != text:
            print(f"{page} is out of date: run `make docs`")
            stale = 1
    return stale


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
