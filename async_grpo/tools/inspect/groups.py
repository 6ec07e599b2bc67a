"""Groups and the ledger of a run as plain values: what a person filters, sorts and reads.

Runs in: any process that looks at a run. Hides which questions need a group's frame: those are
asked last, of the groups that everything else selects. All numbers of a group are of its responses
to train; a baseline counts nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from async_grpo.replay.history import GroupRecord, History, Start, Unlisted
from async_grpo.replay.journal import segment_path, segments
from async_grpo.replay.ledger import Ledger, State
from async_grpo.replay.token_ledger import PLACES
from async_grpo.runtime.text import ago, counted, on_one_line
from async_grpo.wire.codec import GroupMeta, WireError

Facts = dict[str, Any]
"""Plain values of one group or of the ledger, as JSON can hold them."""
RewardWeights = Mapping[str, float]
"""Component -> its weight; without any, the first component is the reward."""
STALENESS = ("staleness_min", "staleness_max")
SORT_KEYS = {
    "id": "group_id",
    "reward": "reward",
    "length": "length_mean",
    "staleness": "staleness_max",
    "seconds": "seconds",
}
REASON_STATES = (State.WAITING, State.REJECTED, State.FAILED, State.EXPIRED)
"""Only in these, a reason is of the present state: a trained group may have lost an attempt."""
HAS_RESULT = (State.READY, State.TRAINING, State.TRAINED)
"""A group in one of these had a result, whatever the journal still has of it."""
GONE = "its result is not in the journal"
LOST = ("attempts_lost", "forfeited", "overdue", "expirations", "unreadable")
REFUSED = ("late", "duplicate", "abandoned", "invalid")
"""Counters of the ledger that are listed together."""
COUNTED = 2_000
"""Results that are read only to count the groups that match: mostly, a fraction of a second."""
SILENT_S = 60.0
"""Seconds after which a journal that grows no more and has no end is pointed out."""
ONE = {"attempts_lost": "attempt lost", "expirations": "expiration"}
"""What a counter is called when it is 1."""


@dataclass(frozen=True)
class Selection:
    """Selects groups and their order; None selects all, `actor` may contain `*`."""

    states: Sequence[str] | None = None
    steps: tuple[int, int] | None = None
    """The first and the last."""
    version: int | None = None
    actor: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    sort: str = "id"
    reverse: bool = False

    @property
    def narrows(self) -> bool:
        """Whether the selection leaves groups out."""
        return bool(self.states or self.steps or self.reads_frames)

    @property
    def reads_frames(self) -> bool:
        """Whether the journal's events alone cannot tell which groups match."""
        asked = (self.version, self.actor, self.min_reward, self.max_reward)
        return any(value is not None for value in asked)

    def may_match(self, record: GroupRecord) -> bool:
        """Decide what needs no frame: tokens are between their ticket and their step's weights."""
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
        """Decide the rest, from `group_facts`."""
        if self.version is not None and self.version not in facts["versions"]:
            return False
        if self.actor and not fnmatchcase(facts["actor"], self.actor):
            return False
        reward = facts["reward"]
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        return self.max_reward is None or (reward is not None and reward <= self.max_reward)


def candidates(history: History, selection: Selection) -> list[GroupRecord]:
    """List groups that may match, as far as no frame tells; newest first unless reversed."""
    found = [record for record in history.groups.values() if selection.may_match(record)]
    return sorted(found, key=lambda record: record.group_id, reverse=not selection.reverse)


def select(history: History, selection: Selection, weights: RewardWeights) -> Iterator[Facts]:
    """Yield the groups that match, in order; sorted by id, none is read before it is asked for."""
    every = (group_facts(history, record, weights) for record in candidates(history, selection))
    found = filter(selection.matches, every)
    if selection.sort == "id":
        return found
    key, sign = SORT_KEYS[selection.sort], 1 if selection.reverse else -1
    return iter(sorted(found, key=lambda facts: (facts[key] is None, sign * (facts[key] or 0))))


def count(history: History, selection: Selection, weights: RewardWeights) -> int | None:
    """Count the groups that match; None where that would take a while."""
    found = candidates(history, selection)
    if not selection.reads_frames:
        return len(found)
    return sum(1 for _ in select(history, selection, weights)) if len(found) <= COUNTED else None


