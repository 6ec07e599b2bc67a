"""`async-grpo eval [SOURCE]`: accuracy on held-out problems, with one engine.

Runs in: a process of its own, without Ray and without a learner; nothing is written.
"""

from __future__ import annotations

import argparse

from async_grpo.config.command_line import Parser, with_settings

DESCRIPTION = "Evaluate a checkpoint or a model on held-out problems, with one engine."


def arguments(parser: Parser) -> None:
    """Take a source, and settings."""
    parser.source(
        "a checkpoint, a run directory (its newest checkpoint), or a model: directory or name"
    )
    task = "the task to ask; of a checkpoint, the run's own otherwise"
    parser.add_argument("--task", metavar="NAME", help=task)
    parser.settings("settings: evaluation.max_samples=200 rollout.response_length=512")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Evaluate it; the exit code. Raises ConfigError, TaskError, SetupError for what cannot be
    evaluated, FaultBudgetSpent where engine or verifiers end.
    """
    import json
    import os

    from async_grpo.observe.console.console import Console
    from async_grpo.tools.evaluate.accuracy import evaluate, rows
    from async_grpo.tools.evaluate.alone import settings

    options = with_settings(options)
    with open(os.dup(2 if options.json else 1), "w", buffering=1) as out:
        console = Console(out)
        config = settings(options.source, task=options.task, overrides=options.settings)
        found = evaluate(config, console)
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            console.summary(f"evaluated {config.model.path}", rows(config, found))
    return 0
