"""`async-grpo check CONFIG [section.key=value ...]`: what a run would be, and would need.

Runs in: a process of its own; starts nothing and leaves nothing behind.
"""

from __future__ import annotations

import argparse
from functools import partial

from async_grpo.config.command_line import Parser

DESCRIPTION = (
    "Say what a run would be and need, and whether it fits: budget, memory, placement, warnings. "
    "Nothing is started. Exit code 2 where a run would be refused."
)


def arguments(parser: Parser) -> None:
    """Take a configuration, and perhaps a cluster that is not here."""
    parser.config()
    assume = "a cluster that is not here, for example nodes=2,gpus=8,memory=80"
    parser.add_argument("--assume", metavar="NODES", help=assume)


def run(options: argparse.Namespace) -> int:
    """Check it; the exit code."""
    from async_grpo.run.command import command, read_config

    config = partial(read_config, options.config, options.settings)
    with command(config, checked=False) as this:
        if this.trainer is not None:
            from async_grpo.tools.check.dry_run import assumed_nodes, dry_run

            assumed = None if options.assume is None else assumed_nodes(options.assume)
            dry_run(this.trainer, this.console, assumed=assumed)
    return this.code
