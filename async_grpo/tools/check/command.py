"""`async-grpo check CONFIG [section.key=value ...]`: what a run would be, and would need.

Runs in: a process of its own; starts nothing and leaves nothing behind.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from async_grpo.config.command_line import Parser

if TYPE_CHECKING:
    from async_grpo.observe.console.console import Console
    from async_grpo.run.trainer import Trainer

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
    from async_grpo.run.command import read_config, with_trainer

    def work(trainer: Trainer, console: Console) -> None:
        from async_grpo.tools.check.dry_run import assumed_nodes, dry_run

        assumed = None if options.assume is None else assumed_nodes(options.assume)
        dry_run(trainer, console, assumed=assumed)

    return with_trainer(lambda: read_config(options.config, options.settings), work, checked=False)
