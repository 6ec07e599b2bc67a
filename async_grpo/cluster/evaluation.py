"""Held-out problems, shared out over the rollout actors.

Runs in: the driver. Hides that engines may die meanwhile: what one leaves undone is shared out again, until the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import ray

from async_grpo.errors import FaultBudgetSpent, Stalled

HEALTH_TIMEOUT_S = 10.0
Part = tuple[dict[str, float], list[dict[str, Any]]]


class Evaluator(Protocol):
    """An engine that answers problems; `handle` is its Ray actor."""

    handle: Any


async def evaluate(
    ready: Callable[[], Sequence[Evaluator]], died: Callable[[Any, BaseException], Awaitable[None]], *, timeout_s: float, total: int,
    greedy: bool, samples: int,
) -> Part:
    """Sums over `total` problems and their accuracy, from the engines that `ready()` gives; and about `samples` answers as text.

    `died(engine, error)` is told of every engine that is gone. Raises Stalled after `timeout_s`.
    """
    left, results = list(range(total)), []
    try:
        async with asyncio.timeout(timeout_s):
            while left:
                left, done = await _share(ready(), died, left, total=total, greedy=greedy, samples=samples)
                results += done
    except TimeoutError as error:
        raise Stalled(f"the evaluation took longer than evaluation.timeout_s = {timeout_s:g} s") from error
    sums = {name: sum(result[name] for result, _ in results) for name in results[0][0]}
    shown = [row for _, rows in results for row in rows]
    if sums["judged"]:  # a task whose verifier gives no verdicts has no accuracy
        sums["accuracy"] = sums["correct"] / sums["problems"]
    return sums, shown


async def _share(
    engines: Sequence[Evaluator], died: Callable[[Any, BaseException], Awaitable[None]], problems: list[int], *, total: int, greedy: bool,
    samples: int,
) -> tuple[list[int], list[Part]]:
    """The problems that dead engines left undone, and the answers of the others."""
    if not engines:
        raise FaultBudgetSpent("no rollout actor is alive to evaluate with")
    parts = [problems[index :: len(engines)] for index in range(len(engines))]
    calls = [
        engine.handle.evaluate.remote(indices=part, total=total, greedy=greedy, samples=-(-samples // len(engines)))
        for engine, part in zip(engines, parts, strict=True)
    ]
    left, done = [], []
    for engine, part, answer in zip(engines, parts, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, ray.exceptions.RayActorError) or (isinstance(answer, ray.exceptions.RayTaskError) and not await _healthy(engine)):
            await died(engine, answer)
            left += part
        elif isinstance(answer, BaseException):
            raise answer
        else:
            done.append(answer)
    return left, done


async def _healthy(engine: Evaluator) -> bool:
    """Whether an engine that failed is itself alive: else the failure is its death, and others answer in its place."""
    try:
        await asyncio.wait_for(engine.handle.health.remote(), HEALTH_TIMEOUT_S)
    except (TimeoutError, ray.exceptions.RayError):
        return False
    return True
