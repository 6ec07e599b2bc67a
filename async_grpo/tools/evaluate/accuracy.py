"""Accuracy on held-out problems, with one engine.

Runs in: the process of `async-grpo eval`, without Ray and without a learner; nothing is written.
Hides how the engine is had alone (`alone`). Invariant: problems, prompts, sampling and scores are
those of a run's own evaluations, which the same code (`rollout.evaluator`) answers.
"""

from __future__ import annotations

import asyncio
import time

from async_grpo.algo.accuracy import metrics
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.run.preflight.model import look
from async_grpo.tasks.mixture import create_tasks
from async_grpo.tasks.registry import held_out
from async_grpo.tools.evaluate.alone import LABEL, actor_alone, quiet


def evaluate(config: Config, console: Console) -> dict[str, float]:
    """Answer the held-out problems; the metrics `eval/...`. Raises SetupError, TaskError."""
    task = create_tasks(config)  # which may have no training data
    total = held_out(config, task)
    if not total:
        raise SetupError(f"task {config.task_names} has no held-out problems: set task.eval")
    console.info(*(look(config, task, of_evaluation=True) or []))
    with quiet():
        return asyncio.run(_answered(config, total, console))


async def _answered(config: Config, total: int, console: Console) -> dict[str, float]:
    async with actor_alone(config, console, name="evaluation") as actor:
        started = time.perf_counter()
        try:
            with console.phase(f"evaluating on {total} held-out problems"):
                async with asyncio.timeout(config.evaluation.timeout_s) as deadline:
                    outcomes, _ = await actor.evaluate(
                        indices=range(total), total=total, label=LABEL, samples=0
                    )
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise SetupError(
                f"the evaluation took longer than evaluation.timeout_s = "
                f"{config.evaluation.timeout_s:g} s: raise it, or lower evaluation.max_samples"
            ) from error
        seconds = time.perf_counter() - started
    return metrics(outcomes, n=config.evaluation.n) | {"eval/seconds": seconds}


def rows(config: Config, found: dict[str, float]) -> list[tuple[str, str]]:
    """Say the numbers: (name, text)."""
    said = []
    for name in found:
        if f"{name}/low" in found:
            low, high = found[f"{name}/low"], found[f"{name}/high"]
            label = name.removeprefix("eval/").replace("_at_", "@").replace("_", ", ")
            said.append((label, f"{found[name]:.1%} (95 % interval {low:.1%} to {high:.1%})"))
    if not said:
        said.append(("accuracy", "none: the task judges no response correct or wrong"))
    errors = found["eval/errors"]
    said.append(("held-out problems", f"{found['eval/problems']:,.0f} of task {config.task_names}"))
    said.append(("response length", f"{found['eval/response_length']:.1f} tokens, greedy"))
    if errors:
        said.append(("errors", f"{errors:,.0f} responses could not be scored, and count as wrong"))
    said.append(("seconds", f"{found['eval/seconds']:.1f}"))
    return said
