"""From the groups of a learner step to the micro-batches of every rank.

Runs in: the driver (plain Python). Hides the dealing of rows: rows of a group belong in the same
micro-batch, where they share their prompt, and ranks should have equally much to do. Invariants:
every row of an update is on exactly one rank, or the ranks of one team, and in one micro-batch; all
ranks have the same number of micro-batches in an update (ranks that communicate in forward and
backward would wait for each other otherwise); the same input gives the same plan on every process
and in every run, so a resumed run repeats it.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ATTENTION_TOKENS = 8192
"""Row length at which attention, which grows with L^2, costs as much as the rest of the model."""
REPEATED = 2
"""Multiple of the token budget that a micro-batch's rows may hold, as attention repeats prompts."""


RowKey = tuple[int, int]
"""Group id, and place of the row in its group."""
RowShape = tuple[Hashable, int, int]
"""Prompt, its length, length of the response; rows of a micro-batch share equal prompts."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One row to train: its place in the group, tokens of its prompt and behind it, and the loss
    weight of each sampled token with the global normaliser (0 keeps the row out of the loss).
    """

    group_id: int
    row: int
    prompt_length: int
    length: int
    weight: float
    sampled: int
    """Tokens of `length` that the policy sampled."""
    prompt: int = 0
    """Which one of the group; rows share equal ones."""
    given: bool = False
    """Whether it is imitated, not rewarded (a demonstration)."""

    @property
    def key(self) -> RowKey:
        """Return (group_id, row)."""
        return self.group_id, self.row


