"""Divides free slots among rollout actors, passes problems over that are answered right or too
easy or hard, keeps the shares of tasks, holds tasks back, and tells when a run has nothing left to
learn from.

Runs in: the replay queue's process. Hides the count of free slots, the memory of who asked, and how
a group id becomes a problem; the set of retired problems is the ledger's. With
R = rollout_batch_size, K = max_staleness, s learner steps done and B = (K + 1) R:

    a group that waits for another attempt   goes first, while fewer than B groups are under way
    a new id                                 only while fewer groups hold a slot than `outstanding`
                                             allows, B at most, and only if the run can still train
                                             it

Invariant: a problem that is retired stays retired; only ids that are not issued yet are affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from async_grpo.algo.filters import accuracy
from async_grpo.errors import NoSignal, SetupError
from async_grpo.replay.events import Event, Expire, Fail, Rate, Reject
from async_grpo.replay.ledger import Ledger, State, fifth_of
from async_grpo.replay.outstanding import OutstandingLimit
from async_grpo.replay.partial import PartialStart
from async_grpo.replay.rules import QueueSettings, fair_share
from async_grpo.wire.codec import GroupMeta


class Retirement:
    """Rule of retirement over the `retired` problems; idle without `settings.retire_at`."""

    def __init__(self, settings: QueueSettings, retired: set[int]) -> None:
        """Take the settings. Raises SetupError for a retired problem that the task does not
        have.
        """
        self._at = settings.retire_at
        self._problem = settings.problem
        self._problems = settings.problems
        self._retired = retired
        if self._at is not None and retired and max(retired) >= self._problems:
            raise SetupError(
                f"problem {max(retired)} was retired, but the task has {self._problems} "
                "problems: not the same data; continue with task.train as it was"
            )

    @property
    def exhausted(self) -> bool:
        """Whether no problem is left; else one of 2 x `problems` - 1 successive ids is posed."""
        return self._at is not None and len(self._retired) >= self._problems

    def retires(self, meta: GroupMeta) -> int | None:
        """Return the problem that this group retires (mean verdict of at least `retire_at`), or
        None.
        """
        if self._at is None:
            return None
        rate, problem = (
            accuracy([row.verdict for row in meta.episodes_to_train]),
            self._index(meta.group_id),
        )
        earned = rate is not None and rate >= self._at
        return problem if earned and problem not in self._retired else None

    def skips(self, group_id: int) -> bool:
        """Whether this id poses a retired problem."""
        if not self._retired or self._at is None:
            return False
        return self._index(group_id) in self._retired

    def _index(self, group_id: int) -> int:
        assert self._problem is not None  # with `retire_at`, QueueSettings has one
        return self._problem(group_id)


class PassRates:
    """Rule of `settings.difficulty` over the pass rates of problems, which are the ledger's; idle
    without.
    """

    def __init__(self, settings: QueueSettings, ledger: Ledger) -> None:
        self._rule, self._problem = settings.difficulty, settings.problem
        self._rates, self._mixed = ledger.rates, ledger.mixed

    def skips(self, group_id: int) -> bool:
        """Whether the problem of this id is passed over."""
        if self._rule is None or self._problem is None:
            return False
        rate = self._rates.get(self._problem(group_id))
        if rate is None:
            return False
        return not self._rule.poses(group_id, rate, self._mixed.get(fifth_of(rate), 1.0))

    def rated(self, groups: Iterable[GroupMeta]) -> Iterator[Rate]:
        """Yield what groups that are done with say of their problems."""
        if self._rule is None or self._problem is None:
            return
        for meta in groups:
            rate = accuracy([row.verdict for row in meta.episodes_to_train])
            if rate is not None:
                problem = self._problem(meta.group_id)
                yield Rate(problem, (rate + self._rates.get(problem, rate)) / 2)


class Curriculum:
    """Rule of `tasks.NAME.after`: a task is posed once others are mastered. Idle without."""

    def __init__(self, settings: QueueSettings, ledger: Ledger) -> None:
        later = {name: rule.after for name, rule in settings.tasks.items() if rule.after}
        self._task_of = settings.task_of if later else None
        self._later, self._known = later, ledger.accuracies

    def skips(self, group_id: int) -> bool:
        """Whether the task of this id is not posed yet."""
        return self._task_of is not None and self._task_of(group_id) in self.closed

    @property
    def closed(self) -> list[str]:
        """The tasks that are not posed yet."""
        return [
            name
            for name, after in self._later.items()
            if any(self._known.get(task, -1.0) < least for task, least in after.items())
        ]


class TaskShares:
    """Rule of `settings.replaces_lost`: a group that is lost is followed by another of its task, so
    that the others have exact shares. Idle without.
    """

    def __init__(self, settings: QueueSettings, ledger: Ledger) -> None:
        self._task_of = settings.task_of if settings.replaces_lost else None
        self._ledger = ledger

    def owes(self, event: Event) -> str | None:
        """Return the task that has lost a group by this event, or None."""
        if self._task_of is None or not isinstance(event, Reject | Fail | Expire):
            return None
        record = self._ledger.record(event.group_id)
        lost = record is not None and record[1] in _LOST
        return self._task_of(event.group_id) if lost else None

    def skips(self, group_id: int) -> bool:
        """Whether another task than that of this id comes next."""
        if self._task_of is None:
            return False
        ledger, wanted = self._ledger, self.due
        if wanted is None:
            followed = ledger.totals["owed"] - ledger.owed.total()
            issued = ledger.next_group_id - ledger.closed[State.SKIPPED]
            wanted = self._task_of(issued - followed)
        return self._task_of(group_id) != wanted

    @property
    def due(self) -> str | None:
        """The task of a lost group that none has followed yet, or None."""
        return min((task for task, count in self._ledger.owed.items() if count), default=None)


_LOST = (State.REJECTED, State.FAILED, State.EXPIRED)
POLL_MEMORY_S = 2.0
"""Seconds for which an actor that asked for work counts in the division of free slots."""


@dataclass(slots=True)
class _Poll:
    at: float
    want: int


class Admission:
    """Divides the free slots of a ledger among the actors that ask."""

    def __init__(
        self,
        settings: QueueSettings,
        ledger: Ledger,
        retirement: Retirement,
        continued: Mapping[int, PartialStart],
        outstanding: OutstandingLimit,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._retirement = retirement
        self._continued = continued
        self._outstanding = outstanding
        self._polls: dict[str, _Poll] = {}

    def grant(self, actor_id: str, want: int, *, now: float) -> int:
        """Grant an actor tickets, up to `want`, by `fair_share` of all free slots."""
        new = self._free_new(self._settings.capacity)
        granted = min(new, self._free_new(self._outstanding.groups))
        free = free_again(self._settings, self._ledger) + granted
        if want > free and new > granted:
            self._outstanding.refuses()
        if want <= 0 or free <= 0:  # the common answer, so it must not look at every actor
            self._polls[actor_id] = _Poll(now, want)
            return 0
        self._polls = {
            name: poll for name, poll in self._polls.items() if now - poll.at <= POLL_MEMORY_S
        }
        self._polls[actor_id] = _Poll(now, want)
        wants = {name: poll.want for name, poll in self._polls.items() if poll.want > 0}
        in_flight = {name: len(self._ledger.held.get(name, ())) for name in wants}
        share = fair_share(actor_id, wants, in_flight, free=free)
        self._polls[actor_id].want -= share
        return share

    def forget(self, actor_id: str) -> None:
        """Reserve nothing for this actor any more."""
        self._polls.pop(actor_id, None)

    def again(self) -> list[tuple[int, int]]:
        """(group id, ticket version) of waiting groups that may be issued again, continued ones
        first: all that wait, unless a resumed run has more than B.
        """
        live, waiting = self._ledger.live, self._ledger.slots[State.WAITING]
        known = {
            group_id: one.version
            for group_id, entry in waiting.items()
            if (one := self._continued.get(group_id)) and entry.attempt == one.attempt - 1
        }
        order = sorted(waiting, key=lambda group_id: (group_id not in known, group_id))
        free = free_again(self._settings, self._ledger)
        return [(group_id, known.get(group_id, live)) for group_id in order[:free]]

    def _free_new(self, most: int) -> int:
        """Count the new ids that may be issued while at most `most` groups hold a slot."""
        if self._retirement.exhausted:
            return 0
        free = most - len(self._ledger.entries)
        return max(min(free, _trainable(self._settings, self._ledger)), 0)


def free_again(settings: QueueSettings, ledger: Ledger) -> int:
    """Count the waiting groups that may be issued again now."""
    waiting, free = len(ledger.slots[State.WAITING]), settings.capacity - ledger.under_way
    return max(min(waiting, free, _trainable(settings, ledger) + waiting), 0)


def _trainable(settings: QueueSettings, ledger: Ledger) -> int:
    """Count the groups that the run can train beyond those that hold a slot."""
    return settings.total_groups - ledger.steps * settings.rollout_batch_size - ledger.untrained


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
            f"all {settings.problems} problems are retired (accuracy of {settings.retire_at:g} or "
            f"better) after {ledger.steps} of {settings.total_steps} steps; {left} groups are left "
            f"for a batch of {size}. Add problems, train fewer steps, or raise "
            "replay.filter_groups.retire_at"
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
    issued = ledger.issued - ledger.closed[State.SKIPPED]
    of = max(issued, min(FRACTION_GROUPS, settings.total_groups))
    allowed = settings.max_failed_fraction * of
    if failed > allowed:
        raise NoSignal(
            f"{failed} of {issued} groups failed for good, replay.max_attempts "
            f"{settings.max_attempts} ({_listed(ledger.failed)}); task.max_bad_fraction "
            f"{settings.max_failed_fraction:g} allows {int(allowed)}. Mend what they failed for, "
            "or raise task.max_bad_fraction to go on without them"
        )


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in reasons.most_common(5))
