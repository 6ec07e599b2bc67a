"""The rules of the replay queue as pure functions: who gets slots, which results are refused, when a batch may leave.

Runs in: the replay queue's process. Hides nothing and keeps no state.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_grpo.algo.filters import zero_variance
from async_grpo.algo.rewards import score
from async_grpo.wire import GroupMeta, GroupTicket, RowMeta


@dataclass(frozen=True)
class QueueSettings:
    """What the queue needs to know of a run. `trained_steps` and `next_group_id` are where it starts."""

    rollout_batch_size: int
    max_staleness: int
    total_steps: int
    group_size: int
    max_attempts: int
    filter_groups: bool
    filter_metric: str
    max_num_gen_batches: int
    weights: dict[str, float]
    trained_steps: int = 0
    next_group_id: int = 0

    @property
    def capacity(self) -> int:
        """B = (K + 1) R: groups that may hold a slot."""
        return (self.max_staleness + 1) * self.rollout_batch_size

    @property
    def total_groups(self) -> int:
        """Groups that the whole run trains."""
        return self.total_steps * self.rollout_batch_size


def fair_share(actor_id: str, wants: Mapping[str, int], in_flight: Mapping[str, int], *, free: int) -> int:
    """Slots for one actor when the free ones go, one by one, to the asking actor with the fewest groups in flight.

    On a tie the caller is served: it is here, the others come later.
    """
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


def problem_of(meta: GroupMeta, ticket: GroupTicket, *, newest_version: int, group_size: int) -> str | None:
    """Why a well-formed group must not be trained, or None. `newest_version` is the newest that the learner can have published."""
    rows = sum(row.role == "train" for row in meta.rows)
    if rows != group_size:
        return f"{rows} rollouts to train instead of {group_size}"
    if meta.policy_version != ticket.policy_version:
        return f"ticket version {meta.policy_version} instead of {ticket.policy_version}"
    if meta.min_version < ticket.policy_version:
        return f"a token of version {meta.min_version} under a ticket of version {ticket.policy_version}"
    # An engine resumes with new weights before all of them do, so its tokens may be ahead of the live version, not of the learner.
    newest = max(row.max_version for row in meta.rows)
    if newest > newest_version:
        return f"a token of version {newest}, the learner is at {newest_version}"
    return None


def filter_reason(meta: GroupMeta, metric: str, weights: Mapping[str, float]) -> str | None:
    """Why the group has nothing to learn from (all values of the metric are equal), or None.

    Raises KeyError or ValueError where a rollout lacks the metric.
    """
    rows = [row for row in meta.rows if row.role == "train"]
    if not zero_variance([_value(row, metric, weights) for row in rows]):
        return None
    verdicts = {row.verdict for row in rows}
    return "all_wrong" if verdicts == {0.0} else "all_right" if verdicts == {1.0} else "all_equal"


def _value(row: RowMeta, metric: str, weights: Mapping[str, float]) -> float:
    if metric == "score":
        return score(row.rewards, weights)
    if metric == "acc":
        if row.verdict is None:
            raise ValueError("a rollout has no verdict")
        return row.verdict
    return row.rewards[metric]


def can_leave(staying: Sequence[int], *, step: int, max_staleness: int, batch_size: int) -> bool:
    """Whether all groups that stay behind when a batch leaves for `step` can be trained in time.

    `staying` are their ticket versions. Sorted, the i-th is trained at step `step + 1 + i // R` at the latest, when its tokens have
    lag `step + i // R - version` or less.
    """
    return all(version + max_staleness >= step + index // batch_size for index, version in enumerate(sorted(staying)))
