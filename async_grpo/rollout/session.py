"""The tokens of one episode: what was sampled, and what was fed in between.

Runs in: rollout actors. Hides how rows, segments and versions are kept while an episode grows:

    prompt | context sampled | context sampled | ...          one row; `feed` and `take` append
    other prompt | context sampled ...                         after `fork`: another row

Invariants: what was sampled or fed is never changed nor rendered again; every sampled token keeps
the log-prob and the version with which the engine gave it; context that nothing follows is in no
row; a row without a sampled token is no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from async_grpo.groups import VersionSpan
from async_grpo.rollout.engine import Completion


@dataclass(slots=True)
class SessionRow:
    """One row of a session, while it grows and afterwards."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    labels: list[VersionSpan] = field(default_factory=list)
    waiting: int = 0
    """Tokens of context behind the last sampled one."""

    @property
    def response_ids(self) -> np.ndarray:
        """Context and sampled tokens [T] int32, up to the last sampled one."""
        return np.asarray(self.ids[: len(self.ids) - self.waiting], np.int32)

    @property
    def behavior_logprobs(self) -> np.ndarray:
        """Log-probs [S] float32 of the sampled tokens."""
        return np.concatenate(self.logprobs)

    @property
    def versions(self) -> list[VersionSpan]:
        """Policy versions over [0, S); neighbours are of different ones."""
        merged: list[VersionSpan] = []
        for span in self.labels:
            if merged and merged[-1].policy_version == span.policy_version:
                span = VersionSpan(span.policy_version, merged.pop().start, span.end)
            merged.append(span)
        return merged


class Session:
    """One episode's tokens, append-only."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._rows = [SessionRow(list(prompt_ids))]
        self.sampled = 0
        """Sampled tokens of all rows."""

    @property
    def tokens(self) -> list[int]:
        """What the next turn follows: prompt, context and sampled tokens of the newest row."""
        return self._rows[-1].prompt + self._rows[-1].ids

    @property
    def length(self) -> int:
        """Tokens of the newest row, with its prompt."""
        return len(self._rows[-1].prompt) + len(self._rows[-1].ids)

    @property
    def behind(self) -> int:
        """Tokens of the newest row behind its prompt."""
        return len(self._rows[-1].ids)

    @property
    def computed(self) -> int | None:
        """Tokens of the newest row that its last turn has computed, which leaves out what was said
        last; None before its first turn.
        """
        row = self._rows[-1]
        return len(row.prompt) + len(row.ids) - row.waiting - 1 if row.segments else None

    @property
    def forked(self) -> bool:
        """Whether the newest row is not the first."""
        return len(self._rows) > 1

    @property
    def rows(self) -> list[SessionRow]:
        """The rows in which something was sampled, in order."""
        return [row for row in self._rows if row.segments]

    @property
    def turns(self) -> int:
        """Turns that were sampled."""
        return sum(len(row.segments) for row in self._rows)

    def feed(self, ids: Sequence[int]) -> None:
        """Append context."""
        row = self._rows[-1]
        row.ids += ids
        row.waiting += len(ids)

    def take(self, completion: Completion) -> None:
        """Append a turn as the engine has sampled it."""
        row, count = self._rows[-1], len(completion.token_ids)
        at = sum(sampled for _, sampled in row.segments)
        row.ids += completion.token_ids.tolist()
        row.segments.append((row.waiting, count))
        row.waiting = 0
        row.logprobs.append(completion.logprobs)
        row.labels += [
            VersionSpan(span.policy_version, span.start + at, span.end + at)
            for span in completion.versions
        ]
        self.sampled += count

    def fork(self, prompt_ids: Sequence[int]) -> None:
        """Go on behind another prompt, in a row of its own."""
        self._rows.append(SessionRow(list(prompt_ids)))
