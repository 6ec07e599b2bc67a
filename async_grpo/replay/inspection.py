"""Groups and the ledger of a run as plain values: what a person filters, sorts and reads.

Runs in: any process that looks at a run. Hides which questions need a group's frame: those are
asked last, of the groups that everything else selects. All numbers of a group are of its responses
to train; a baseline counts nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from async_grpo.replay.history import GroupRecord, History, Start, Unlisted
from async_grpo.replay.journal import segment_path, segments
from async_grpo.replay.ledger import Ledger, State
from async_grpo.replay.token_ledger import PLACES
from async_grpo.runtime import text as text_for_people
from async_grpo.runtime.text import ago
from async_grpo.wire import GroupMeta, WireError

Facts = dict[str, Any]
"""Plain values of one group or of the ledger, as JSON can hold them."""
Sort = Literal["id", "reward", "length", "lag", "seconds"]

SORT_KEYS: dict[Sort, str] = {
    "id": "group_id",
    "reward": "reward",
    "length": "length_mean",
    "lag": "lag_max",
    "seconds": "seconds",
}
REASON_STATES = (State.WAITING, State.REJECTED, State.FAILED, State.EXPIRED)
"""A reason is of the group's present state only in these; a trained group may have lost an attempt
before.
"""
HAS_RESULT = (State.READY, State.TRAINING, State.TRAINED)
"""A group in one of these had a result, whatever the journal still has of it."""
GONE = "its result is no longer in the journal"
COUNTED = 2_000
"""Results that are read only to say how many groups match: a fraction of a second, unless responses
are very long.
"""
SILENT_S = 60.0
"""Seconds after which a journal that grows no more and has no end is pointed out."""
ONE = {"attempts_lost": "attempt lost", "expirations": "expiration"}
"""What a counter is called when it is 1."""
LONG = ("prompt", "best response", "reason")
LONG_MIN_WIDTH, GAP = 16, 2
"""Characters that a column of long text gets at least, and between columns."""


@dataclass(frozen=True)
class Selection:
    """Which groups, in which order; None selects all. `steps` is a range with both ends, `actor`
    may contain `*`.
    """

    states: Sequence[str] | None = None
    steps: tuple[int, int] | None = None
    version: int | None = None
    actor: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    sort: Sort = "id"
    reverse: bool = False

    @property
    def narrows(self) -> bool:
        """Whether it leaves groups out."""
        return bool(self.states or self.steps or self.reads_frames)

    @property
    def reads_frames(self) -> bool:
        """Whether the journal's events alone cannot tell which groups match."""
        return (self.version, self.actor, self.min_reward, self.max_reward) != (
            None,
            None,
            None,
            None,
        )

    def may_match(self, record: GroupRecord) -> bool:
        """What can be told without the frame. No token is older than its ticket, or newer than the
        weights that its step trained.
        """
        if self.states and record.state not in self.states:
            return False
        if self.steps and not (
            record.step is not None and self.steps[0] <= record.step <= self.steps[1]
        ):
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
        return self.max_reward is None or (reward is not None and reward <= self.max_reward)


def candidates(history: History, selection: Selection) -> list[GroupRecord]:
    """Groups that may match, as far as no frame is needed; the newest first, or last with
    `reverse`.
    """
    found = [record for record in history.groups.values() if selection.may_match(record)]
    return sorted(found, key=lambda record: record.group_id, reverse=not selection.reverse)


def select(history: History, selection: Selection, weights: Mapping[str, float]) -> Iterator[Facts]:
    """The groups that match, in order; sorted by id they are read only as far as they are asked
    for.
    """
    every = (group_facts(history, record, weights) for record in candidates(history, selection))
    found: Iterator[Facts] = (facts for facts in every if selection.matches(facts))
    if selection.sort != "id":
        key, sign = SORT_KEYS[selection.sort], 1 if selection.reverse else -1
        found = iter(
            sorted(found, key=lambda facts: (facts[key] is None, sign * (facts[key] or 0)))
        )
    return found


def count(history: History, selection: Selection, weights: Mapping[str, float]) -> int | None:
    """How many groups match; None where that would take a while to tell."""
    found = candidates(history, selection)
    if not selection.reads_frames:
        return len(found)
    return (
        None
        if len(found) > COUNTED
        else sum(selection.matches(group_facts(history, record, weights)) for record in found)
    )


