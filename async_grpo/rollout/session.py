"""The tokens of one episode: what was sampled, and what was fed in between.

Runs in: rollout actors. Hides how rows, segments and versions are kept while an episode grows:

    prompt | context sampled | context sampled | ...          one row; `feed` and `take` append
    other prompt | context sampled ...                         after `fork`: another row

An episode that is played in turn grows in its newest row; one whose turns are asked for over HTTP
names the row.

Invariants: what was sampled or fed is never changed nor rendered again; every sampled token keeps
the log-prob and the version with which the engine gave it; context that nothing follows is in no
row; a row without a sampled token is no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from async_grpo.rollout.engine.base import Completion, EngineError
from async_grpo.wire.groups import VersionSpan
from async_grpo.wire.kept import KeptSets

NO_ROUTES = np.empty((0, 0), np.uint8)


@dataclass(slots=True)
class SessionRow:
    """One row of a session, while it grows and afterwards."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    kept: list[KeptSets | None] = field(default_factory=list)
    """Of which tokens those of each turn were sampled."""
    labels: list[VersionSpan] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    """Of each turn, what `Completion.routes` says of tokens that no turn before computed."""
    waiting: int = 0
    """Tokens of context behind the last sampled one."""
    salt: str = ""
    """Of the prefix cache, in its last turn."""

    @property
    def length(self) -> int:
        """Tokens, with the prompt."""
        return len(self.prompt) + len(self.ids)

    @property
    def tokens(self) -> list[int]:
        """What the next turn follows: prompt, context and sampled tokens."""
        return self.prompt + self.ids

    @property
    def computed(self) -> int | None:
        """Tokens that its last turn has computed, which leaves out what was said last; None before
        its first turn.
        """
        return self.length - self.waiting - 1 if self.segments else None

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
    """One episode's tokens, append-only. A row is the newest one where none is named."""

    def __init__(self, prompt_ids: Sequence[int] | None = None) -> None:
        """None: an episode whose first row begins with a `fork`."""
        self._rows = [] if prompt_ids is None else [SessionRow(list(prompt_ids))]
        self.sampled = 0
        """Sampled tokens of all rows."""

    def row(self, number: int = -1) -> SessionRow:
        """Return a row by number, in the order of the forks."""
        return self._rows[number]

    @property
    def tokens(self) -> list[int]:
        """What the next turn of the newest row follows."""
        return self.row().tokens

    @property
    def length(self) -> int:
        """Tokens of the newest row, with its prompt."""
        return self.row().length

    @property
    def behind(self) -> int:
        """Tokens of the newest row behind its prompt."""
        return len(self.row().ids)

    @property
    def rows(self) -> list[SessionRow]:
        """The rows in which something was sampled, in order."""
        return [row for row in self._rows if row.segments]

    @property
    def turns(self) -> int:
        """Turns that were sampled."""
        return sum(len(row.segments) for row in self._rows)

    def feed(self, ids: Sequence[int], number: int = -1) -> None:
        """Append context."""
        row = self.row(number)
        row.ids += ids
        row.waiting += len(ids)

    def take(self, completion: Completion, number: int = -1) -> None:
        """Append a turn as the engine has sampled it."""
        row, count = self.row(number), len(completion.token_ids)
        at = sum(sampled for _, sampled in row.segments)
        row.ids += completion.token_ids.tolist()
        row.segments.append((row.waiting, count))
        row.waiting = 0
        row.logprobs.append(completion.logprobs)
        routes = completion.routes
        if routes is None:  # of a checkpoint, or of an engine that does not say
            routes = NO_ROUTES
        elif len(routes) != row.length - 1:
            raise EngineError(f"{row.length} tokens came with routes of {len(routes)}")
        row.routes.append(routes[sum(map(len, row.routes)) :])
        row.kept.append(completion.kept)
        row.labels += [
            VersionSpan(span.policy_version, span.start + at, span.end + at)
            for span in completion.versions
        ]
        row.salt = completion.salt or row.salt
        self.sampled += count

    def prefilled(self, completion: Completion, number: int = -1) -> tuple[str, int]:
        """Return the tokens that a turn has computed again, before it is taken, and why: `fork`, a
        row that begins anew; `weights` that came since the turn before; or `cache`, which no longer
        (or never) had the prefix.
        """
        row = self.row(number)
        computed = row.computed
        if not completion.salt:  # of a checkpoint: nothing was computed
            return "cache", 0
        if computed is None:
            forked = row is not self._rows[0]
            return "fork", max(row.length - completion.cached_tokens, 0) if forked else 0
        cause = "cache" if row.salt == completion.salt else "weights"
        return cause, max(computed - completion.cached_tokens, 0)

    def forget(self, number: int) -> None:
        """Take a row's last turn out again, which nobody has read."""
        row = self.row(number)
        context, count = row.segments.pop()
        del row.ids[len(row.ids) - count - row.waiting :]
        row.waiting = context
        row.logprobs.pop()
        row.routes.pop()
        row.kept.pop()
        kept = sum(sampled for _, sampled in row.segments)
        row.labels = [
            VersionSpan(span.policy_version, span.start, min(span.end, kept))
            for span in row.labels
            if span.start < kept
        ]

    def fork(self, prompt_ids: Sequence[int]) -> int:
        """Go on behind another prompt, in a row of its own; return its number."""
        self._rows.append(SessionRow(list(prompt_ids)))
        return len(self._rows) - 1
