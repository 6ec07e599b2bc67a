"""The goodput ledger: the fate of every response token, as a function of the events.

Runs in: the replay queue's process, and processes that read a journal. Two sources meet here.
Rollout actors report the tokens that their engines sampled, as running totals since the process
began (`TokenTotals`); results and failed attempts bring the tokens of a group. The difference is
pending at the actor:

    pending = sampled + continued - probes - evaluated - arrived    (of one actor; a report may be
                                                                    a moment older than a result)

Every token has one fate: that of its attempt (trained, masked, rejected, expired, failed,
regenerated, refused, unused, held), `baseline` whatever the fate of its group, `probes`,
`evaluated`, or `lost` with an actor at which it was pending. Tokens sampled after a dead actor's
last report are in no count. A group that is trained, taken back and generated again counts once as
trained and once as regenerated.

Invariants: `generated` is the sum over all fates; at an orderly end nothing is pending, so the sum
is the engines' own count. No result counts twice, however often it is sent. Plain numbers; nothing
grows with the age of the run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from async_grpo.replay import events
from async_grpo.replay.actor_reports import TokenTotals
from async_grpo.wire.codec import GroupMeta

if TYPE_CHECKING:
    from async_grpo.replay.ledger import GroupEntry, Ledger


REMEMBERED = 2048
"""Finished attempts that may still be sent again, because an answer was lost."""
PLACES = (
    "trained",
    "masked",
    "rejected",
    "expired",
    "failed",
    "refused",
    "unused",
    "held",
    "baseline",
    "probes",
    "evaluated",
    "regenerated",
    "lost",
)
"""Fates of tokens; their counts add up to `generated`."""


def token_counts(meta: GroupMeta) -> tuple[int, int]:
    """Tokens of the responses to train, and of the greedy baseline."""
    train = sum([row.length for row in meta.rows if row.role == "train"])
    return train, sum([row.length for row in meta.rows if row.role == "baseline"])


def masked_tokens(
    metas: Iterable[GroupMeta], *, mask_truncated: bool, stale_before: int | None
) -> int:
    """Tokens of a batch without weight: of truncated responses (with `mask_truncated`), or older
    than version `stale_before` (None: nothing is too old).
    """
    masked = 0
    for row in (row for meta in metas for row in meta.episodes_to_train):
        if mask_truncated and row.truncated:
            masked += row.length
        elif stale_before is not None:
            masked += row.tokens_before(stale_before)
    return masked


class Tokens:
    """Tokens by fate. results: tokens to train of groups ready, in training or left over."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.results: dict[int, int] = {}
        self.told: dict[str, TokenTotals] = {}
        self.arrived: Counter[str] = Counter()
        self.masked = 0
        """Tokens without weight of the batch in training."""
        self._seen: OrderedDict[tuple[int, int], None] = OrderedDict()

    def follow(self, event: events.Event, ledger: Ledger) -> None:
        """Count an event, before `ledger` applies it."""
        match event:
            case events.Put() | events.Reject():
                self._arrives(event, ledger)
            case events.Fail(group_id, attempt, _, tokens) if tokens is not None:
                if (entry := ledger.entries.get(group_id)) is not None:  # else the ledger objects
                    last = entry.failures + 1 >= ledger.max_attempts
                    place = "failed" if last else "regenerated"
                    self._discarded(place, group_id, attempt, entry.actor_id, tokens)
            case events.Waste(group_id, attempt, actor_id, tokens):
                self._discarded("regenerated", group_id, attempt, actor_id, tokens)
            case events.Refuse(status, group_id, attempt, actor_id, _, tokens):
                if status != "duplicate":
                    self._discarded("refused", group_id, attempt, actor_id, tokens)
            case events.Expire(group_id) | events.Drop(group_id):
                place = "expired" if isinstance(event, events.Expire) else "lost"
                self.totals[place] += self.results.pop(group_id, 0)
            case events.TakeBatch(_, _, masked):
                self.masked = masked
            case events.Done():
                trained, masked = self.in_training(ledger.training)
                self.totals.update(trained=trained, masked=masked)
                self.masked = 0
                for group_id in ledger.training:
                    self.results.pop(group_id, None)
            case events.Sampled(totals):
                self.told |= {actor_id: TokenTotals(*numbers) for actor_id, *numbers in totals}

    def _arrives(self, event: events.Put | events.Reject, ledger: Ledger) -> None:
        entry = ledger.entries.get(event.group_id)
        if entry is None or not self._first_time(event.group_id, event.attempt):
            return
        self.arrived[entry.actor_id] += event.tokens + event.baseline
        self.totals["baseline"] += event.baseline
        if isinstance(event, events.Put):
            self.results[event.group_id] = event.tokens
        else:
            self.totals["rejected"] += event.tokens

    def _discarded(
        self, place: str, group_id: int, attempt: int, actor_id: str, tokens: int
    ) -> None:
        if self._first_time(group_id, attempt):
            self.arrived[actor_id] += tokens
            self.totals[place] += tokens

    def _first_time(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt is new; a frame without a known group (-1) never counts."""
        if group_id < 0 or (group_id, attempt) in self._seen:
            return False
        self._seen[group_id, attempt] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return True

    def in_training(self, group_ids: Iterable[int]) -> tuple[int, int]:
        """Tokens of the batch in training (these groups): with weight in the loss, and without."""
        total = sum(self.results.get(group_id, 0) for group_id in group_ids)
        return total - self.masked, self.masked

    # ---- another start of the run ----

    def taken_over(
        self, entries: Iterable[GroupEntry], *, trained: int = 0, masked: int = 0
    ) -> None:
        """Go on in another start, which took back these tokens; groups that are gone regenerate."""
        before = sum(self.results.values()) + trained + masked
        self.results = {
            entry.group_id: token_counts(entry.meta)[0]
            for entry in entries
            if entry.meta is not None
        }
        self.totals.subtract({"trained": trained, "masked": masked})
        self.totals["regenerated"] += max(before - sum(self.results.values()), 0)

    def new_actors(self, *, over: bool) -> None:
        """Close the accounts of all actors so far. over: the run ended in order before."""
        self.gone(list(self.told), place="unused" if over else "lost")
        self.arrived.clear()

    def gone(self, actor_ids: Iterable[str], *, place: str) -> None:
        """Close the accounts of these actors; their pending tokens get this fate."""
        for actor_id in actor_ids:
            if (told := self.told.get(actor_id)) is not None:
                sums = told._asdict()
                del sums["sampled"]
                self.totals.update(sums)
                self.totals[place] += self._pending(actor_id)
                del self.told[actor_id], self.arrived[actor_id]

    # ---- numbers ----

    def metrics(self, ledger: Ledger) -> dict[str, float]:
        """`goodput/...`: tokens by fate, their sum, the trained share, and reprefilled tokens."""
        now = Counter({place: self.totals[place] for place in PLACES})
        for group_id, tokens in self.results.items():
            now["held" if group_id in ledger.entries else "unused"] += tokens
        for actor_id in self.told:
            alive = "unused" if ledger.over else "held"
            now["lost" if actor_id in ledger.forfeited else alive] += self._pending(actor_id)
        sums = Counter({name: self.totals[name] for name in ("continued", "reprefilled")})
        for told in self.told.values():
            now.update(probes=told.probes, evaluated=told.evaluated)
            sums.update(continued=told.continued, reprefilled=told.reprefilled)
        continued = sums["continued"]
        for place in ("lost", "unused"):  # continued tokens were counted there with their engine
            back = min(now[place], continued)
            now[place], continued = now[place] - back, continued - back
        return {f"goodput/{place}": float(now[place]) for place in PLACES} | {
            "goodput/generated": float(now.total()),
            "goodput/share": now["trained"] / max(now.total(), 1),
            "goodput/reprefilled": float(sums["reprefilled"]),
        }

    def _pending(self, actor_id: str) -> int:
        told, arrived = self.told[actor_id], self.arrived[actor_id]
        return max(told.sampled + told.continued - told.probes - told.evaluated - arrived, 0)

    # ---- as plain values ----

    def snapshot(self) -> dict[str, Any]:
        """Plain values for `from_snapshot`."""
        return {
            "totals": dict(self.totals),
            "results": [list(pair) for pair in self.results.items()],
            "masked": self.masked,
            "told": [[actor_id, *told] for actor_id, told in self.told.items()],
            "arrived": dict(self.arrived),
            "seen": [list(key) for key in self._seen],
        }

    @classmethod
    def from_snapshot(cls, snapshot: Mapping[str, Any]) -> Tokens:
        """Return the ledger that `snapshot` described."""
        tokens = cls()
        tokens.totals.update(snapshot["totals"])
        tokens.results, tokens.masked = dict(snapshot["results"]), snapshot["masked"]
        tokens.told = {actor_id: TokenTotals(*numbers) for actor_id, *numbers in snapshot["told"]}
        tokens.arrived.update(snapshot["arrived"])
        tokens._seen.update(dict.fromkeys(map(tuple, snapshot["seen"])))
        return tokens
