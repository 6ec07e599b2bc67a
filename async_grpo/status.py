"""`python -m async_grpo.status RUN_DIR`: the panel of a run, from another shell.

Runs in: a process of its own, on any machine that sees the run's directory; it only reads. Exit
code 2 with one sentence for what is no run directory. Invariant: off a terminal there are no
control characters, and `--follow` ends when the run has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from async_grpo.errors import RunError
from async_grpo.observe.console.console import Screen
from async_grpo.observe.console.status_file import STATUS, condition, read_status

EVERY_S, PLAIN_EVERY_S = 2.0, 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m async_grpo.status",
        description="How a run is doing, seen from another shell.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        nargs="?",
        default=Path("runs"),
        help="the run's directory (run.dir), or one that holds such directories, of which the "
        "newest is taken (default: runs)",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on showing it until the run has ended; Ctrl-C stops looking, not the run",
    )
    parser.add_argument(
        "--json", action="store_true", help="print what is known as one JSON object"
    )
    arguments = parser.parse_args(argv)
    try:
        run_dir = newest_run(arguments.run_dir)
        if arguments.json:
            facts = read_status(run_dir)
            print(json.dumps(facts | {"condition": condition(facts, now=time.time()).kind}))
            return 0
        return _show(run_dir, follow=arguments.follow)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename} cannot be read: {error.strerror}", file=sys.stderr)
        return 2


def newest_run(directory: Path) -> Path:
    """Find the run directory whose status was written last in a directory of runs; a run directory
    is itself.
    """
    if (directory / STATUS).exists():
        return directory
    written = {path.parent: path.stat().st_mtime for path in directory.glob(f"*/{STATUS}")}
    return max(written, key=lambda path: written[path], default=directory)


def _show(run_dir: Path, *, follow: bool) -> int:
    facts = read_status(run_dir)
    title = f"{facts['run']}  {run_dir}"
    with Screen(sys.stdout) as screen:
        while follow and condition(facts, now=time.time()).kind not in ("ended", "killed"):
            if screen.terminal:
                screen.follow(lambda: read_status(run_dir), title=title)
            else:
                screen.print_panel(facts, now=time.time(), title=title)
            time.sleep(EVERY_S if screen.terminal else PLAIN_EVERY_S)
            facts = read_status(run_dir)
        state = condition(facts, now=time.time())
        quiet_since = facts.get("ended", facts["written"])
        screen.print_panel(
            facts,
            now=time.time() if state.kind in ("running", "slow") else quiet_since,
            title=title,
        )
        if state.text:
            screen.print(state.text, style=None if facts.get("exit_code") == 0 else "bold red")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(0)
