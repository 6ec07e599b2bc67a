"""Admission, order, release and accounting of groups: the one place that counts.

Runs in: the replay queue's process, as an asyncio object. Hides the staleness bound, the fair division of slots, retries and the
filter; rollout actors see tickets, the loop sees batches.

With R = rollout_batch_size, K = max_staleness and s learner steps done:

    admission   a new id is issued only while fewer than B = (K + 1) R groups hold a slot, only to an engine that serves the live
                version, and only if the run can still train it. Groups that wait for another attempt hold their slot and go first.
                Ids of retired problems are skipped.
    order       the R oldest ready groups leave, if everything that stays behind can still be trained in time (`rules.can_leave`).
    release     slots of trained groups return when their weights are live; rejected and failed groups free theirs at once.

Invariants: every trained token has 0 <= lag <= K, asserted when a batch leaves; `put` is idempotent on (group_id, attempt) and
`get_batch` on the step; no call waits for another one, so a full queue cannot lock out the call that would empty it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from async_grpo.replay.ledger import Entry, Ledger, State
from async_grpo.replay.retirement import Retirement
from async_grpo.replay.rules import QueueSettings, can_leave, fair_share, problem_of, rejection
from async_grpo.wire import Batch, Buffer, GroupMeta, GroupTicket, WireError, decode_meta, pack_frames, peek_ticket

POLL_MEMORY_S = 2.0
"""An actor that asked for work counts in the division of free slots for this long; a silent one must not reserve them."""
MAX_FAILED_GROUPS = 32
"""The run ends when this many groups and 4 R more failed for good since the last learner step."""
MAX_SKIPS = 4096
"""Ids of retired problems that one `acquire` passes over (tens of milliseconds); the next one goes on from there."""
SNAPSHOT_VERSION = 2


class NoSignal(RuntimeError):
    """Too many groups in a row gave nothing to learn from, or no problem is left to pose."""

    exit_code = 3


class StalenessError(RuntimeError):
    """A token is older than `max_staleness`, or newer than the learner: a bug that ends the run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one frame of a `put`. The ids are -1 where the frame does not tell them."""

    group_id: int
    attempt: int
    status: Literal["accepted", "rejected", "duplicate", "late", "invalid"]
    reason: str = ""


@dataclass(slots=True)
class _Poll:
    at: float
    want: int


class ReplayQueue:
    """Owner of every group between its ticket and its learner step. Every call answers at once."""

    def __init__(self, settings: QueueSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._ledger = Ledger(
            first_group_id=settings.next_group_id, steps=settings.trained_steps, max_attempts=settings.max_attempts
        )
        self._retirement = Retirement(settings)
        self._live = settings.trained_steps
        self._closed = False
        self._forfeited: set[str] = set()
        self._polls: dict[str, _Poll] = {}
        self._batch: Batch | None = None
        self._asked_at: float | None = None
        self._totals: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._rejected_now: Counter[str] = Counter()
        self._failed_now: Counter[str] = Counter()
        self._last_batch: dict[str, float] = {}

    # ---- rollout actors ----

    async def acquire(
        self, actor_id: str, serving_version: int, holding: Sequence[tuple[int, int]], want: int
    ) -> list[GroupTicket] | None:
        """Tickets for an actor: at most `want`, [] means ask again, None that the run is over or the actor was declared dead.

        `holding` are the (group_id, attempt) the actor works on; a recorded ticket that is not among them was lost on the way and
        is issued again as it was. An actor has one `acquire` at a time, otherwise an answer under way looks lost.
        """
        if self._closed or self._ledger.steps >= self.settings.total_steps or actor_id in self._forfeited:
            return None
        known = {tuple(pair) for pair in holding}
        tickets = [entry.ticket for entry in self._ledger.held_by(actor_id) if (entry.group_id, entry.attempt) not in known]
        if serving_version != self._live:
            # It gets nothing, so it must not reserve a share either: a newcomer may take minutes to load the live version.
            self._polls.pop(actor_id, None)
            return tickets
        self._polls[actor_id] = _Poll(self._clock(), max(want - len(tickets), 0))
        share = self._fair_share(actor_id)
        self._polls[actor_id].want -= share
        return tickets + self._issue(actor_id, share)

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]:
        """Take finished groups; one verdict each, in order. Idempotent on (group_id, attempt); every frame is copied."""
        verdicts = []
        for frame in frames:
            verdict = self._take(actor_id, frame)
            self._totals[verdict.status] += 1
            verdicts.append(verdict)
            await asyncio.sleep(0)  # a large batch must not hold up the other calls
        return verdicts

    async def fail(self, actor_id: str, tickets: Sequence[GroupTicket], reason: str) -> None:
        """These groups came to nothing at the actor: they are issued again, or failed after `max_attempts`."""
        for ticket in tickets:
            entry = self._ledger.held.get(actor_id, {}).get(ticket.group_id)
            if entry is not None and entry.attempt == ticket.attempt:
                self._lose(entry, reason)

    async def forfeit(self, actor_id: str) -> None:
        """The process is gone: all its tickets are issued again. Its id gets no ticket any more, should it still be alive."""
        self._forfeited.add(actor_id)
        self._polls.pop(actor_id, None)
        for entry in self._ledger.held_by(actor_id):
            self._totals["forfeited"] += 1
            self._lose(entry, "producer died")

    # ---- loop and learner ----

    async def get_batch(self, step: int) -> Batch | None:
        """The groups of learner step `step` (from 1), or None while they are not complete. Idempotent per step.

        Asking for `step` says that `step - 1` is trained. Raises NoSignal when too many groups were rejected or failed since the last
        step or all problems are retired, StalenessError when a token breaks the bound, ValueError for a step out of turn.
        """
        if self._batch is not None and step == self._batch.step:
            return self._batch
        if step != self._ledger.newest_version + 1:
            raise ValueError(f"step {step} is out of turn: the next learner step is {self._ledger.newest_version + 1}")
        self._ledger.finish_step()
        if self._closed or step > self.settings.total_steps:
            return None
        now = self._clock()
        self._asked_at = now if self._asked_at is None else self._asked_at
        chosen = self._choose(step)
        if chosen is None:
            self._check_signal()
            return None
        self._check_bound(chosen, step)
        self._ledger.train(chosen, step)
        self._note_batch(chosen, step, waited=now - self._asked_at)
        self._batch = Batch(step, tuple(entry.meta for entry in chosen if entry.meta is not None))
        return self._batch

    async def payload(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        """Frames of groups of the step in training, in the order asked for, as one uint8 array for `wire.unpack_frames`."""
        training = self._ledger.slots[State.TRAINING]
        if step != self._ledger.training_step or any(group_id not in training for group_id in group_ids):
            raise ValueError(f"step {step}, groups {list(group_ids)}: only groups of the step in training have a payload")
        return pack_frames([training[group_id].frame or b"" for group_id in group_ids])

    async def live(self, version: int) -> None:
        """Every engine serves `version` now: the slots of the steps it contains return. Versions never go back."""
        if not self._live <= version <= self._ledger.newest_version:
            raise ValueError(f"version {version} cannot be live: {self._live} is, and the learner is at {self._ledger.newest_version}")
        if version == self._ledger.training_step:
            self._ledger.finish_step()
        self._live = version
        self._ledger.retire(version)

    async def close(self) -> None:
        """The run is over: groups that no step took are unused, and actors are told to stop."""
        self._closed = True
        for entry in list(self._ledger.entries.values()):
            if entry.state in (State.WAITING, State.IN_FLIGHT, State.READY):
                self._ledger.discard(entry)

    # ---- what others may know ----

    async def counts(self) -> dict[str, int]:
        """Groups by state (their sum is the number of ids issued), then totals: rejected by reason, late, duplicate, invalid."""
        totals = {name: self._totals[name] for name in ("late", "duplicate", "invalid", "forfeited", "attempts_lost")}
        return self._ledger.counts() | {f"rejected/{name}": n for name, n in sorted(self._rejected.items())} | totals

    async def history(self, group_ids: Sequence[int]) -> dict[int, dict[str, int | str | None]]:
        """Attempt, state and learner step of each id, as far as it is remembered (all with a slot, and the last few thousand)."""
        return self._ledger.history(group_ids)

    async def held(self) -> dict[str, list[tuple[int, int]]]:
        """(group_id, attempt) in flight at each actor."""
        return {actor_id: [(entry.group_id, entry.attempt) for entry in self._ledger.held_by(actor_id)] for actor_id in self._ledger.held}

    async def metrics(self) -> dict[str, float]:
        """Numbers to log, as `replay/...` paths. Times in seconds, lags in learner steps."""
        ready = self._ledger.slots[State.READY].values()
        out = {f"replay/{name}": float(count) for name, count in (await self.counts()).items()}
        out["replay/outstanding"] = float(len(self._ledger.entries))
        out["replay/capacity"] = float(self.settings.capacity)
        out["replay/live_version"] = float(self._live)
        out["replay/steps"] = float(self._ledger.steps)
        out["replay/retired"] = float(len(self._retirement))
        out["replay/producers"] = float(len(self._ledger.held))
        out["replay/bytes"] = float(sum(entry.meta.nbytes for entry in ready if entry.meta is not None))
        out["replay/oldest_ready_s"] = self._clock() - min((entry.ready_at for entry in ready), default=self._clock())
        return out | self._last_batch

    async def snapshot(self) -> dict[str, Any]:
        """Plain values from which `restore` continues: ids outstanding with their attempts, retired problems, and the counters."""
        return {
            "version": SNAPSHOT_VERSION, **self._ledger.snapshot(),
            "totals": dict(self._totals), "rejected": dict(self._rejected), "retired": self._retirement.to_list(),
        }

    @classmethod
    def restore(
        cls, settings: QueueSettings, snapshot: dict[str, Any], *, clock: Callable[[], float] = time.monotonic
    ) -> ReplayQueue:
        """A queue that continues from a snapshot, for a learner that has done `settings.trained_steps`.

        Groups in training count as trained if those steps contain them; everything else outstanding is issued again, attempt + 1.
        With a smaller B than before, the newest groups that no longer fit are unused. Raises ValueError when steps or data do not match.
        """
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise ValueError(f"replay snapshot version {snapshot['version']}, this program reads {SNAPSHOT_VERSION}")
        if settings.trained_steps not in (snapshot["steps"], snapshot["training_step"]):
            raise ValueError(
                f"the replay snapshot is of step {snapshot['steps']} (in training: {snapshot['training_step']}) and the learner of step "
                f"{settings.trained_steps}: they are not from the same checkpoint"
            )
        queue = cls(settings, clock=clock)
        room = min(settings.capacity, settings.total_groups - settings.trained_steps * settings.rollout_batch_size)
        queue._ledger.restore(snapshot, room=room)
        queue._totals.update(snapshot["totals"])
        queue._rejected.update(snapshot["rejected"])
        queue._retirement.restore(snapshot["retired"])
        return queue

    # ---- admission ----

    def _room(self) -> int:
        """New ids that may be issued now."""
        if self._retirement.exhausted:
            return 0
        ledger, settings = self._ledger, self.settings
        trainable = settings.total_groups - ledger.steps * settings.rollout_batch_size - ledger.untrained
        return max(min(settings.capacity - len(ledger.entries), trainable), 0)

    def _fair_share(self, actor_id: str) -> int:
        """Slots for this actor when all free ones go, one by one, to the asking actor with the fewest groups in flight."""
        now = self._clock()
        self._polls = {name: poll for name, poll in self._polls.items() if now - poll.at <= POLL_MEMORY_S}
        free = len(self._ledger.slots[State.WAITING]) + self._room()
        wants = {name: poll.want for name, poll in self._polls.items() if poll.want > 0}
        in_flight = {name: len(self._ledger.held.get(name, ())) for name in wants}
        return fair_share(actor_id, wants, in_flight, free=free)

    def _issue(self, actor_id: str, count: int) -> list[GroupTicket]:
        """`count` tickets of the live version: groups that wait for another attempt first, then new ids."""
        waiting = self._ledger.slots[State.WAITING]
        again = [waiting[group_id] for group_id in sorted(waiting)[:count]]
        for entry in again:
            self._ledger.issue_again(entry, actor_id, self._live)
        return [entry.ticket for entry in again + self._issue_new(actor_id, count - len(again))]

    def _issue_new(self, actor_id: str, count: int) -> list[Entry]:
        """Up to `count` new ids; fewer only if `MAX_SKIPS` ids of retired problems lie before them."""
        new: list[Entry] = []
        end = self._ledger.next_group_id + count + MAX_SKIPS
        while len(new) < count and self._ledger.next_group_id < end:
            if self._retirement.skips(self._ledger.next_group_id):
                self._ledger.skip()
            else:
                new.append(self._ledger.issue_new(actor_id, self._live))
        return new

    # ---- intake ----

    def _take(self, actor_id: str, frame: Buffer) -> Verdict:
        try:
            meta = decode_meta(frame, max_bytes=self.settings.max_frame_bytes)
        except WireError as error:
            return self._refuse(actor_id, peek_ticket(frame), str(error))
        ticket = (meta.group_id, meta.attempt)
        entry = self._ledger.entries.get(meta.group_id)
        if entry is None or entry.state != State.IN_FLIGHT or (entry.actor_id, entry.attempt) != (actor_id, meta.attempt):
            return self._answer_again(meta)
        settings, newest = self.settings, self._ledger.newest_version
        problem = problem_of(meta, entry.ticket, newest_version=newest, group_size=settings.group_size, baseline=settings.baseline)
        if problem is not None:
            return self._refuse(actor_id, ticket, problem)
        try:
            reason = None if settings.filter is None else rejection(meta, settings.filter, settings.shaping)
        except ValueError as error:
            return self._refuse(actor_id, ticket, f"the filter cannot judge it: {error}")
        self._retirement.note(meta)
        if reason is not None:
            self._ledger.reject(entry)
            self._rejected[reason] += 1
            self._rejected_now[reason] += 1
            return Verdict(*ticket, "rejected", reason)
        self._ledger.accept(entry, meta, frame, now=self._clock())
        return Verdict(*ticket, "accepted")

    def _answer_again(self, meta: GroupMeta) -> Verdict:
        """The ticket is not in flight at this actor: its result is known already, or the ticket was taken away."""
        record = self._ledger.record(meta.group_id)
        done = (State.READY, State.TRAINING, State.TRAINED, State.REJECTED)
        if record is not None and record[0] == meta.attempt and record[1] in done:
            return Verdict(meta.group_id, meta.attempt, "duplicate", f"this attempt is {record[1].value} already")
        return Verdict(meta.group_id, meta.attempt, "late", "the ticket is not held by this actor any more")

    def _refuse(self, actor_id: str, ticket: tuple[int, int] | None, reason: str) -> Verdict:
        """A frame that must not be trained: a hard error, and its ticket is lost where the frame tells which one it is."""
        group_id, attempt = ticket or (-1, -1)
        entry = self._ledger.held.get(actor_id, {}).get(group_id)
        if entry is not None and entry.attempt == attempt:
            self._lose(entry, reason)
        return Verdict(group_id, attempt, "invalid", reason)

    def _lose(self, entry: Entry, reason: str) -> None:
        self._ledger.lose(entry)
        self._totals["attempts_lost"] += 1
        if entry.state == State.FAILED:
            self._failed_now[reason] += 1

    # ---- order ----

    def _choose(self, step: int) -> list[Entry] | None:
        """The batch of `step` sorted by group_id, or None while it must wait."""
        size, slots = self.settings.rollout_batch_size, self._ledger.slots
        if len(slots[State.READY]) < size:
            return None
        ready = sorted(slots[State.READY].values(), key=lambda entry: entry.age_key)
        staying = [entry.policy_version for entry in ready[size:]]
        staying += [entry.policy_version for entry in slots[State.IN_FLIGHT].values()]
        staying += [self._live] * len(slots[State.WAITING])
        if not can_leave(staying, step=step, max_staleness=self.settings.max_staleness, batch_size=size):
            return None
        return sorted(ready[:size], key=lambda entry: entry.group_id)

    def _check_bound(self, chosen: list[Entry], step: int) -> None:
        for entry in chosen:
            for row in entry.meta.rows if entry.meta is not None else ():
                if not 0 <= step - 1 - row.max_version <= step - 1 - row.min_version <= self.settings.max_staleness:
                    raise StalenessError(
                        f"step {step} would train group {entry.group_id} with tokens of versions {row.min_version} to "
                        f"{row.max_version} at max_staleness {self.settings.max_staleness}; this is a bug, please report it"
                    )

    def _check_signal(self) -> None:
        size, limit = self.settings.rollout_batch_size, self.settings.max_num_gen_batches
        left = sum(len(self._ledger.slots[state]) for state in (State.WAITING, State.IN_FLIGHT, State.READY))
        if self._retirement.exhausted and left < size:
            raise NoSignal(
                f"all {self.settings.problems} problems are retired (answered right at a rate of {self.settings.retire_at:g} or better) after "
                f"{self._ledger.steps} of {self.settings.total_steps} steps, and {left} groups are left for a batch of {size}; add problems, "
                "train fewer steps, or raise replay.filter_groups.retire_at"
            )
        rejected, failed = self._rejected_now.total(), self._failed_now.total()
        if limit and rejected >= limit * size:
            raise NoSignal(
                f"{rejected} groups were rejected since the last learner step ({_listed(self._rejected_now)}), limit {limit} batches of "
                f"{size}; make the task easier or harder, sample more responses, or raise replay.filter_groups.max_num_gen_batches"
            )
        if failed >= MAX_FAILED_GROUPS + 4 * size:
            raise NoSignal(
                f"{failed} groups failed since the last learner step after {self.settings.max_attempts} attempts each "
                f"({_listed(self._failed_now)}); see the logs of the rollout actors"
            )

    def _note_batch(self, chosen: list[Entry], step: int, *, waited: float) -> None:
        now = self._clock()
        lags = [step - 1 - entry.meta.min_version for entry in chosen if entry.meta is not None]
        self._last_batch = {
            "replay/lag_mean": sum(lags) / len(lags), "replay/lag_max": float(max(lags)),
            "replay/learner_wait_s": waited,
            "replay/ready_wait_s": sum(now - entry.ready_at for entry in chosen) / len(chosen),
            "replay/rejected_in_step": float(self._rejected_now.total()), "replay/failed_in_step": float(self._failed_now.total()),
        }
        self._asked_at = None
        self._rejected_now.clear()
        self._failed_now.clear()


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in reasons.most_common(5))
