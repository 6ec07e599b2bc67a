"""The rules of the replay queue as pure functions: who gets slots, which results are refused, and
what must not be trained. Which groups leave, and when: `order`.

Runs in: the replay queue's process. Hides nothing and keeps no state.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from async_grpo.algo.filters import FilterRule, filter_reason
from async_grpo.algo.rewards import Shaping, score
from async_grpo.errors import StalenessError
from async_grpo.replay.order import ORDERS, Order
from async_grpo.wire.codec import GroupMeta, GroupTicket, RowMeta

if TYPE_CHECKING:
    from async_grpo.config.schema import Config

OnStale = Literal["wait", "mask", "expire"]


@dataclass(frozen=True)
class TaskRule:
    """What groups of a task must be like. filter: None rejects nothing. after: held-out accuracy
    by task, from which on groups of this one are issued.
    """

    group_size: int
    filter: FilterRule | None
    after: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> TaskRule:
        """Read it from the configuration that the task has."""
        rule = _filter_rule(config)
        if rule is not None and rule.metric not in ("score", "acc", "seq_reward"):
            rule = replace(rule, metric=config.component(rule.metric))
        after = config.tasks[config.posed].after if config.tasks else {}
        return cls(config.rollout.group_size, rule, after)


def _filter_rule(config: Config) -> FilterRule | None:
    filters = config.replay.filter_groups
    if not filters.enable:
        return None
    return FilterRule(
        metric=filters.metric,
        tolerance=filters.tolerance,
        zero_variance=filters.zero_variance,
        accuracy_low=filters.accuracy_low,
        accuracy_high=filters.accuracy_high,
        all_truncated=filters.all_truncated,
        custom=None if filters.custom is None else filters.custom.name,
        options={} if filters.custom is None else filters.custom.values,
    )


@dataclass(frozen=True)
class DifficultyRule:
    """How often a problem is posed, by its pass rate; see `schema.Difficulty`."""

    choose: str
    target: float
    width: float
    explore: float
    seed: int

    def poses(self, group_id: int, rate: float, mixed: float) -> bool:
        """Whether this id is issued. rate: pass rate of its problem. mixed: share of the groups of
        such problems that have right and wrong responses.
        """
        distance = abs(rate - self.target) / self.width
        chance = float(distance <= 1) if self.choose == "window" else math.exp(-(distance**2) / 2)
        if self.choose == "bandit":
            chance = mixed
        key = f"{self.seed}\0difficulty\0{group_id}".encode()
        drawn = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") / 2**64
        return drawn < max(chance, self.explore)


@dataclass(frozen=True)
class QueueSettings:
    """What the queue needs to know of a run, from `trained_steps` and `next_group_id` on; can be
    pickled.

    `outstanding`: groups that may hold a slot, None for as many as the learner needs
    (`outstanding.OutstandingLimit`); `publish_every`: learner steps. `filter` None rejects nothing.
    `baseline`: every group has a greedy response beside those to train. `mask_truncated`: responses
    cut off have no weight. `ticket_timeout_s`: a group in flight for longer is issued again; None
    waits for ever. `max_failed_fraction`: more failures for good end the run. With `retire_at`, a
    problem answered right at that rate is posed no more: `problem(group_id)` is its index below
    `problems`, and each occurs once in every run of `problems` ids that starts at a multiple of it.
    Of several tasks, `task_of(group_id)` is the one of a group, and `tasks` has their rules; with
    `replaces_lost`, groups that are lost are followed by others of the same task. `pass_rates`: by
    problem, of an earlier run, for a new one.
    `plugins`: modules that register the filter.
    Raises ValueError where they do not fit.
    """

    rollout_batch_size: int
    max_staleness: int
    total_steps: int
    group_size: int
    max_attempts: int
    max_num_gen_batches: int
    shaping: Shaping
    filter: FilterRule | None = None
    order: str = "oldest"
    on_stale: OnStale = "wait"
    outstanding: int | None = None
    publish_every: int = 1
    ticket_timeout_s: float | None = None
    max_failed_fraction: float = 1.0
    baseline: bool = False
    mask_truncated: bool = False
    retire_at: float | None = None
    problem: Callable[[int], int] | None = None
    problems: int = 0
    task_of: Callable[[int], str] | None = None
    tasks: Mapping[str, TaskRule] = field(default_factory=dict)
    replaces_lost: bool = False
    difficulty: DifficultyRule | None = None
    pass_rates: Mapping[int, float] = field(default_factory=dict)
    max_frame_bytes: int | None = None
    trained_steps: int = 0
    next_group_id: int = 0
    plugins: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        shaping: Shaping,
        total_steps: int,
        trained_steps: int,
        problem: Callable[[int], int],
        problems: int,
        task_of: Callable[[int], str],
        pass_rates: Mapping[int, float],
    ) -> QueueSettings:
        """Read the settings from the run's configuration."""
        filters, replay = config.replay.filter_groups, config.replay
        return cls(
            rollout_batch_size=config.rollout.rollout_batch_size,
            max_staleness=replay.max_staleness,
            total_steps=total_steps,
            group_size=config.rollout.group_size,
            max_attempts=replay.max_attempts,
            max_num_gen_batches=filters.max_num_gen_batches,
            shaping=shaping,
            filter=_filter_rule(config),
            order=replay.order,
            on_stale=replay.on_stale,
            outstanding=None if replay.outstanding == "auto" else replay.outstanding,
            publish_every=config.weight_sync.every_steps,
            ticket_timeout_s=config.rollout.longest_group_s,
            max_failed_fraction=max(one.max_bad_fraction for one in config.posed_tasks.values()),
            baseline=config.algorithm.has_baseline,
            mask_truncated=config.algorithm.mask_truncated,
            retire_at=filters.retire_at if filters.enable else None,
            problem=problem,
            problems=problems,
            task_of=task_of if config.tasks else None,
            tasks={name: TaskRule.of(config.of_task(name)) for name in config.tasks},
            replaces_lost=replay.quota == "trained",
            difficulty=None
            if replay.difficulty.choose == "all"
            else DifficultyRule(
                **replay.difficulty.model_dump(exclude={"rates_from"}), seed=config.seed
            ),
            pass_rates=pass_rates,
            max_frame_bytes=config.wire.max_frame_bytes,
            trained_steps=trained_steps,
            plugins=tuple(replay.plugins),
        )

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}, not one of {', '.join(ORDERS)}")
        if self.on_stale == "wait" and not ORDERS[self.order].bounded:
            raise ValueError(
                f"order `{self.order}` does not bound staleness by itself: it needs on_stale "
                "`mask` or `expire`"
            )
        if self.retire_at is None:
            return
        if not 0 < self.retire_at <= 1:
            raise ValueError(
                f"retire_at is {self.retire_at}; it must be above 0 and at most 1, or null for none"
            )
        if self.problem is None or self.problems < 1:
            raise ValueError("retire_at needs `problem` and the number of `problems`")

    @property
    def capacity(self) -> int:
        """B = (K + 1) R: groups that may hold a slot."""
        return (self.max_staleness + 1) * self.rollout_batch_size

    def rule_of(self, group_id: int) -> TaskRule:
        """Return the rule of a group's task."""
        if self.task_of is None:
            return self._only_rule
        return self.tasks[self.task_of(group_id)]

    @cached_property
    def _only_rule(self) -> TaskRule:
        return TaskRule(self.group_size, self.filter)

    @property
    def order_rule(self) -> Order:
        """The rule by which groups leave."""
        return ORDERS[self.order](
            batch_size=self.rollout_batch_size, max_staleness=self.max_staleness
        )

    @property
    def total_groups(self) -> int:
        """Count the groups that the whole run trains."""
        return self.total_steps * self.rollout_batch_size


