"""The verbs of the command line as functions of their words, in this process; the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_grpo import cli

Verb = Callable[[Sequence[str]], int]


def _verb(name: str) -> Verb:
    return lambda words: cli.main([name, *words])


train, check, predict, status = map(_verb, ("train", "check", "predict", "status"))
report, inspect, retrain, export = map(_verb, ("report", "inspect", "retrain", "export"))
evaluate, migrate = map(_verb, ("eval", "migrate"))