@dataclass(frozen=True, slots=True)
class RowValue:
    """Value of a row: its advantage; or its reward, and the baseline of its return. `turns`: the
    reward at the end of each of its turns, instead of one at its end.
    """

    value: float
    baseline: float = 0.0
    turns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Work of a rank, or team, in a learner step: `updates[u][m]` are the rows of micro-batch m of
    optimizer update u; an empty one keeps the rank in step. A row is in one update of each epoch,
    on any rank.

    `group_ids`: groups whose payload the rank needs, ascending. `epoch_updates`: updates per epoch.
    """

    step: int
    group_ids: tuple[int, ...]
    updates: tuple[tuple[tuple[PlanRow, ...], ...], ...]
    epoch_updates: int

    @property
    def rows(self) -> dict[RowKey, PlanRow]:
        """Collect every row that this rank works on, once, in the order of the keys."""
        # its weight may differ between epochs
        rows = {row.key: row for update in self.updates for batch in update for row in batch}
        return {key: rows[key] for key in sorted(rows)}

    @property
    def owned(self) -> frozenset[RowKey]:
        """Collect the rows of the first epoch here: each row of a step is owned by one rank."""
        return frozenset(
            row.key
            for update in self.updates[: self.epoch_updates]
            for batch in update
            for row in batch
        )


def minibatches(
    group_ids: Sequence[int], *, seed: int, step: int, epoch: int, groups_per_minibatch: int
) -> list[list[int]]:
    """Permute the groups by a hash of (seed, step, epoch) and cut them into minibatches, one per
    update.

    Depends on the set of ids alone. The last minibatch may be smaller; ids inside one are
    ascending. Raises ValueError for a repeated id or a minibatch size below 1.
    """
    if groups_per_minibatch < 1 or len(set(group_ids)) != len(group_ids):
        raise ValueError(
            f"minibatches of {groups_per_minibatch} groups from ids {list(group_ids)}; at "
            "least 1 group each, and no id twice"
        )

    def key(group_id: int) -> tuple[bytes, int]:
        return hashlib.blake2b(
            f"{seed}/{step}/{epoch}/{group_id}".encode(), digest_size=16
        ).digest(), group_id

    order = sorted(group_ids, key=key)
    return [
        sorted(order[start : start + groups_per_minibatch])
        for start in range(0, len(order), groups_per_minibatch)
    ]


def micro_batches(rows: Sequence[RowShape], token_budget: int) -> list[list[int]]:
    """Cut rows, in order, into micro-batches of at most `token_budget` tokens with each prompt
    counted once, and REPEATED times that with every row's prompt; a longer row is a micro-batch of
    its own.
    """
    batches: list[list[int]] = []
    prompts: set[Hashable] = set()
    room = attended = 0
    for position, (prompt, prompt_length, length) in enumerate(rows):
        whole = prompt_length + length
        more = length if prompt in prompts else whole
        if not batches or more > room or whole > attended:
            batches.append([])
            prompts.clear()
            more, room, attended = whole, token_budget, REPEATED * token_budget
        batches[-1].append(position)
        prompts.add(prompt)
        room -= more
        attended -= whole
    return batches


def deal(rows: Sequence[RowShape], *, ranks: int, token_budget: int) -> list[list[list[int]]]:
    """Deal positions of rows to ranks and micro-batches: result[rank][micro_batch].

    Rows share their prompt inside a micro-batch, but whole groups cannot be dealt as evenly as
    rows. So the rows of each prompt are dealt whole, in halves, quarters and so on, largest first
    to the rank with the least to do, and the deal whose slowest rank is fastest is taken, the
    coarsest of equals. A row costs its tokens, shared prompt tokens once, and L^2 for attention.
    All ranks have equally many micro-batches, at least one; missing ones are empty. Raises
    ValueError for arguments below 1.
    """
    if ranks < 1 or token_budget < 1:
        raise ValueError(
            f"{ranks} ranks with {token_budget} tokens per micro-batch; both must be at least 1"
        )
    answered: dict[Hashable, list[int]] = {}
    for position in sorted(
        range(len(rows)), key=lambda position: (-sum(rows[position][1:]), position)
    ):
        answered.setdefault(rows[position][0], []).append(position)
    largest, pieces, deals = max(map(len, answered.values()), default=1), 1, []
    while True:
        split = [
            places[start::pieces]
            for places in answered.values()
            for start in range(min(pieces, len(places)))
        ]
        deals.append(_dealt(rows, split, ranks, token_budget))
        if pieces >= largest or ranks == 1:
            break
        pieces *= 2
    _, dealt = min(deals, key=lambda one: one[0])
    count = max(1, *(len(batches) for batches in dealt))
    return [batches + [[] for _ in range(count - len(batches))] for batches in dealt]


def _dealt(
    rows: Sequence[RowShape], pieces: Sequence[list[int]], ranks: int, token_budget: int
) -> tuple[float, list[list[list[int]]]]:
    """Deal undivided pieces to ranks: cost of the slowest rank, and micro-batches of each."""
    loads = [_cost(rows, piece) for piece in pieces]
    waiting = [(0.0, rank) for rank in range(ranks)]
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(pieces)), key=lambda index: (-loads[index], pieces[index])):
        load, rank = heapq.heappop(waiting)
        heapq.heappush(waiting, (load + loads[index], rank))
        mine[rank] += pieces[index]
    dealt = [
        [
            [places[k] for k in batch]
            for batch in micro_batches([rows[place] for place in places], token_budget)
        ]
        for places in mine
    ]
    return max(sum(_cost(rows, batch) for batch in batches) for batches in dealt), dealt


def _cost(rows: Sequence[RowShape], positions: Sequence[int]) -> float:
    """Estimate the cost of the rows in one micro-batch, in tokens."""
    prompts = {rows[position][0]: rows[position][1] for position in positions}
    shapes = [rows[position][1:] for position in positions]
    return sum(prompts.values()) + sum(
        length + (prompt + length) ** 2 / ATTENTION_TOKENS for prompt, length in shapes
    )


def make_rank_plans(
    step: int,
    updates_rows: list[list[PlanRow]],
    *,
    ranks: int,
    token_budget: int,
    epoch_updates: int,
    team: int = 1,
) -> list[RankPlan]:
    """Build every rank's plan for a learner step from the rows of each optimizer update. team:
    neighbouring ranks that have the same plan, since they share every micro-batch (`learner.team`).
    """
    teams = ranks // team
    updates: list[list[tuple[tuple[PlanRow, ...], ...]]] = [[] for _ in range(teams)]
    for rows in updates_rows:
        dealt = deal(
            [((row.group_id, row.prompt), row.prompt_length, row.length) for row in rows],
            ranks=teams,
            token_budget=token_budget,
        )
        for number, batches in enumerate(dealt):
            updates[number].append(
                tuple(tuple(rows[position] for position in batch) for batch in batches)
            )
    groups = [
        sorted({row.group_id for batches in plan for batch in batches for row in batch})
        for plan in updates
    ]
    return [
        RankPlan(step, tuple(ids), tuple(plan), epoch_updates)
        for ids, plan in zip(groups, updates, strict=True)
        for _ in range(team)
    ]
