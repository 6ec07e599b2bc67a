"""When a run has nothing left to learn from.

Runs in: the replay queue's process. Hides nothing and keeps no state: the counters are the
ledger's.
"""

from __future__ import annotations

from collections import Counter

from async_grpo.errors import NoSignal
from async_grpo.replay.ledger import Ledger, State
from async_grpo.replay.rules import QueueSettings

MAX_FAILED_GROUPS = 32
"""The run ends when this many groups and 4 R more failed for good since the last learner step."""
FRACTION_GROUPS = 1000
"""Fewest ids issued of which `max_failed_fraction` is taken (or the run's own number of groups)."""


def check_signal(ledger: Ledger, settings: QueueSettings, *, exhausted: bool) -> None:
    """Raise NoSignal where waiting for groups is pointless. exhausted: every problem is retired."""
    size, limit = settings.rollout_batch_size, settings.max_num_gen_batches
    left = sum(len(ledger.slots[state]) for state in (State.WAITING, State.IN_FLIGHT, State.READY))
    if exhausted and left < size:
        raise NoSignal(
            f"all {settings.problems} problems are retired (answered right at a rate of "
            f"{settings.retire_at:g} or better) after {ledger.steps} of {settings.total_steps} "
            f"steps, and {left} groups are left for a batch of {size}; add problems, train fewer "
            "steps, or raise replay.filter_groups.retire_at"
        )
    rejected, failed = ledger.rejected_now.total(), ledger.failed_now.total()
    # not for one slow group, while others are rejected beside it
    waits_for_more = len(ledger.slots[State.READY]) < size
    if limit and rejected >= limit * size and waits_for_more:
        raise NoSignal(
            f"{rejected} groups were rejected since the last learner step "
            f"({_listed(ledger.rejected_now)}), limit {limit} batches of "
            f"{size}; make the task easier or harder, sample more responses, or raise "
            "replay.filter_groups.max_num_gen_batches"
        )
    if failed >= MAX_FAILED_GROUPS + 4 * size:
        raise NoSignal(
            f"{failed} groups failed for good since the last learner step, "
            f"replay.max_attempts {settings.max_attempts} "
            f"({_listed(ledger.failed_now)}); see the logs of the rollout actors"
        )
    _check_failed(ledger, settings)


def _check_failed(ledger: Ledger, settings: QueueSettings) -> None:
    failed = ledger.closed[State.FAILED] - ledger.failed_before
    issued = max(ledger.issued, min(FRACTION_GROUPS, settings.total_groups))
    allowed = settings.max_failed_fraction * issued
    if failed > allowed:
        raise NoSignal(
            f"{failed} of {ledger.issued} groups failed for good, replay.max_attempts "
            f"{settings.max_attempts} ({_listed(ledger.failed)}); task.max_bad_fraction "
            f"{settings.max_failed_fraction:g} allows {int(allowed)}. Mend what they failed for, "
            "or raise task.max_bad_fraction to go on without them"
        )


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in reasons.most_common(5))
