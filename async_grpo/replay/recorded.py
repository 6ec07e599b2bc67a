"""The batches that a run recorded, in the order in which it trained them: a queue that only repeats.

Runs in: the recorded queue's process, for a learner without rollout actors. Hides the journal. Invariant: it serves exactly the recorded
groups, by the attempt that was trained; one that cannot be read is an error, never left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from async_grpo.errors import SetupError
from async_grpo.replay.history import History, read_history
from async_grpo.wire import Batch, WireError, decode_meta, pack_frames


class RecordedQueue:
    """The queue's side of the loop and of the learner, from `<run directory>/journal`."""

    def __init__(self, directory: str) -> None:
        """Raises JournalError for a journal that cannot be read."""
        self._history: History = read_history(Path(directory))

    async def get_batch(self, step: int) -> Batch | None:
        """The groups that learner step `step` trained. Raises SetupError when the journal does not have them."""
        if step not in self._history.steps:
            raise SetupError(f"the journal in {self._history.directory} has no learner step {step}")
        try:
            return Batch(step, tuple(decode_meta(self._history.frame(group_id)) for group_id in self._history.steps[step]))
        except (LookupError, WireError) as error:
            raise SetupError(f"learner step {step} cannot be repeated: {error}") from error

    async def payload(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        """Their frames, as the queue would serve them."""
        return pack_frames([self._history.frame(group_id) for group_id in group_ids])

    async def metrics(self) -> dict[str, float]:
        """None: nothing is admitted, ordered or counted here."""
        return {}

    async def digests(self) -> dict[int, str]:
        """Digest of the weights of every version that was live, where the run recorded one."""
        return {version: digest for version, digest in self._history.live.items() if digest}
