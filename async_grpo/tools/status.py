"""`async-grpo status [RUN_DIR]`: the panel of a run, from another shell.

Runs in: a process of its own, on any machine that sees the run's directory; it only reads. Exit
code 2 with one sentence for what is no run directory. Invariant: off a terminal there are no
control characters, and `--follow` ends when the run has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from async_grpo.config.command_line import Parser
from async_grpo.errors import SetupError

EVERY_S, PLAIN_EVERY_S = 2.0, 10.0


DESCRIPTION = "How a run is doing, seen from another shell."


def arguments(parser: Parser) -> None:
    """Take a run, and how it is shown."""
    parser.run()
    follow = "go on showing it until the run has ended; Ctrl-C stops looking, not the run"
    parser.add_argument("--follow", action="store_true", help=follow)
    parser.add_argument(
        "--json", action="store_true", help="print what is known as one JSON object"
    )


def run(options: argparse.Namespace) -> int:
    """Show it; the exit code. Raises SetupError for what is no run directory."""
    from async_grpo.observe.console.status_file import condition, newest_run, read_status

    try:
        run_dir = newest_run(options.run_dir)
        if options.json:
            facts = read_status(run_dir)
            print(json.dumps(facts | {"condition": condition(facts, now=time.time()).kind}))
            return 0
        return _show(run_dir, follow=options.follow)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(f"{error.filename} cannot be read: {error.strerror}") from error
    except KeyboardInterrupt:
        return 0


def _show(run_dir: Path, *, follow: bool) -> int:
    from async_grpo.observe.console.console import Screen
    from async_grpo.observe.console.status_file import condition, read_status

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
            screen.print(state.text, style="" if facts.get("exit_code") == 0 else "bold red")
    return 0
