"""Groups and the ledger of a run as plain values: what a person filters, sorts and reads.

Runs in: any process that looks at a run. Hides which questions need a group's frame: those are asked last, of the groups that everything
else selects. All numbers of a group are of its responses to train; a baseline counts nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Literal, NamedTuple

from async_grpo.replay.history import GroupRecord, History
from async_grpo.replay.ledger import State
from async_grpo.replay.rules import rows_to_train
from async_grpo.wire import GroupMeta, WireError

Facts = dict[str, Any]
"""Plain values of one group or of the ledger, as JSON can hold them."""
Sort = Literal["id", "reward", "length", "lag", "seconds"]

SORT_KEYS: dict[Sort, str] = {"id": "group_id", "reward": "reward", "length": "length_mean", "lag": "lag_max", "seconds": "seconds"}
REASON_STATES = (State.WAITING, State.REJECTED, State.FAILED, State.EXPIRED)
"""A reason is of the group's present state only in these; a trained group may have lost an attempt before."""
LEAST_IMPORTANT = ("actor", "seconds", "ticket", "truncated", "verdict")
"""Columns that a narrow terminal does without, the first one first."""
LONG = ("prompt", "best response", "reason")
LONG_MIN_WIDTH, GAP = 16, 2
"""Characters that a column of long text gets at least, and between columns."""


@dataclass(frozen=True)
class Selection:
    """Which groups, in which order; None selects all. `steps` is a range with both ends, `actor` may contain `*`, `limit` 0 is no limit."""

    states: Sequence[str] | None = None
    steps: tuple[int, int] | None = None
    version: int | None = None
    actor: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    sort: Sort = "id"
    reverse: bool = False
    limit: int = 0

    @property
    def reads_frames(self) -> bool:
        """Whether the journal's events alone cannot tell which groups match."""
        return (self.version, self.actor, self.min_reward, self.max_reward) != (None, None, None, None)

    def may_match(self, record: GroupRecord) -> bool:
        """What can be told without the frame. No token is older than its ticket, or newer than the weights that its step trained."""
        if self.states and record.state not in self.states:
            return False
        if self.steps and not (record.step is not None and self.steps[0] <= record.step <= self.steps[1]):
            return False
        if self.actor and record.actor_id and not fnmatchcase(record.actor_id, self.actor):
            return False
        if (self.min_reward is not None or self.max_reward is not None) and not record.frames:
            return False
        if self.version is None or not record.frames or record.step is None:
            return self.version is None or bool(record.frames)
        return (record.policy_version or 0) <= self.version < record.step

    def matches(self, facts: Facts) -> bool:
        """The rest, of `group_facts`."""
        if self.version is not None and self.version not in facts["versions"]:
            return False
        if self.actor and not fnmatchcase(facts["actor"], self.actor):
            return False
        reward = facts["reward"]
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        return self.max_reward is None or reward is not None and reward <= self.max_reward


def candidates(history: History, selection: Selection) -> list[GroupRecord]:
    """Groups that may match, as far as no frame is needed; the newest first, or last with `reverse`."""
    found = [record for record in history.groups.values() if selection.may_match(record)]
    return sorted(found, key=lambda record: record.group_id, reverse=not selection.reverse)


def select(history: History, selection: Selection, weights: Mapping[str, float]) -> Iterator[Facts]:
    """The groups that match, in order, at most `limit`; sorted by id they are read only as far as they are asked for."""
    every = (group_facts(history, record, weights) for record in candidates(history, selection))
    found: Iterator[Facts] = (facts for facts in every if selection.matches(facts))
    if selection.sort != "id":
        key, sign = SORT_KEYS[selection.sort], 1 if selection.reverse else -1
        found = iter(sorted(found, key=lambda facts: (facts[key] is None, sign * (facts[key] or 0))))
    return islice(found, selection.limit) if selection.limit > 0 else found


def group_facts(history: History, record: GroupRecord, weights: Mapping[str, float]) -> Facts:
    """One group at its latest attempt. Without its result, what only that can tell is None or empty. weights: see `reward`."""
    facts: Facts = {
        "group_id": record.group_id, "attempt": record.attempt, "state": record.state.value if record.state else "unknown",
        "step": record.step, "ticket_version": record.policy_version, "versions": [], "lag_min": None, "lag_max": None, "reward": None,
        "rewards": {}, "verdict": None, "responses": 0, "length_min": None, "length_mean": None, "length_max": None, "truncated": None,
        "seconds": None, "finished_at": None, "actor": record.actor_id, "reason": record.reason if record.state in REASON_STATES else "",
    }
    try:
        meta = history.meta(record.group_id, record.attempt)
    except WireError as error:
        return facts | {"reason": f"its result cannot be read: {error}"}
    return facts if meta is None else facts | _measured(meta, record.step, weights)


