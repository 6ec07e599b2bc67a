"""The tokens of which each token was sampled, where sampling is cut (`rollout.top_p`, `top_k`).

Runs in: any process. Hides how sets lie one behind the other, in planes too. Invariants: a set has
its tokens once, in rising order; an empty one stands for the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from async_grpo.wire.groups import WireError

_COUNTS, _IDS = "kept_counts", "kept_ids"


@dataclass(frozen=True, slots=True)
class KeptSets:
    """Sets of L tokens: how many each has [L] uint16, and their ids, set after set, int32."""

    counts: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> KeptSets:
        """Take a set for each token."""
        ids = list(chain.from_iterable(map(sorted, sets)))
        return cls(np.array([*map(len, sets)], np.uint16), np.array(ids, np.int32))

    @classmethod
    def in_planes(cls, planes: Mapping[str, np.ndarray]) -> KeptSets | None:
        """Return those of a group's sampled tokens; None for a group without."""
        if _COUNTS not in planes:
            return None
        return cls(planes[_COUNTS].reshape(-1), planes.get(_IDS, np.zeros(0, np.int32)).reshape(-1))

    @property
    def planes(self) -> dict[str, np.ndarray]:
        """Return the planes that say this."""
        return {_COUNTS: self.counts[:, None], _IDS: self.ids[:, None]}

    def split(self, lengths: Sequence[int]) -> list[KeptSets]:
        """Cut into parts of so many tokens."""
        counts = np.split(self.counts, np.cumsum(lengths)[:-1])
        ids = np.split(self.ids, np.cumsum([part.sum(dtype=np.int64) for part in counts])[:-1])
        return [*map(KeptSets, counts, ids)]

    def by_size(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the places [S] of tokens that had others beside them, their sets [S, K] filled up
        with -1, and the places of those that are from the whole vocabulary.
        """
        several, whole = np.flatnonzero(self.counts > 1), np.flatnonzero(self.counts == 0)
        counts = self.counts[several].astype(np.int64)
        inside = np.arange(counts.max(initial=1)) < counts[:, None]
        sets = np.full(inside.shape, -1)
        sets[inside] = self.ids[np.repeat(self.counts > 1, self.counts)]
        return several, sets, whole

    def check(self, sampled: np.ndarray) -> None:
        """Raise WireError unless these are the sets of the sampled tokens [L]."""
        counts = self.counts.astype(np.int64)
        if len(counts) != len(sampled) or counts.sum() != len(self.ids):
            raise WireError(
                f"{len(counts)} sets of {counts.sum()} tokens in all, for {len(sampled)} sampled "
                f"tokens, and {len(self.ids)} are there"
            )
        owner = np.repeat(np.arange(len(counts)), counts)
        rises = (self.ids[1:] > self.ids[:-1]) | (owner[1:] != owner[:-1])
        if self.ids.min(initial=0) < 0 or not rises.all():
            raise WireError("the tokens of a set are not natural numbers in rising order")
        inside = np.zeros(len(counts), bool)
        inside[owner[self.ids == sampled[owner]]] = True
        if (outside := (counts > 0) & ~inside).any():
            raise WireError(f"sampled token {outside.argmax()} is not in the set it is from")


def joined(parts: Sequence[KeptSets | None], lengths: Sequence[int]) -> KeptSets | None:
    """Join the sets of parts with so many tokens, empty ones of a part that has none; None where
    no part has any.
    """
    if all(part is None for part in parts):
        return None
    whole = [
        part or KeptSets(np.zeros(length, np.uint16), np.zeros(0, np.int32))
        for part, length in zip(parts, lengths, strict=True)
    ]
    arrays = zip(*((part.counts, part.ids) for part in whole), strict=True)
    return KeptSets(*map(np.concatenate, arrays))
