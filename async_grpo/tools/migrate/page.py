"""The file that `migrate` writes: settings with their origins, then what was left and why.

Runs in: a terminal. Hides how YAML and its comments are laid out. Invariant: whatever keys and
values of the source hold, a comment stays one, and the settings read back as they are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from async_grpo.config import yaml12
from async_grpo.config.docs import show, single_line
from async_grpo.tools.migrate.draft import Draft, Kept

WIDTH = 110


def page(draft: Draft) -> str:
    """Return the text of the file."""
    source, peer = draft.source, draft.peer
    lines = _comment(
        f"Written by `async-grpo migrate` from {source.name}, a configuration of "
        f"{peer.name}. A comment names the key of {peer.name} that a setting comes from, with its "
        "value there where that is another one."
    )
    lines += ["", *_section(draft, (), draft.tree())]
    if draft.left:
        lines += ["", *_comment("Not taken over, each with the reason:")]
        for key, value, reason in sorted(draft.left, key=lambda one: one[0]):
            said = f"{single_line(key)}: {show(value)} -- {single_line(reason)}"
            lines += _comment(said, indent="#   ", further="#       ")
    return "\n".join(lines) + "\n"


def _section(draft: Draft, path: tuple[str, ...], tree: dict[str, Any]) -> Iterator[str]:
    """Return the lines of a section, or of a choice: its name and its options, each with its
    origin.
    """
    space, section = "  " * len(path), ".".join(path)
    for key, value in tree.items():
        name = ".".join((*path, key))
        if section in draft.kept:
            name = section if key == "name" else f"{section}.{tree['name']}.{key}"
        whole = name in draft.kept and draft.kept[name].value == value
        if whole or not isinstance(value, dict):
            yield from _setting(space, key, draft.kept[name], draft)
        else:
            yield f"{space}{key}:"
            yield from _section(draft, (*path, key), value)


def _setting(space: str, key: str, kept: Kept, draft: Draft) -> Iterator[str]:
    written, note = _written(key, kept.value), kept.note
    origins = [_origin(name, kept.value, draft) for name in kept.keys]
    alike = (one for one in draft.kept.values() if (one.keys, one.note) == (kept.keys, note))
    if next(alike) is not kept and len(note) > 40:
        origins, note = [single_line(name) for name in kept.keys[:1]], "as above"
    said = single_line("; ".join(part for part in [*origins, note] if part))
    line = f"{space}{written[0]}  # {said}"
    if said and len(written) == 1 and len(line) <= WIDTH:
        yield line
        return
    yield from _comment(said, indent=f"{space}# ", further=f"{space}# ")
    yield from (f"{space}{part}" for part in written)


def _written(key: str, value: Any) -> list[str]:
    """Return the lines of a setting, numbers of a list on one."""
    if isinstance(value, list) and value and all(isinstance(part, int | float) for part in value):
        numbers = [yaml12.write([part]).removeprefix("- ").strip() for part in value]
        return [f"{key}: [{', '.join(numbers)}]"]
    return yaml12.write({key: value}).splitlines()


def _origin(key: str, ours: Any, draft: Draft) -> str:
    value = draft.source.given[key]
    alike = type(value) is type(ours) and value == ours
    return single_line(key) if alike else f"{single_line(key)}: {show(value)}"


def _comment(text: str, *, indent: str = "# ", further: str = "# ") -> list[str]:
    wrapper = textwrap.TextWrapper(
        WIDTH, indent, further, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)