def reward(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The one number of a response: the weighted sum, or without weights the first component."""
    if weights:
        return sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())
    return next(iter(rewards.values()))


def ledger_facts(history: History) -> Facts:
    """Where the run is, and what became of its groups."""
    ledger = history.ledger
    return {
        "steps": ledger.steps, "training_step": ledger.training_step, "live_version": ledger.live,
        "digest": history.live.get(ledger.live, ""), "over": ledger.over,
        "starts": [{"epoch": start.epoch, "step": start.step} for start in history.starts], "issued": ledger.issued,
        "states": ledger.counts(), "rejected": dict(ledger.rejected), "failed": dict(ledger.failed), "totals": dict(ledger.totals),
        "retired": len(ledger.retired), "notes": history.notes,
    }


def _measured(meta: GroupMeta, step: int | None, weights: Mapping[str, float]) -> Facts:
    rows, times = rows_to_train(meta), meta.times.values()
    versions = sorted({version for row in rows for version, _ in row.versions})
    lengths, verdicts = [row.length for row in rows], [row.verdict for row in rows if row.verdict is not None]
    return {
        "versions": versions, "lag_min": step - 1 - versions[-1] if step else None, "lag_max": step - 1 - versions[0] if step else None,
        "reward": _mean([reward(row.rewards, weights) for row in rows]),
        "rewards": {name: _mean([row.rewards.get(name, 0.0) for row in rows]) for name in rows[0].rewards},
        "verdict": _mean(verdicts) if verdicts else None, "responses": len(rows),
        "length_min": min(lengths), "length_mean": _mean(lengths), "length_max": max(lengths),
        "truncated": sum(row.finish_reason == "length" for row in rows), "seconds": max(times) - min(times) if times else None,
        "finished_at": max(times, default=None), "actor": meta.actor_id,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- columns for a person ----


class Column(NamedTuple):
    """A column of a table of groups: plain text on one line, whatever the run contains."""

    header: str
    cells: list[str]
    justify: Literal["left", "right"]

    @property
    def long(self) -> bool:
        """Whether it may be folded."""
        return self.header in LONG

    @property
    def width(self) -> int:
        """Characters that it needs, with the gap to the next one."""
        widest = max(map(len, (self.header, *self.cells)))
        return GAP + (min(widest, LONG_MIN_WIDTH) if self.long else widest)


def visible(text: str) -> str:
    """The text on one line, with control characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def columns_of(groups: Sequence[Facts]) -> list[Column]:
    """What `group_facts` say, one cell per group; a column that would be empty is left out."""
    names = dict.fromkeys(name for facts in groups for name in facts["rewards"])
    rewards: list[_Cells] = [(name, "right", lambda facts, name=name: _number(facts["rewards"].get(name))) for name in names]
    columns = [
        Column(visible(header), [visible(cell(facts)) for facts in groups], justify)
        for header, justify, cell in (*_BEFORE_REWARDS, *rewards, *_AFTER_REWARDS)
    ]
    return [column for column in columns if any(column.cells)]


def narrowed(columns: list[Column], width: int) -> list[Column]:
    """The columns that fit into `width` characters: without the least important ones, as far as needed."""
    for name in LEAST_IMPORTANT:
        if sum(column.width for column in columns) <= width:
            break
        columns = [column for column in columns if column.header != name]
    return columns


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _range(low: int | None, high: int | None) -> str:
    return "" if low is None else str(low) if low == high else f"{low}-{high}"


def _tokens(facts: Facts) -> str:
    text = _range(facts["length_min"], facts["length_max"])
    return f"{text} ({facts['length_mean']:.1f})" if "-" in text else text


_Cells = tuple[str, Literal["left", "right"], Callable[[Facts], str]]
_BEFORE_REWARDS: tuple[_Cells, ...] = (
    ("group", "right", lambda facts: str(facts["group_id"])),
    ("attempt", "right", lambda facts: str(facts["attempt"]) if facts["attempt"] > 1 else ""),
    ("state", "left", lambda facts: facts["state"].replace("_", " ")),
    ("step", "right", lambda facts: str(facts["step"] or "")),
    ("ticket", "right", lambda facts: "" if facts["ticket_version"] is None else f"v{facts['ticket_version']}"),
    ("sampled", "right", lambda facts: f"v{_range(facts['versions'][0], facts['versions'][-1])}" if facts["versions"] else ""),
    ("lag", "right", lambda facts: _range(facts["lag_min"], facts["lag_max"])),
)
_AFTER_REWARDS: tuple[_Cells, ...] = (
    ("verdict", "right", lambda facts: "" if facts["verdict"] is None else f"{facts['verdict']:.0%}"),
    ("tokens", "right", _tokens),
    ("truncated", "right", lambda facts: f"{facts['truncated']} of {facts['responses']}" if facts["truncated"] else ""),
    ("seconds", "right", lambda facts: _number(facts["seconds"])),
    ("actor", "left", lambda facts: facts["actor"]),
    ("prompt", "left", lambda facts: facts.get("prompt", "")),
    ("best response", "left", lambda facts: facts.get("best_response", "")),
    ("reason", "left", lambda facts: facts["reason"]),
)