def group_facts(history: History, record: GroupRecord, weights: Mapping[str, float]) -> Facts:
    """One group at its latest attempt. Without its result, what only that can tell is None or
    empty. weights: see `reward`.
    """
    facts: Facts = {
        "group_id": record.group_id,
        "attempt": record.attempt,
        "state": record.state.value if record.state else "unknown",
        "step": record.step,
        "ticket_version": record.policy_version,
        "versions": [],
        "lag_min": None,
        "lag_max": None,
        "reward": None,
        "rewards": {},
        "verdict": None,
        "responses": 0,
        "length_min": None,
        "length_mean": None,
        "length_max": None,
        "truncated": None,
        "seconds": None,
        "finished_at": None,
        "actor": record.actor_id,
        "reason": _reason(record),
    }
    try:
        meta = history.meta(record.group_id, record.attempt)
    except WireError as error:
        return facts | {"reason": f"its result cannot be read: {error}"}
    if meta is not None:
        return facts | _measured(meta, record.step, weights)
    had_result = record.state in HAS_RESULT or any(
        attempt == record.attempt for attempt, _ in record.frames
    )
    return facts | {"reason": facts["reason"] or (GONE if had_result else "")}


def _reason(record: GroupRecord) -> str:
    if record.state is None:
        return "how it ended was in a damaged part of the journal"
    return record.reason if record.state in REASON_STATES else ""


