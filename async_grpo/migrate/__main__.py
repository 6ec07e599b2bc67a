"""`python -m async_grpo.migrate FILE [-o OUT.yaml]`: another system's configuration in ours.

Runs in: a terminal; nothing of the other system has to be installed. Hides which system a file is
of. Exit code 2 with one sentence for a file that cannot be used. Invariant: what is written passes
`load_config`, and names every key of the file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from async_grpo.errors import RunError, SetupError
from async_grpo.migrate.draft import Draft, walk
from async_grpo.migrate.page import page
from async_grpo.migrate.peers import PEER_TABLES, recognise
from async_grpo.migrate.settle import settle
from async_grpo.migrate.source import read_source


def migrate(path: Path, option: str = "") -> Draft:
    """Return what a file comes to here. option: the system that it is of, "" to find out. Raises
    SetupError.
    """
    source = read_source(path)
    draft = walk(source, recognise(source, option))
    settle(draft)
    return draft


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m async_grpo.migrate",
        description="Write a configuration of verl, ROLL, AReaL, TRL, OpenRLHF or prime-rl as one "
        "of async_grpo, with a comment for each key that means something else or nothing here.",
        epilog="Then: python -m async_grpo.run OUT.yaml --dry-run. docs/migration.md says what "
        "differs.",
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="YAML, TOML, or a shell script with the command"
    )
    parser.add_argument(
        "-o", "--out", metavar="OUT.yaml", type=Path, help="where to write (default: print)"
    )
    parser.add_argument(
        "--from",
        dest="option",
        choices=sorted(PEER_TABLES),
        default="",
        help="the system that the file is of (default: recognised by its keys)",
    )
    arguments = parser.parse_args(argv)
    try:
        draft = migrate(arguments.file, arguments.option)
        _write(page(draft), arguments.file, arguments.out)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    taken = len({key for one in draft.kept.values() for key in one.keys})
    print(
        f"{draft.peer.name}: {taken} keys taken over, {len(draft.left)} not; every one is named in "
        "the comments",
        file=sys.stderr,
    )
    return 0


def _write(text: str, source: Path, out: Path | None) -> None:
    try:
        if out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        if os.path.exists(out) and os.path.samefile(source, out):
            raise SetupError(f"{out} is the file itself; write to another one.")
        out.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SetupError(f"{out or 'the output'} cannot be written: {reason}.") from error


if __name__ == "__main__":
    sys.exit(main())
