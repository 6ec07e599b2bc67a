"""Which problems are posed no more because they are answered right often enough.

Runs in: the replay queue's process. Hides the set of retired problems and how a group id becomes a problem. Invariant: a problem that is
retired stays retired; only ids that are not issued yet are affected.
"""

from __future__ import annotations

from collections.abc import Sequence

from async_grpo.algo.filters import accuracy
from async_grpo.replay.rules import QueueSettings, rows_to_train
from async_grpo.wire import GroupMeta


class Retirement:
    """The retired problems of a run; without `settings.retire_at` none ever is."""

    def __init__(self, settings: QueueSettings) -> None:
        self._at, self._problem, self._problems = settings.retire_at, settings.problem, settings.problems
        self._retired: set[int] = set()

    def __len__(self) -> int:
        return len(self._retired)

    @property
    def exhausted(self) -> bool:
        """Whether no problem is left to pose. While this is false, one of any 2 x `problems` - 1 successive ids is not retired."""
        return self._at is not None and len(self._retired) >= self._problems

    def note(self, meta: GroupMeta) -> None:
        """A group was answered: its problem retires if the mean verdict of its responses is at least `retire_at`."""
        if self._at is None:
            return
        rate = accuracy([row.verdict for row in rows_to_train(meta)])
        if rate is not None and rate >= self._at:
            self._retired.add(self._index(meta.group_id))

    def skips(self, group_id: int) -> bool:
        """Whether this id poses a retired problem."""
        return bool(self._retired) and self._at is not None and self._index(group_id) in self._retired

    def to_list(self) -> list[int]:
        """The retired problems, sorted."""
        return sorted(self._retired)

    def restore(self, retired: Sequence[int]) -> None:
        """Continue from `to_list`. Raises ValueError for a problem that the task does not have."""
        if self._at is not None and retired and max(retired) >= self._problems:
            raise ValueError(f"the replay snapshot retired problem {max(retired)}, but the task has {self._problems} problems: not the same data")
        self._retired = set(retired)

    def _index(self, group_id: int) -> int:
        assert self._problem is not None  # with `retire_at`, QueueSettings has one
        return self._problem(group_id)