def reward(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The one number of a response: the weighted sum, or without weights the first component."""
    if weights:
        return sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())
    return next(iter(rewards.values()))


def ledger_facts(history: History) -> Facts:
    """Where the run is, and what became of its groups."""
    ledger = history.ledger
    return {
        "steps": ledger.steps,
        "training_step": ledger.training_step,
        "live_version": ledger.live,
        "run_epoch": ledger.run_epoch,
        "digest": history.live.get(ledger.live, ""),
        "over": ledger.over,
        "starts": [{"epoch": start.epoch, "step": start.step} for start in history.starts],
        "issued": ledger.issued,
        "listed_steps": listed_steps(history),
        "unlisted": dict(history.unlisted),
        "states": ledger.counts(),
        "rejected": dict(ledger.rejected),
        "failed": dict(ledger.failed),
        "totals": dict(ledger.totals),
        "retired": len(ledger.retired),
        "tokens": _tokens_by_place(ledger),
        "notes": history.notes,
    }


def _tokens_by_place(ledger: Ledger) -> dict[str, int]:
    """What became of the response tokens (`token_ledger`); the sum first."""
    found = ledger.tokens.metrics(ledger)
    return {place: int(found[f"goodput/{place}"]) for place in ("generated", *PLACES)}


def listed_steps(history: History) -> tuple[int, int] | None:
    """The first and the last learner step whose groups are listed; None where no group has a
    step.
    """
    steps = [record.step for record in history.groups.values() if record.step is not None]
    return (min(steps), max(steps)) if steps else None


def _measured(meta: GroupMeta, step: int | None, weights: Mapping[str, float]) -> Facts:
    rows, times = meta.rows_to_train, meta.times.values()
    versions = sorted({version for row in rows for version, _ in row.versions})
    lengths, verdicts = (
        [row.length for row in rows],
        [row.verdict for row in rows if row.verdict is not None],
    )
    return {
        "versions": versions,
        "lag_min": step - 1 - versions[-1] if step else None,
        "lag_max": step - 1 - versions[0] if step else None,
        "reward": _mean([reward(row.rewards, weights) for row in rows]),
        "rewards": {
            name: _mean([row.rewards.get(name, 0.0) for row in rows]) for name in rows[0].rewards
        },
        "verdict": _mean(verdicts) if verdicts else None,
        "responses": len(rows),
        "length_min": min(lengths),
        "length_mean": _mean(lengths),
        "length_max": max(lengths),
        "truncated": sum(row.finish_reason == "length" for row in rows),
        "seconds": max(times) - min(times) if times else None,
        "finished_at": max(times, default=None),
        "actor": meta.actor_id,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- the ledger in words ----


def ledger_rows(history: History) -> list[tuple[str, str]]:
    """What the ledger says to a person: a name and a text, which may contain anything that a run
    produced.
    """
    ledger, totals, digest = (
        history.ledger,
        history.ledger.totals,
        history.live.get(history.ledger.live),
    )
    under_way = (
        f"step {ledger.training_step} in training"
        if ledger.training_step
        else f"step {ledger.steps + 1} waits for its groups"
    )
    rows = [
        ("journal", _files(history)),
        ("run", _starts(history)),
        (
            "steps",
            f"{ledger.steps:,} trained, " + ("the run is over" if ledger.over else under_way),
        ),
        (
            "live",
            f"version {ledger.live}"
            + (f" of run epoch {ledger.run_epoch}" * (ledger.run_epoch > 0))
            + (f", weights {digest}" if digest else ""),
        ),
        ("groups", f"{ledger.issued:,} issued: {_listed(ledger.counts()) or 'none'}"),
        ("listed", _steps_left(history)),
        ("rejected", _reasons(ledger.rejected)),
        ("failed", _reasons(ledger.failed)),
        (
            "lost",
            _listed(
                {
                    name: totals[name]
                    for name in (
                        "attempts_lost",
                        "forfeited",
                        "overdue",
                        "expirations",
                        "unreadable",
                    )
                }
            ),
        ),
        (
            "refused",
            _listed({name: totals[name] for name in ("late", "duplicate", "abandoned", "invalid")}),
        ),
        ("", _last_refusal(history)),
        ("tokens", _listed(_tokens_by_place(ledger))),
        ("retired", many(len(ledger.retired), "problem") if ledger.retired else ""),
        *[("note", note) for note in (*history.notes, *why_unlisted(history))],
    ]
    return [(name, text) for name, text in rows if text]


def _files(history: History) -> str:
    paths = [segment_path(history.directory, number) for number in segments(history.directory)]
    stats = [path.stat() for path in paths if path.exists()]  # one may be deleted meanwhile
    size, silent = (
        sum(stat.st_size for stat in stats),
        time.time() - (stats[-1].st_mtime if stats else 0.0),
    )
    end = (
        "; no end recorded: the run was ended abruptly, or it hangs"
        if silent > SILENT_S and not history.ledger.over
        else ""
    )
    return (
        f"{history.directory}: {many(len(stats), 'segment')}, {size / 1e6:,.1f} MB, written "
        f"{ago(silent)} ago{end}"
    )


def _starts(history: History) -> str:
    *earlier, last = history.starts
    restarts, text = (
        history.ledger.totals["restarts"],
        _start_words(last) if last.epoch else "first start",
    )
    if resumed := [_start_words(start) for start in earlier if start.epoch]:
        text += f" (before: {'; '.join(resumed)})"
    return text + (f"; restarts of the queue's process: {restarts}" if restarts else "")


def _start_words(start: Start) -> str:
    return f"start {start.epoch + 1}, resumed from " + (
        f"step {start.step}" if start.step else "the beginning"
    )


def _steps_left(history: History) -> str:
    listed = listed_steps(history)
    return (
        f"the groups of {steps_text(*listed)}"
        if listed and listed[0] > 1 and history.unlisted
        else ""
    )


def _last_refusal(history: History) -> str:
    if not history.refusals:
        return ""
    last = history.refusals[-1]
    what = (
        f"group {last.group_id} attempt {last.attempt}"
        if last.group_id >= 0
        else "an unreadable frame"
    )
    return f"the last one: {last.status}, {what} from {last.actor_id}: {last.reason}"


def _listed(counts: Mapping[str, int]) -> str:
    """Counters, which are named by this program."""
    return ", ".join(
        f"{number:,} {ONE.get(name, name) if number == 1 else name}".replace("_", " ")
        for name, number in counts.items()
        if number
    )


def _reasons(counts: Mapping[str, int]) -> str:
    """Reasons are quoted as they are: they may name a setting."""
    return "; ".join(f"{number:,} {reason}" for reason, number in counts.items() if number)


# ---- why something is not there, in words ----

_WHY: dict[Unlisted, tuple[str, str]] = {
    "deleted": (
        "are no longer in the journal",
        "their segments were deleted at checkpoints (normal)",
    ),
    "damaged": (
        "were in a damaged part of the journal",
        "what the journal told of them is damaged",
    ),
    "before": ("are from before this journal began", "they are from before this journal began"),
}


def many(count: int, noun: str) -> str:
    """'1 group', '2 groups'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def steps_text(first: int, last: int) -> str:
    """'step 3', 'steps 3 to 5'."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def why_unlisted(history: History) -> list[str]:
    """A sentence for every reason why groups are counted but not listed."""
    return [
        f"{many(number, 'group')} {'is' if number == 1 else 'are'} counted but not listed: "
        f"{_WHY[why][1]}"
        for why, number in history.unlisted.items()
    ]


def why_unknown(history: History, group_id: int) -> str:
    """Why there is nothing to show of a group."""
    first, after = history.ledger.first_group_id, history.ledger.next_group_id
    if first <= group_id < after:
        reasons = "; or ".join(_WHY[why][1] for why in history.unlisted)
        return (
            f"group {group_id} is one of {sum(history.unlisted.values()):,} that are counted "
            f"but not listed: {reasons}"
        )
    return f"group {group_id} was never issued" + (
        f", only {first} to {after - 1} were" if after > first else ", nor was any other"
    )


def why_none(history: History, selection: Selection) -> str:
    """Why no group matches, as far as it is known."""
    newest = history.ledger.newest_version
    if not history.ledger.issued:
        return "no groups yet"
    if selection.steps and (reason := _why_no_step(history, *selection.steps)):
        return reason
    if selection.version is not None and selection.version > newest:
        return f"no group matches: there is no version {selection.version} (the newest is {newest})"
    others = sum(history.unlisted.values())
    return f"no group matches, of {len(history.groups):,} that are listed" + (
        f"; {others:,} more are not" if others else ""
    )


def _why_no_step(history: History, first: int, last: int) -> str | None:
    """None if there are groups of these steps."""
    ledger, listed, wanted = history.ledger, listed_steps(history), steps_text(first, last)
    newest = ledger.newest_version
    if first > newest and ledger.over:
        return f"there is no {wanted}: the run ended with step {ledger.steps}"
    if first > newest:
        return f"{wanted} {'is' if first == last else 'are'} not trained yet (" + (
            f"the newest is {newest})" if newest else "no step is)"
        )
    if any(
        record.step is not None and first <= record.step <= last
        for record in history.groups.values()
    ):
        return None
    older = listed is None or last < listed[0]
    why: Unlisted = next(iter(history.unlisted), "damaged") if older else "damaged"
    return f"the groups of {wanted} {_WHY[why][0]}" + (
        f", which has {steps_text(*listed)}" if listed and why == "deleted" else ""
    )


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
    """Return the text on one line, with control characters as escapes."""
    return text_for_people.visible(text, keep="")


def columns_of(groups: Sequence[Facts]) -> list[Column]:
    """What `group_facts` say, one cell per group; a column that would be empty is left out."""
    names = dict.fromkeys(name for facts in groups for name in facts["rewards"])
    rewards: list[_Cells] = [(name, "right", _reward_cell(name)) for name in names]
    columns = [
        Column(visible(header), [visible(cell(facts)) for facts in groups], justify)
        for header, justify, cell in (*_BEFORE_REWARDS, *rewards, *_AFTER_REWARDS)
    ]
    return [column for column in columns if any(column.cells)]


def _reward_cell(name: str) -> Callable[[Facts], str]:
    return lambda facts: _number(facts["rewards"].get(name))


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
    (
        "ticket",
        "right",
        lambda facts: "" if facts["ticket_version"] is None else f"v{facts['ticket_version']}",
    ),
    (
        "sampled",
        "right",
        lambda facts: (
            f"v{_range(facts['versions'][0], facts['versions'][-1])}" if facts["versions"] else ""
        ),
    ),
    ("lag", "right", lambda facts: _range(facts["lag_min"], facts["lag_max"])),
)
_AFTER_REWARDS: tuple[_Cells, ...] = (
    (
        "verdict",
        "right",
        lambda facts: "" if facts["verdict"] is None else f"{facts['verdict']:.0%}",
    ),
    ("tokens", "right", _tokens),
    (
        "truncated",
        "right",
        lambda facts: f"{facts['truncated']} of {facts['responses']}" if facts["truncated"] else "",
    ),
    ("seconds", "right", lambda facts: _number(facts["seconds"])),
    ("actor", "left", lambda facts: facts["actor"]),
    ("prompt", "left", lambda facts: facts.get("prompt", "")),
    ("best response", "left", lambda facts: facts.get("best_response", "")),
    ("reason", "left", lambda facts: facts["reason"]),
)
