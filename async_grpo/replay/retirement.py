"""Which problems are posed no more because they are answered right often enough.

Runs in: the replay queue's process. Hides how a group id becomes a problem; the set itself is the ledger's. Invariant: a problem that is
retired stays retired; only ids that are not issued yet are affected.
"""

from __future__ import annotations

from async_grpo.algo.filters import accuracy
from async_grpo.replay.rules import QueueSettings, rows_to_train
from async_grpo.wire import GroupMeta


class Retirement:
    """The rule of retirement over a set of `retired` problems; without `settings.retire_at` none ever is."""

    def __init__(self, settings: QueueSettings, retired: set[int]) -> None:
        """Raises ValueError for a retired problem that the task does not have."""
        self._at, self._problem, self._problems, self._retired = settings.retire_at, settings.problem, settings.problems, retired
        if self._at is not None and retired and max(retired) >= self._problems:
            raise ValueError(f"problem {max(retired)} was retired, but the task has {self._problems} problems: not the same data")

    @property
    def exhausted(self) -> bool:
        """Whether no problem is left to pose. While this is false, one of any 2 x `problems` - 1 successive ids is not retired."""
        return self._at is not None and len(self._retired) >= self._problems

    def retires(self, meta: GroupMeta) -> int | None:
        """The problem that this group retires: the mean verdict of its responses is at least `retire_at`. None if it retires none."""
        if self._at is None:
            return None
        rate, problem = accuracy([row.verdict for row in rows_to_train(meta)]), self._index(meta.group_id)
        return problem if rate is not None and rate >= self._at and problem not in self._retired else None

    def skips(self, group_id: int) -> bool:
        """Whether this id poses a retired problem."""
        return bool(self._retired) and self._at is not None and self._index(group_id) in self._retired

    def _index(self, group_id: int) -> int:
        assert self._problem is not None  # with `retire_at`, QueueSettings has one
        return self._problem(group_id)
