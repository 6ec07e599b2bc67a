"""`async-grpo report [RUN_DIR]`: a run's report, afterwards or while it goes on; with `--sync` what
trackers lack is sent.

Runs in: a process of its own, on any machine that sees the run's directory; the driver starts one
at the end of a run.
"""

from __future__ import annotations

import argparse

from async_grpo.config.command_line import Parser, step_range

DESCRIPTION = "Write a run's report, or send trackers what they lack."


def arguments(parser: Parser) -> None:
    """Take a run."""
    parser.run()
    sync = "send trackers what they did not get while the run was on; writes no report"
    parser.add_argument("--sync", action="store_true", help=sync)
    steps = "learner steps in the timeline (default: some in the middle of the run)"
    parser.add_argument("--steps", metavar="A-B", type=step_range, help=steps)


def run(options: argparse.Namespace) -> int:
    """Write or send it; the exit code. Raises SetupError."""
    from async_grpo.observe.console.status_file import newest_run

    run_dir = newest_run(options.run_dir)
    if options.sync:
        from async_grpo.tools.report.sync import sync_all

        sync_all(run_dir, say=print)
    else:
        from async_grpo.tools.report.writing import write

        print(write(run_dir, steps=options.steps))
    return 0