class Verdict(NamedTuple):
    """Answer to one frame of a `put`; ids are -1 where the frame does not tell them."""

    group_id: int
    attempt: int
    status: Literal["accepted", "rejected", "duplicate", "late", "abandoned", "invalid"]
    reason: str = ""


def fair_share(
    actor_id: str, wants: Mapping[str, int], in_flight: Mapping[str, int], *, free: int
) -> int:
    """Slots for one actor when free ones go to the fewest in flight, on a tie to the caller."""
    wanted = wants.get(actor_id, 0)
    if sum(wants.values()) <= free:
        return wanted
    left = dict(wants)
    heap = [(in_flight[name], name != actor_id, name) for name in wants]
    heapq.heapify(heap)
    while heap and free > 0 and left.get(actor_id, 0) > 0:
        count, other, name = heapq.heappop(heap)
        left[name] -= 1
        free -= 1
        if left[name] > 0:
            heapq.heappush(heap, (count + 1, other, name))
    return wanted - left.get(actor_id, 0)


def problem_of(
    meta: GroupMeta, ticket: GroupTicket, *, newest_version: int, group_size: int, baseline: bool
) -> str | None:
    """Say why a group must not be trained, or None. `newest_version`: largest that can exist."""
    roles = [row.role for row in meta.episodes]
    rows, greedy = roles.count("train"), roles.count("baseline")
    if rows != group_size:
        return f"{rows} rollouts to train instead of {group_size}"
    if greedy != int(baseline):
        return f"{greedy} baseline rollouts instead of {int(baseline)}"
    if roles.count("demonstration") > 1:
        return f"{roles.count('demonstration')} demonstrations instead of one"
    if meta.policy_version != ticket.policy_version:
        return f"ticket version {meta.policy_version} instead of {ticket.policy_version}"
    if wrong := {row.verdict for row in meta.rows} - {None, 0.0, 1.0}:
        return f"a correctness of {wrong.pop()}, which is neither 0 nor 1"
    if any(later < one for row in meta.rows for (one, _), (later, _) in pairwise(row.versions)):
        return "a token of an older version than the one before it"
    versions = [version for row in meta.rows for version, _ in row.versions]
    oldest, newest = min(versions), max(versions)
    if oldest < ticket.policy_version:
        return f"a token of version {oldest} under a ticket of version {ticket.policy_version}"
    # An engine resumes with new weights before all of them do, so its tokens may be ahead of the
    # live version, not of the learner.
    if newest > newest_version:
        return f"a token of version {newest}, the learner is at {newest_version}"
    return None


