"""`async-grpo migrate FILE [-o OUT.yaml]`: another system's configuration in ours.

Runs in: a terminal; nothing of the other system has to be installed. Hides which system a file is
of. Exit code 2 with one sentence for a file that cannot be used. Invariant: what is written passes
`load_config`, and names every key of the file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config.command_line import Parser
from async_grpo.errors import SetupError

if TYPE_CHECKING:
    from async_grpo.tools.migrate.draft import Draft


SYSTEMS = ("areal", "openrlhf", "prime-rl", "roll", "trl", "verl")
DESCRIPTION = (
    "Write a configuration of verl, ROLL, AReaL, TRL, OpenRLHF or prime-rl as one of async_grpo, "
    "with a comment for each key that means something else or nothing here; or one of an earlier "
    "async_grpo in the form of this one. Then: async-grpo check "
    "OUT.yaml. docs/how-to/migrate.md says what differs."
)


def arguments(parser: Parser) -> None:
    """Take a file, and where to."""
    file = "YAML, TOML, or a shell script with the command"
    parser.add_argument("file", metavar="FILE", type=Path, help=file)
    out = "where to write (default: print)"
    parser.add_argument("-o", "--out", metavar="OUT.yaml", type=Path, help=out)
    parser.add_argument(
        "--from",
        dest="option",
        choices=SYSTEMS,
        default="",
        help="the system that the file is of (default: recognised by its keys)",
    )


def run(options: argparse.Namespace) -> int:
    """Migrate it; the exit code. Raises SetupError."""

    from async_grpo.tools.migrate.page import page

    if own := _of_before(options.file):
        _write(own, options.file, options.out)
        print("settings of an earlier version, in the form of this one", file=sys.stderr)
        return 0
    draft = migrate(options.file, options.option)
    _write(page(draft), options.file, options.out)
    taken = len({key for one in draft.kept.values() for key in one.keys})
    print(
        f"{draft.peer.name}: {taken} keys taken over, {len(draft.left)} not; every one is named in "
        "the comments",
        file=sys.stderr,
    )
    return 0


def migrate(path: Path, option: str = "") -> Draft:
    """Return what a file comes to here. option: the system that it is of, "" to find out. Raises
    SetupError.
    """
    from async_grpo.tools.migrate.draft import walk
    from async_grpo.tools.migrate.peers import recognise
    from async_grpo.tools.migrate.settle import settle
    from async_grpo.tools.migrate.source import read_source

    source = read_source(path)
    draft = walk(source, recognise(source, option))
    settle(draft)
    return draft


def _of_before(path: Path) -> str:
    """Return a configuration of ours, of an earlier version, in the form of now; "" for any other
    file. Raises SetupError.
    """
    from async_grpo.config import yaml12
    from async_grpo.config.docs import settings, show
    from async_grpo.config.stored import answers, idle, renewed
    from async_grpo.tools.migrate.source import text_of

    try:
        data, _ = yaml12.read(text_of(path))
    except yaml12.YamlError:
        return ""  # no YAML at all, or what `read_source` says in words
    if not isinstance(data, dict) or not data.keys() <= settings().keys():
        return ""
    if not any(answers(data)):
        return ""
    left = [f"# without effect, left out: {name}: {show(value)}\n" for name, value in idle(data)]
    return yaml12.write(renewed(data)) + "".join(left)


def _write(text: str, source: Path, out: Path | None) -> None:
    try:
        if out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        if os.path.exists(out) and os.path.samefile(source, out):
            raise SetupError(f"{out} is the file itself; write to another one.")
        out.write_text(text, encoding="utf-8")
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SetupError(f"{out or 'the output'} cannot be written: {reason}.") from error
