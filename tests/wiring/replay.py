"""The settings of the replay queue: a queue as the driver builds it, and groups of every kind."""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.errors import NoSignal
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.rules import QueueSettings
from async_grpo.run.planning import shaping
from async_grpo.run.preflight.run_check import check_run
from async_grpo.tasks.mixture import ProblemOrder, Quotas
from async_grpo.wire.codec import GroupTicket
from tests.support.frames import frame_of
from tests.support.rated_run import rated_run
from tests.support.wiring import Wire, load

PROBLEMS = 6
WEIGHTS = {"correct": 1.0}
GROUPS: list[dict[str, Any]] = [
    {"values": (0.0, 1.0, 0.0, 1.0)},
    {"values": (0.0, 0.0, 0.0, 0.0)},
    {"values": (1.0, 1.0, 1.0, 0.0), "finish": "length"},
    {"values": (1.0, 0.0, 0.0, 0.0)},
    {"values": (0.0, 1.0, 1.0, 1e-3)},
]
"""What the actor answers, in turn."""


def problem_order(config: Config) -> ProblemOrder:
    """The problems of data that is not there."""
    weights = {name: [(0, one.weight)] for name, one in config.tasks.items()}
    parts = tuple((name, "data", PROBLEMS) for name in weights or ("",))
    return ProblemOrder(config.seed, parts, Quotas(weights) if weights else None)


def queue_settings(config: Config) -> QueueSettings:
    """The settings of the queue as the driver makes them."""
    return QueueSettings.of(
        config,
        shaping=shaping(config, WEIGHTS),
        total_steps=6,
        trained_steps=0,
        problem=(order := problem_order(config)),
        problems=order.problems,
        task_of=order.task,
        pass_rates=_rates(config),
    )


def _rates(config: Config) -> dict[int, float]:
    source = config.replay.difficulty.rates_from
    return {} if source is None else check_run(config, notes=[]).pass_rates


@cache
def rated() -> str:
    """A run that has found every problem right."""
    return rated_run(
        load({"replay.difficulty.choose": "window"}), dict.fromkeys(range(PROBLEMS), 1.0)
    )


def queued(config: Config) -> list[Any]:
    """What a queue says to an actor that answers tickets, is late with some and loses others, and
    to a learner that asks for its steps; and its metrics.
    """
    return asyncio.run(_queued(queue_settings(config)))


async def _queued(settings: QueueSettings) -> list[Any]:
    now, live, holding = 0.0, 0, dict[tuple[int, int], tuple[int, GroupTicket]]()
    queue, seen = ReplayQueue(settings, clock=lambda: now), list[Any]()
    for turn in range(24):
        for ticket in await queue.acquire("a", live, list(holding), 3) or []:
            slow = 3 if ticket.group_id % 5 == 4 and ticket.attempt == 1 else 0
            holding[ticket.group_id, ticket.attempt] = turn + slow, ticket
        due = [ticket for at, ticket in holding.values() if at <= turn]
        for ticket in due:
            del holding[ticket.group_id, ticket.attempt]
            if ticket.group_id % 11 == 2:
                await queue.fail("a", [ticket], "lost")
                continue
            kind = GROUPS[ticket.group_id % len(GROUPS)]
            [verdict] = await queue.put("a", [frame_of(ticket, **kind)])
            seen.append((turn, ticket.group_id, ticket.attempt, verdict.status, verdict.reason))
        try:
            batch = await queue.get_batch(live + 1)
        except NoSignal as error:
            return [*seen, str(error)]
        if batch is not None:
            live += 1
            await queue.live(live)
            seen.append([group.group_id for group in batch.groups])
        now += 20.0
    return [*seen, sorted((await queue.metrics()).items())]


def imported(config: Config) -> bool:
    """Whether the queue imports the user's module."""
    sys.modules.pop(EMPTY, None)
    ReplayQueue(queue_settings(config))
    return EMPTY in sys.modules


def _queue(key: str, value: Any, **given: Any) -> Wire:
    return Wire(
        key,
        value,
        queued,
        {"task.max_bad_fraction": 1.0}
        | {name.replace("__", "."): one for name, one in given.items()},
    )


FILTER = {"replay.filter_groups.enable": True}
NOTHING = {**FILTER, "replay.filter_groups.zero_variance": False}


def _filter(key: str, value: Any, given: dict[str, Any]) -> Wire:
    given = {"task.max_bad_fraction": 1.0, **given}
    return Wire(f"replay.filter_groups.{key}", value, queued, given)


LOW, HIGH = "replay.filter_groups.accuracy_low", "replay.filter_groups.accuracy_high"
EMPTY = "tests.wiring.empty_plugin"
MINE = {**FILTER, "replay.plugins": ["tests.wiring.plugin"]}
WIRES = [
    Wire("replay.plugins", [EMPTY], imported),
    _filter("custom", "wordless", MINE),
    _queue("rollout.rollout_batch_size", 3),
    _queue("rollout.group_size", 3),
    _queue("rollout.group_timeout_s", 30.0),
    _queue("replay.max_staleness", 2),
    _queue("replay.order", "fifo"),
    _queue("replay.outstanding", 5),
    _queue("replay.on_stale", "mask"),
    _queue("replay.max_attempts", 1),
    _queue("replay.difficulty.choose", "window"),
    _queue("replay.difficulty.target", 0.0, replay__difficulty__choose="window"),
    _queue("replay.difficulty.width", 0.01, replay__difficulty__choose="gaussian"),
    _queue("replay.difficulty.explore", 1.0, replay__difficulty__choose="window"),
    _queue("replay.difficulty.rates_from", rated(), replay__difficulty__choose="window"),
    _queue("replay.quota", "trained", tasks={"sums": {"weight": 2.0}, "words": {}}),
    _queue("algorithm.mask_truncated", True),
    Wire("task.max_bad_fraction", 0.9, queued, {"replay.max_attempts": 1}),
    _filter("enable", True, {}),
    _filter("metric", "format", FILTER),
    _filter("zero_variance", False, {**FILTER, LOW: 0.1}),
    _filter("tolerance", 1.0, FILTER),
    _filter("accuracy_low", 0.3, NOTHING | {HIGH: 0.9}),
    _filter("accuracy_high", 0.7, NOTHING | {LOW: 0.1}),
    _filter("all_truncated", True, NOTHING | {LOW: 0.1}),
    _filter("retire_at", 0.75, NOTHING | {LOW: 0.1}),
    _filter("max_num_gen_batches", 1, FILTER | {LOW: 0.9}),
]
