"""`async-grpo serve [SOURCE]`: the policy as an endpoint alone, to debug an agent.

Runs in: a process of its own, without Ray, learner or queue. Exit code 1 where an episode failed.
"""

from __future__ import annotations

import argparse

from async_grpo.config.command_line import Parser, with_settings

DESCRIPTION = "Serve a policy as an OpenAI-compatible endpoint alone, and show each episode."
EPISODES = 4


def arguments(parser: Parser) -> None:
    """Take a source, and settings."""
    parser.source("a checkpoint, a run directory, a YAML of a run, or a model: directory or name")
    task = "whose problems are played; the run's own otherwise"
    parser.add_argument("--task", metavar="NAME", help=task)
    many = f"how many are played by programs or workers (default: {EPISODES})"
    parser.add_argument("--episodes", metavar="N", type=int, default=EPISODES, help=many)
    export = "write each episode into this file, a line of JSON each"
    parser.add_argument("--export", metavar="FILE", help=export)
    parser.settings("settings: task.options.command=./agent rollout.max_turns=8")


def run(options: argparse.Namespace) -> int:
    """Serve it; the exit code. Raises ConfigError, TaskError, SetupError for what cannot be served,
    FaultBudgetSpent where engine or verifiers end.
    """
    import os

    from async_grpo.observe.console.console import Console
    from async_grpo.tools.evaluate.alone import settings
    from async_grpo.tools.serve.endpoint import serve

    options = with_settings(options)
    with open(os.dup(1), "w", buffering=1) as out:
        console = Console(out)
        config = settings(
            options.source, task=options.task, overrides=options.settings, by_hand=True
        )
        with open(options.export or os.devnull, "w", encoding="utf-8") as file:
            return serve(config, console, episodes=options.episodes, file=file)