def rejection(meta: GroupMeta, rule: FilterRule, shaping: Shaping) -> str | None:
    """Say why the rule rejects the group, or None. Raises ValueError where a value is missing."""
    rows = meta.episodes_to_train
    return filter_reason(
        rule,
        values=[_value(row, rule.metric, shaping) for row in rows] if rule.reads_metric else [],
        verdicts=[row.verdict for row in rows],
        truncated=[row.truncated for row in rows],
        rewards=[row.rewards for row in rows],
        lengths=[row.length for row in rows],
    )


def _value(row: RowMeta, metric: str, shaping: Shaping) -> float | None:
    if metric == "score":
        return score(row.rewards, shaping.weights)
    if metric == "seq_reward":
        return shaping.shape(row.rewards, row.length)
    if metric == "acc":
        if row.verdict is None:
            raise ValueError("a response is not judged, and the metric `acc` needs that")
        return row.verdict
    if metric not in row.rewards and metric in shaping.weights:
        return None
    if metric not in row.rewards:
        raise ValueError(
            f"a rollout has no reward component {metric!r}, it has {sorted(row.rewards)}"
        )
    return row.rewards[metric]


def check_bound(meta: GroupMeta, *, step: int, max_staleness: int, on_stale: OnStale) -> None:
    """Raise StalenessError for a token from the future, or one too old that nobody masks."""
    oldest, newest = step - 1 - meta.min_version, step - 1 - meta.max_version
    if newest < 0 or (oldest > max_staleness and (on_stale != "mask" or newest > max_staleness)):
        raise StalenessError(
            f"step {step} would train group {meta.group_id} with tokens of versions "
            f"{meta.min_version} to {meta.max_version} at "
            f"max_staleness {max_staleness}; this is a bug, please open an issue"
        )
