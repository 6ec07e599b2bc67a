"""The reference page of the command line, written from the parsers of the verbs."""

from __future__ import annotations

import argparse
import importlib

from async_grpo.cli import PROGRAM, VERBS
from async_grpo.config.command_line import Parser
from async_grpo.errors import EXIT_MEANING

_INTRODUCTION = f"""\
# Command line

<!-- Written by `make docs` from the code: change it there. -->

A command is `{PROGRAM}`, a verb and its arguments; `python -m async_grpo` takes the same. In a Ray
job, `python -m async_grpo.run CONFIG` is the same as `{PROGRAM} train CONFIG`.
A verb that takes a run takes the newest one in `runs/` where none is named.

| verb | what it does |
|---|---|
"""


def render() -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION.rstrip("\n")]
    parts += [f"| [`{verb}`](#{verb}) | {what} |" for verb, (_, what) in VERBS.items()]
    for verb, (module, _) in VERBS.items():
        parts += ["", *_verb(verb, module)]
    parts += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_MEANING.items()]
    return "\n".join(parts) + "\n"


def _verb(verb: str, module: str) -> list[str]:
    home = importlib.import_module(module)
    parser = Parser(prog=f"{PROGRAM} {verb}", description=home.DESCRIPTION, add_help=False)
    home.arguments(parser)
    taken = parser._actions
    usage = " ".join([f"{PROGRAM} {verb}", *map(_usage, taken)])
    lines = [f"## `{verb}`", "", home.DESCRIPTION, "", "```text", usage, "```"]
    if taken:
        lines += ["", "| argument | meaning |", "|---|---|"]
        lines += [f"| `{_name(one)}` | {_meaning(one)} |" for one in taken]
    return lines


def _name(one: argparse.Action) -> str:
    value = "" if one.nargs == 0 else str(one.metavar or one.dest.upper())
    return f"{', '.join(one.option_strings)} {value}".strip().replace("|", "\\|")


def _usage(one: argparse.Action) -> str:
    value = "" if one.nargs == 0 else str(one.metavar or one.dest.upper())
    shown = f"{one.option_strings[-1] if one.option_strings else ''} {value}".strip()
    shown += " ..." if one.nargs == "*" else ""
    return shown if one.required and one.nargs != "*" else f"[{shown}]"


def _meaning(one: argparse.Action) -> str:
    text = (one.help or "").replace("|", "\\|")
    listed = [str(choice) for choice in one.choices or ()]
    if listed and not all(choice in text for choice in listed):
        text += f"; one of {', '.join(listed)}"
    return text