def group_facts(history: History, record: GroupRecord, weights: RewardWeights) -> Facts:
    """Describe a group at its latest attempt; what only a result tells is None or empty without."""
    facts: Facts = {
        "group_id": record.group_id,
        "attempt": record.attempt,
        "state": record.state.value if record.state else "unknown",
        "step": record.step,
        "ticket_version": record.policy_version,
        "versions": [],
        "rewards": {},
        "responses": 0,
        **dict.fromkeys((*STALENESS, "reward", "accuracy", "truncated", "seconds")),
        **dict.fromkeys(("length_min", "length_mean", "length_max", "finished_at")),
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


def reward(rewards: Mapping[str, float], weights: RewardWeights) -> float:
    """Sum a response's components by weight; without weights, take the first component."""
    if counted := weights.keys() & rewards.keys():
        return sum(weights[name] * rewards[name] for name in sorted(counted))
    return next(iter(rewards.values()))


def ledger_facts(history: History) -> Facts:
    """Say where the run is, and what became of its groups."""
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
    """Count response tokens by what became of them (`token_ledger`); the sum first."""
    found = ledger.tokens.metrics(ledger)
    return {place: int(found[f"goodput/{place}"]) for place in ("generated", *PLACES)}


def listed_steps(history: History) -> tuple[int, int] | None:
    """Find the first and the last learner step of listed groups; None where none has a step."""
    steps = [record.step for record in history.groups.values() if record.step is not None]
    return (min(steps), max(steps)) if steps else None


def _measured(meta: GroupMeta, step: int | None, weights: RewardWeights) -> Facts:
    rows, times = meta.episodes_to_train, meta.times.values()
    versions = sorted({version for row in rows for version, _ in row.versions})
    lengths = [row.length for row in rows]
    verdicts = [row.verdict for row in rows if row.verdict is not None]
    return {
        "versions": versions,
        "staleness_min": step - 1 - versions[-1] if step else None,
        "staleness_max": step - 1 - versions[0] if step else None,
        "reward": fmean([reward(row.rewards, weights) for row in rows]),
        "rewards": {
            name: fmean([row.rewards[name] for row in rows if name in row.rewards])
            for name in dict.fromkeys(name for row in rows for name in row.rewards)
        },
        "accuracy": fmean(verdicts) if verdicts else None,
        "responses": len(rows),
        "length_min": min(lengths),
        "length_mean": fmean(lengths),
        "length_max": max(lengths),
        "truncated": sum(row.truncated for row in rows),
        "seconds": max(times) - min(times) if times else None,
        "finished_at": max(times, default=None),
        "actor": meta.actor_id,
    }


# ---- the ledger in words ----


def ledger_rows(history: History) -> list[tuple[str, str]]:
    """Describe the ledger for a person: names and texts, which may hold anything of a run."""
    ledger, live = history.ledger, f"version {history.ledger.live}"
    if ledger.run_epoch:
        live += f" of run epoch {ledger.run_epoch}"
    if digest := history.live.get(ledger.live):
        live += f", weights {digest}"
    now = f"step {ledger.steps + 1} waits for its groups"
    if ledger.over or ledger.training_step:
        now = "the run is over" if ledger.over else f"step {ledger.training_step} in training"
    rows = [
        ("journal", _files(history)),
        ("run", _starts(history)),
        ("steps", f"{ledger.steps:,} trained, {now}"),
        ("live", live),
        ("groups", f"{ledger.issued:,} issued: {_listed(ledger.counts()) or 'none'}"),
        ("listed", _steps_left(history)),
        ("rejected", _reasons(ledger.rejected)),
        ("failed", _reasons(ledger.failed)),
        ("lost", _listed({name: ledger.totals[name] for name in LOST})),
        ("refused", _listed({name: ledger.totals[name] for name in REFUSED})),
        ("", _last_refusal(history)),
        ("tokens", _listed(_tokens_by_place(ledger))),
        ("retired", counted(len(ledger.retired), "problem") if ledger.retired else ""),
        *[("note", note) for note in (*history.notes, *why_unlisted(history))],
    ]
    return [(name, text) for name, text in rows if text]


def _files(history: History) -> str:
    paths = [segment_path(history.directory, number) for number in segments(history.directory)]
    stats = [path.stat() for path in paths if path.exists()]  # one may be deleted meanwhile
    size = sum(stat.st_size for stat in stats)
    silent = time.time() - (stats[-1].st_mtime if stats else 0.0)
    text = f"{history.directory}: {counted(len(stats), 'segment')}, {size / 1e6:,.1f} MB, written "
    text += f"{ago(silent)} ago"
    if silent > SILENT_S and not history.ledger.over:
        text += "; no end recorded: the run was ended abruptly, or it hangs"
    return text


def _starts(history: History) -> str:
    *earlier, last = history.starts
    text = _start_words(last) if last.epoch else "first start"
    if resumed := [_start_words(start) for start in earlier if start.epoch]:
        text += f" (before: {'; '.join(resumed)})"
    if restarts := history.ledger.totals["restarts"]:
        text += f"; restarts of the queue's process: {restarts}"
    return text


def _start_words(start: Start) -> str:
    return f"start {start.epoch + 1}, resumed from " + (
        f"step {start.step}" if start.step else "the beginning"
    )


def _steps_left(history: History) -> str:
    listed = listed_steps(history)
    if listed is None or listed[0] == 1 or not history.unlisted:
        return ""
    return f"the groups of {steps_text(*listed)}"


def _last_refusal(history: History) -> str:
    if not history.refusals:
        return ""
    last = history.refusals[-1]
    what = f"group {last.group_id} attempt {last.attempt}"
    if last.group_id < 0:
        what = "an unreadable frame"
    return f"the last one: {last.status}, {what} from {last.actor_id}: {last.reason}"


def _listed(counts: Mapping[str, int]) -> str:
    """List counters, which are named by this program."""
    return ", ".join(
        f"{number:,} {ONE.get(name, name) if number == 1 else name}".replace("_", " ")
        for name, number in counts.items()
        if number
    )


def _reasons(counts: Mapping[str, int]) -> str:
    """List reasons as they are: they may name a setting."""
    return "; ".join(f"{number:,} {reason}" for reason, number in counts.items() if number)


# ---- why something is not there, in words ----

_GONE_BECAUSE: dict[Unlisted, str] = {
    "deleted": "are no longer in the journal",
    "missing": "were in a segment of the journal that is missing",
    "damaged": "were in a damaged part of the journal",
    "before": "are from before this journal began",
}
_UNLISTED_BECAUSE: dict[Unlisted, str] = {
    "deleted": "their segments were deleted at checkpoints (normal)",
    "missing": "a segment of the journal that no checkpoint deleted is missing",
    "damaged": "the journal is damaged where it describes them",
    "before": "they are from before this journal began",
}


def steps_text(first: int, last: int) -> str:
    """Write a range of steps: 'step 3', 'steps 3 to 5'."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def why_unlisted(history: History) -> list[str]:
    """Write a sentence for every reason why groups are counted but not listed."""
    return [
        f"{counted(number, 'group')} {'is' if number == 1 else 'are'} counted but not listed: "
        f"{_UNLISTED_BECAUSE[why]}"
        for why, number in history.unlisted.items()
    ]


def why_unknown(history: History, group_id: int) -> str:
    """Say why there is nothing to show of a group."""
    first, after = history.ledger.first_group_id, history.ledger.next_group_id
    if first <= group_id < after:
        reasons = "; or ".join(_UNLISTED_BECAUSE[why] for why in history.unlisted)
        return (
            f"group {group_id} is one of {sum(history.unlisted.values()):,} that are counted "
            f"but not listed: {reasons}"
        )
    return f"group {group_id} was never issued" + (
        f", only {first} to {after - 1} were" if after > first else ", nor was any other"
    )


def why_none(history: History, selection: Selection) -> str:
    """Say why no group matches, as far as that is known."""
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
    """Say why there are no groups of these steps; None if there are some."""
    ledger, listed, wanted = history.ledger, listed_steps(history), steps_text(first, last)
    newest = ledger.newest_version
    if first > newest and ledger.over:
        return f"there is no {wanted}: the run ended with step {ledger.steps}"
    if first > newest:
        trained = f"the newest is {newest}" if newest else "no step is"
        return f"{wanted} {'is' if first == last else 'are'} not trained yet ({trained})"
    if any(Selection(steps=(first, last)).may_match(record) for record in history.groups.values()):
        return None
    older = listed is None or last < listed[0]
    why: Unlisted = next(iter(history.unlisted), "damaged") if older else "damaged"
    return f"the groups of {wanted} {_GONE_BECAUSE[why]}" + (
        f", which has {steps_text(*listed)}" if listed and why == "deleted" else ""
    )


# ---- columns for a person ----


Column = tuple[str, tuple[str, ...]]
"""A header and its cells: plain text on one line, whatever the run contains."""


def columns_of(groups: Sequence[Facts]) -> list[Column]:
    """Arrange what `group_facts` say, one cell per group, without columns that would be empty."""
    components = list(dict.fromkeys(name for facts in groups for name in facts["rewards"]))
    columns = [
        (on_one_line(cells[0][0]), tuple(on_one_line(text) for _, text in cells))
        for cells in zip(*(_cells(facts, components) for facts in groups), strict=True)
    ]
    return [(header, cells) for header, cells in columns if any(cells)]


def _cells(facts: Facts, components: Sequence[str]) -> list[tuple[str, str]]:
    """Write the header and the text of every column of a group; components: of the reward."""
    attempt, ticket, versions = facts["attempt"], facts["ticket_version"], facts["versions"]
    accuracy, truncated = facts["accuracy"], facts["truncated"]
    return [
        ("group", str(facts["group_id"])),
        ("attempt", str(attempt) if attempt > 1 else ""),
        ("state", facts["state"].replace("_", " ")),
        ("step", str(facts["step"] or "")),
        ("ticket", "" if ticket is None else f"v{ticket}"),
        ("sampled", f"v{_range(versions[0], versions[-1])}" if versions else ""),
        ("staleness", _range(*(facts[name] for name in STALENESS))),
        *((name, _number(facts["rewards"].get(name))) for name in components),
        ("accuracy", "" if accuracy is None else f"{accuracy:.0%}"),
        ("tokens", _tokens(facts)),
        ("truncated", f"{truncated} of {facts['responses']}" if truncated else ""),
        ("seconds", _number(facts["seconds"])),
        ("actor", facts["actor"]),
        ("prompt", facts.get("prompt", "")),
        ("best response", facts.get("best_response", "")),
        ("reason", facts["reason"]),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _range(low: int | None, high: int | None) -> str:
    return "" if low is None else str(low) if low == high else f"{low}-{high}"


def _tokens(facts: Facts) -> str:
    text = _range(facts["length_min"], facts["length_max"])
    return f"{text} ({facts['length_mean']:.1f})" if "-" in text else text
