"""Admission, order, release and accounting of groups: the one place that counts.

Runs in: the replay queue's process, as an asyncio object. Hides the staleness bound, the fair
division of slots, retries, the filter and the journal; rollout actors see tickets, the loop sees
batches. A result on its way:

    put -> decoded -> late? duplicate? -> fits its ticket? -> filter -> journal -> ledger: ready
              |            |                 |                  |
           invalid      refused           invalid           rejected

    ready -> order -> batch -> payload
        |
      too old: expired, or its old tokens masked

With R = rollout_batch_size, K = max_staleness and s learner steps done:

    admission   `admission`: fewer than B = (K + 1) R groups hold a slot; tickets go only to engines
                that serve the live version
    order       `order`: the R first ready groups leave. With `wait` only if everything that stays
                behind can still be trained in time; with `mask` and `expire` as soon as there are R
    release     slots of trained groups return when their weights are live; rejected, failed and
                expired groups free theirs at once
    deadline    a ticket that is out for longer than `ticket_timeout_s` is taken back, whatever its
                actor does
    again       a learner that went back to a checkpoint asks for steps that are trained: it gets
                the recorded batches (`history.RecordedQueue`), or the steps are discarded
                (`resume`) and `run_epoch` is raised, for their version numbers will be written once
                more

Invariants: every token that is trained with weight has 0 <= lag <= K, asserted when a batch leaves;
every change is an event, in the journal before it is in the ledger, and there before the call is
answered; `put` is idempotent on (group_id, attempt) and `get_batch` on the step; no call waits for
another one, so a full queue cannot lock out the call that would empty it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from async_grpo.algo.catalog import import_plugins
from async_grpo.replay import events
from async_grpo.replay.actor_reports import ActorReport, ActorReports
from async_grpo.replay.admission import (
    Admission,
    Curriculum,
    PassRates,
    Retirement,
    TaskShares,
    check_signal,
)
from async_grpo.replay.history import RecordedQueue
from async_grpo.replay.journal import Writer, snapshot_facts
from async_grpo.replay.ledger import GroupEntry, Ledger, State, fifth_of
from async_grpo.replay.metrics import QueueWaits, batch_metrics
from async_grpo.replay.order import BatchPicker
from async_grpo.replay.outstanding import OutstandingLimit
from async_grpo.replay.partial import PartialStart
from async_grpo.replay.rules import QueueSettings, Verdict, check_bound, problem_of, rejection
from async_grpo.replay.token_ledger import masked_tokens, token_counts
from async_grpo.wire.codec import (
    Batch,
    Buffer,
    GroupMeta,
    GroupTicket,
    WireError,
    decode_meta,
    pack_frames,
    peek_ticket,
)

MAX_SKIPS = 4096
"""Ids that one `acquire` skips (tens of milliseconds); the next one goes on."""
TICKET_GRACE_S = 5.0
"""Seconds that an actor, which can say why its group failed, has beyond a ticket's deadline."""
SLICE_BYTES, SLICE_FRAMES = 2**22, 32
"""What one `put` takes before it lets other calls run."""


TOTALS = (
    *("late", "duplicate", "abandoned", "invalid", "forfeited"),
    *("attempts_lost", "expirations", "overdue", "unreadable", "restarts"),
)
"""Counters of the ledger that `counts` tells."""


REJECTED_BYTES = 2**26
"""Of rejected groups that the journal keeps to be looked at; more while accepted ones take more, so
that filters at most double the journal.
"""


class ReplayQueue:
    """Owner of every group between its ticket and its learner step. Every call answers at once;
    `resume.open_queue` builds one on a journal.

    Example, with two groups in a batch and no journal:

        queue = ReplayQueue(settings)
        [first, second] = await queue.acquire("actor-1", 0, [], 2)    # two ids are in flight
        await queue.put("actor-1", [frame_of(first), frame_of(second)])             # ready
        batch = await queue.get_batch(1)                                            # training
        frames = await queue.payload(1, [group.group_id for group in batch.groups])
        await queue.live(1)                        # trained; their slots are free for new ids
    """

    def __init__(
        self,
        settings: QueueSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
        journal: Writer | None = None,
        facts: dict[str, Any] | None = None,
        report: object = None,
        continued: Sequence[PartialStart] = (),
    ) -> None:
        """ledger: where to go on. facts: beside it in snapshots. report: what was taken over.
        continued: groups that go on where a checkpoint left them.
        """
        import_plugins(settings.plugins)
        self.settings, self.report = settings, report
        self.rolls_to: int | None = None
        """The step to which the run rolls forward, until the learner asks for the first one."""
        self._clock = clock
        self._journal, self._facts = journal, facts or snapshot_facts()
        self._accepted_bytes = self._rejected_bytes = 0
        if ledger is None:
            ledger = Ledger(
                first_group_id=settings.next_group_id,
                steps=settings.trained_steps,
                max_attempts=settings.max_attempts,
            )
            ledger.rates.update(settings.pass_rates)
        self._ledger = ledger
        self._retirement = Retirement(settings, self._ledger.retired)
        self._shares = TaskShares(settings, self._ledger)
        self._pass_rates = PassRates(settings, self._ledger)
        self._curriculum = Curriculum(settings, self._ledger)
        self._rules = (self._retirement, self._shares, self._pass_rates, self._curriculum)
        self._outstanding = OutstandingLimit(settings)
        self._admission = Admission(
            settings,
            self._ledger,
            self._retirement,
            {one.group_id: one for one in continued},
            self._outstanding,
        )
        self._pressure, self._reports = QueueWaits(), ActorReports()
        self._departure = BatchPicker(settings, self._ledger, self._admission, self.record)
        self._batch: Batch | None = None
        self._last_batch: dict[str, float] = {}
        self._recorded: RecordedQueue | None = None

    # ---- rollout actors ----

    async def acquire(
        self,
        actor_id: str,
        serving_version: int,
        holding: Sequence[tuple[int, int]],
        want: int,
        report: ActorReport | None = None,
    ) -> list[GroupTicket] | None:
        """Issue tickets: at most `want`; [] means ask again, None that the run is over or the actor
        dead.

        holding: (group_id, attempt) the actor works on; a recorded ticket not among them was lost
        on the way and is issued again as it was. So an actor has one `acquire` at a time. report:
        see `tell`.
        """
        if report is not None:
            self._reports.tell(actor_id, report)
        ledger, now = self._ledger, self._clock()
        if ledger.over or ledger.steps >= self.settings.total_steps or actor_id in ledger.forfeited:
            return None
        self._take_back_tickets(now)
        known, held = {tuple(pair) for pair in holding}, ledger.held_by(actor_id)
        lost = [entry for entry in held if (entry.group_id, entry.attempt) not in known]
        tickets = [ledger.ticket(entry) for entry in lost]
        if serving_version != ledger.live:
            # It gets nothing, so it must not reserve a share either: a newcomer may take minutes to
            # load the live version.
            self._admission.forget(actor_id)
        else:
            more = self._admission.grant(actor_id, max(want - len(tickets), 0), now=now)
            tickets += self._issue(actor_id, more)
        self._pressure.answered(actor_id, idle=want > 0 and not tickets and not holding, now=now)
        return tickets

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]:
        """Take finished groups; a verdict each, in order. Every frame is copied. Idempotent."""
        verdicts, taken = [], 0
        for index, frame in enumerate(frames):
            verdict, tokens = self._take(actor_id, frame)
            verdicts.append(verdict)
            if verdict.status in ("late", "duplicate", "abandoned", "invalid"):
                reason = events.plain_text(verdict.reason)
                self.record(
                    events.Refuse(
                        verdict.status, verdict.group_id, verdict.attempt, actor_id, reason, tokens
                    )
                )
            taken += len(frame)
            if taken >= SLICE_BYTES or index % SLICE_FRAMES == SLICE_FRAMES - 1:
                taken = 0
                await asyncio.sleep(0)  # a large batch must not hold up the other calls
        await self.commit()
        return verdicts

    async def fail(
        self,
        actor_id: str,
        tickets: Sequence[GroupTicket],
        reason: str,
        tokens: Sequence[int | None] | None = None,
    ) -> None:
        """Reissue groups, or fail them after `max_attempts`. tokens: sampled for each."""
        for ticket, sampled in zip(tickets, tokens or [None] * len(tickets), strict=True):
            entry = self._ledger.held.get(actor_id, {}).get(ticket.group_id)
            if entry is not None and entry.attempt == ticket.attempt:
                self._lose(entry, reason, sampled)
            elif sampled:
                self.record(events.Waste(ticket.group_id, ticket.attempt, actor_id, sampled))

    async def forfeit(self, actor_id: str) -> None:
        """Reissue all tickets of a process that is gone; its id gets no ticket any more."""
        self._admission.forget(actor_id)
        self._pressure.gone(actor_id, now=self._clock())
        self._note_reports()
        self.record(events.Forfeit(actor_id))
        for entry in self._ledger.held_by(actor_id):
            self._lose(entry, "producer died")

    # ---- loop and learner ----

    async def get_batch(self, step: int) -> Batch | None:
        """Take the groups of learner step `step` (from 1); None while they are not complete.
        Idempotent.

        Asking for `step` says that `step - 1` is trained; a trained step is read from the journal.
        Raises NoSignal when too many groups were rejected or failed or all problems are retired,
        StalenessError when a token breaks the bound, ValueError for a step out of turn.
        """
        ledger, now = self._ledger, self._clock()
        if self.rolls_to is not None and step <= self.rolls_to:
            self._facts["rolled_to"], self.rolls_to = self.rolls_to, None
            self.begin_segment()
        if step == ledger.training_step or (self._batch is not None and step == self._batch.step):
            await self.commit()  # the call that took it may not have come to that
            return self._current_batch()
        if step <= ledger.steps and self._journal is not None:
            return await self._again().get_batch(step)
        if step != ledger.newest_version + 1:
            raise ValueError(
                f"step {step} is out of turn: the next learner step is {ledger.newest_version + 1}"
            )
        self._finish_step()
        if ledger.over or step > self.settings.total_steps:
            return None
        self._pressure.learner_asks(now)
        self._take_back_tickets(now)
        chosen = self._departure.choose(step)
        ready = len(ledger.slots[State.READY])
        if chosen is None:
            if ready < self.settings.rollout_batch_size:
                self._outstanding.starves()
            check_signal(ledger, self.settings, exhausted=self._retirement.exhausted)
            return None
        bound, on_stale = self.settings.max_staleness, self.settings.on_stale
        for entry in chosen:
            check_bound(entry.result, step=step, max_staleness=bound, on_stale=on_stale)
        waited = self._pressure.learner_served([entry.slow for entry in chosen], now=now)
        self._last_batch = batch_metrics(chosen, self.settings, step=step, now=now) | {
            "replay/learner_wait_s": waited,
            "replay/rejected_in_step": float(ledger.rejected_now.total()),
            "replay/failed_in_step": float(ledger.failed_now.total()),
        }
        masked = masked_tokens(
            [entry.result for entry in chosen],
            mask_truncated=self.settings.mask_truncated,
            stale_before=step - 1 - bound if on_stale == "mask" else None,
        )
        self._outstanding.departs(ready - len(chosen))
        self.record(events.TakeBatch(step, tuple(entry.group_id for entry in chosen), masked))
        await self.commit()
        return self._current_batch()

    async def payload(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        """Pack the frames of groups in training, in the order asked for (`wire.unpack_frames`)."""
        training = self._ledger.training
        if step <= self._ledger.steps and self._journal is not None:
            return await self._again().payload(step, group_ids)
        if step != self._ledger.training_step or not training.keys() >= set(group_ids):
            raise ValueError(
                f"step {step}, groups {list(group_ids)}: only groups of the step in "
                "training or of the journal have a payload"
            )
        return pack_frames([training[group_id].frame or b"" for group_id in group_ids])

    async def live(self, version: int, digest: str = "") -> None:
        """Return the slots of all steps in `version`, which every engine serves. Never back."""
        if not self._ledger.live <= version <= self._ledger.newest_version:
            raise ValueError(
                f"version {version} cannot be live: {self._ledger.live} is, and the "
                f"learner is at {self._ledger.newest_version}"
            )
        if version == self._ledger.training_step:
            self._finish_step()
        self.record(events.Live(version, digest))
        await self.commit()

    async def close(self, *, orderly: bool = True) -> None:
        """End the run: groups that no step took are unused. orderly: it did not end at an error."""
        if orderly and self._facts["rolled_to"] is not None:
            self._facts["rolled_to"] = None
            self.begin_segment()
        if not self._ledger.over:
            self._note_reports()
            self.record(events.Close())
            await self.commit()

    async def tell(self, actor_id: str, report: ActorReport) -> None:
        """Keep an actor's report: tokens, and seconds by cause, of its process so far."""
        self._reports.tell(actor_id, report)

    # ---- what others may know ----

    @property
    def ledger(self) -> Ledger:
        """The ledger, to look at."""
        return self._ledger

    def reports(self) -> dict[str, ActorReport]:
        """Return the latest report of every rollout actor."""
        return self._reports.latest

    async def is_over(self) -> bool:
        """Whether actors are told to stop: the run was closed, or all its steps are trained."""
        return self._ledger.over or self._ledger.steps >= self.settings.total_steps

    async def counts(self) -> dict[str, int]:
        """Count groups by state (the sum is the ids issued), rejections by reason, and totals."""
        ledger = self._ledger
        rejected = {f"rejected/{name}": count for name, count in sorted(ledger.rejected.items())}
        return ledger.counts() | rejected | {name: ledger.totals[name] for name in TOTALS}

    async def history(self, group_ids: Sequence[int]) -> dict[int, dict[str, int | str | None]]:
        """Attempt, state and learner step of each id that is remembered (`Ledger.history`)."""
        return self._ledger.history(group_ids)

    async def held(self) -> dict[str, list[tuple[int, int]]]:
        """(group_id, attempt) in flight at each actor."""
        return {
            actor_id: [(entry.group_id, entry.attempt) for entry in self._ledger.held_by(actor_id)]
            for actor_id in self._ledger.held
        }

    async def evaluated(self, accuracies: Mapping[str, float]) -> list[str]:
        """Take the held-out accuracies of tasks; the tasks that are posed from now on."""
        before = self._curriculum.closed
        for task, value in accuracies.items() if before else ():
            self.record(events.Evaluate(task, value))
        await self.commit()
        return [task for task in before if task not in self._curriculum.closed]

    async def metrics(self) -> dict[str, float]:
        """Numbers to log, as `replay/...` paths. Times in seconds, lags in learner steps."""
        self._note_reports()
        ledger, now = self._ledger, self._clock()
        ready = ledger.slots[State.READY].values()
        out = {f"replay/{name}": float(count) for name, count in (await self.counts()).items()}
        out |= {
            "replay/outstanding": float(len(ledger.entries)),
            "replay/limit": float(self._outstanding.groups),
            "replay/standing": float(self._outstanding.standing),
            "replay/refused": float(self._outstanding.asks_refused),
            "replay/capacity": float(self.settings.capacity),
            "replay/live_version": float(ledger.live),
            "replay/steps": float(ledger.steps),
            "replay/retired": float(len(ledger.retired)),
            **_pass_rates(ledger.rates),
            "replay/producers": float(len(ledger.held)),
            "replay/bytes": float(sum(len(entry.frame or b"") for entry in ready)),
            "replay/oldest_ready_s": now - min((entry.ready_at for entry in ready), default=now),
            "replay/segment_bytes": 0.0 if self._journal is None else float(self._journal.nbytes),
            "replay/journal_syncs": 0.0 if self._journal is None else float(self._journal.syncs),
        }
        return out | self._pressure.metrics(now) | ledger.tokens.metrics(ledger) | self._last_batch

    # ---- the journal ----

    async def snapshot(self) -> dict[str, Any]:
        """Capture ledger and, with a journal, the segment that begins with it."""
        if self._journal is None:
            return {**self._facts, "ledger": self._ledger.snapshot(), "segment": None}
        self.begin_segment()
        return {**self._facts, "ledger": self._ledger.snapshot(), "segment": self._journal.segment}

    async def digests(self) -> dict[int, str]:
        """Digest of the weights of every recorded version that was live, where it has one."""
        return {} if self._journal is None else await self._again().digests()

    async def forget(self, *, segment: int, step: int) -> None:
        """Delete segments that no checkpoint needs: the oldest kept is of `segment` and `step`."""
        if self._journal is None:
            return
        ledger = self._ledger
        needed = {
            entry.place.segment for entry in ledger.entries.values() if entry.place is not None
        }
        needed |= {number for number, trained in ledger.segment_steps.items() if trained > step}
        old = {number for number in self._journal.segments() if number < segment} - needed
        self._journal.remove(old)
        for number in old:
            ledger.segment_steps.pop(number, None)

    @property
    def start(self) -> str:
        """Name of the start of the run that the journal's newest segment belongs to."""
        return str(self._facts["start"])

    def record(
        self, event: events.Event, *, meta: GroupMeta | None = None, frame: bytes | None = None
    ) -> None:
        """Make an event happen: first in the journal, then in the ledger."""
        place = None if self._journal is None else self._journal.append_event(event, frame or b"")
        self._ledger.apply(event, now=self._clock(), meta=meta, frame=frame, place=place)
        if (task := self._shares.owes(event)) is not None:
            self.record(events.Owe(task, 1))
        if self._journal is not None and self._journal.full:
            self.begin_segment()

    def raise_epoch(self, *, above: int, step: int) -> None:
        """Raise the run epoch `above` this one, at `step`, unless the checkpoint has done it."""
        if self.ledger.run_epoch <= above:
            self.ledger.run_epoch, self.ledger.epoch_step = above + 1, step
            self.begin_segment()

    def begin_segment(self) -> None:
        """Start another segment of the journal, from the ledger as it is."""
        assert self._journal is not None
        self._journal.begin({**self._facts, "ledger": self._ledger.snapshot()})

    async def commit(self) -> None:
        """Wait until the journal has what happened so far."""
        if self._journal is not None:
            await self._journal.commit()

    # ---- tickets ----

    def _issue(self, actor_id: str, count: int) -> list[GroupTicket]:
        """Issue `count` tickets: waiting groups first, then new ids, under the live version unless
        a group continues. Fewer only where `MAX_SKIPS` ids to skip lie before the new ones.
        """
        ledger = self._ledger
        again = self._admission.again()[:count]
        for group_id, version in again:
            attempt = ledger.entries[group_id].attempt + 1
            self.record(events.Issue(group_id, attempt, actor_id, version))
        given, end = [group_id for group_id, _ in again], ledger.next_group_id + count + MAX_SKIPS
        while len(given) < count and ledger.next_group_id < end:
            first = group_id = ledger.next_group_id
            while group_id < end and any(rule.skips(group_id) for rule in self._rules):
                group_id += 1
            if group_id > first:
                self.record(events.Skip(first, group_id - first))
            if group_id < end:
                if (task := self._shares.due) is not None:
                    self.record(events.Owe(task, -1))
                self.record(events.Issue(group_id, 1, actor_id, ledger.live))
                given.append(group_id)
        return [ledger.ticket(ledger.entries[group_id]) for group_id in given]

    def _take_back_tickets(self, now: float) -> None:
        if self.settings.ticket_timeout_s is None:
            return
        limit = self.settings.ticket_timeout_s + TICKET_GRACE_S
        late = []
        for entry in self._ledger.slots[State.IN_FLIGHT].values():  # in the order of issue
            if now - entry.issued_at <= limit:
                break
            late.append(entry)
        for entry in late:
            self._lose(entry, events.OVERDUE)

    def _lose(self, entry: GroupEntry, reason: str, tokens: int | None = None) -> None:
        self.record(events.Fail(entry.group_id, entry.attempt, events.plain_text(reason), tokens))

    def _note_reports(self) -> None:
        if told := self._reports.news(self._ledger.tokens.told):
            self.record(events.Sampled(told))

    # ---- intake ----

    def _take(self, actor_id: str, frame: Buffer) -> tuple[Verdict, int]:
        """Judge a frame; its tokens."""
        try:
            meta = decode_meta(frame, max_bytes=self.settings.max_frame_bytes)
        except WireError as error:
            return self._refuse(actor_id, peek_ticket(frame), str(error)), 0
        tokens, baseline = token_counts(meta)
        return self._judge(actor_id, frame, meta, tokens, baseline), tokens + baseline

    def _judge(
        self, actor_id: str, frame: Buffer, meta: GroupMeta, tokens: int, baseline: int
    ) -> Verdict:
        ticket, ledger = (meta.group_id, meta.attempt), self._ledger
        if meta.run_epoch < ledger.run_epoch and meta.max_version > ledger.epoch_step:
            lost = f"it has tokens of learner steps after {ledger.epoch_step}, which were discarded"
            return self._refuse(actor_id, ticket, lost, status="abandoned")
        entry = ledger.held.get(actor_id, {}).get(meta.group_id)
        if entry is None or entry.attempt != meta.attempt:
            return self._answer_again(meta)
        settings, rule = self.settings, self.settings.rule_of(meta.group_id)
        problem = problem_of(
            meta,
            ledger.ticket(entry),
            newest_version=ledger.newest_version,
            group_size=rule.group_size,
            baseline=settings.baseline,
        )
        if problem is not None:
            return self._refuse(actor_id, ticket, problem)
        try:
            reason = rejection(meta, rule.filter, settings.shaping) if rule.filter else None
        except ValueError as error:
            return self._refuse(actor_id, ticket, f"the filter cannot judge it: {error}")
        if (retired := self._retirement.retires(meta)) is not None:
            self.record(events.Retire(retired))
        if reason is not None:
            shown = self._spared(frame)
            for rated in self._pass_rates.rated([meta]):
                self.record(rated)
            self.record(events.Reject(*ticket, reason, tokens, baseline), frame=shown)
            return Verdict(*ticket, "rejected", reason)
        result = bytes(memoryview(frame))
        self._accepted_bytes += len(result)
        self.record(events.Put(*ticket, tokens, baseline), meta=meta, frame=result)
        entry.slow = self._pressure.completed(entry.ready_at - entry.issued_at)
        return Verdict(*ticket, "accepted")

    def _spared(self, frame: Buffer) -> bytes | None:
        """Return the frame of a rejected group for the journal, where its bytes are to spare."""
        size = memoryview(frame).nbytes
        spare = max(self._accepted_bytes, REJECTED_BYTES) - self._rejected_bytes
        if self._journal is None or size > spare:
            return None
        self._rejected_bytes += size
        return bytes(memoryview(frame))

    def _answer_again(self, meta: GroupMeta) -> Verdict:
        """Refuse a result of no ticket in flight here: known already, or taken away."""
        record = self._ledger.record(meta.group_id)
        done = (State.READY, State.TRAINING, State.TRAINED, State.REJECTED)
        if record is not None and record[0] == meta.attempt and record[1] in done:
            reason = f"this attempt is {record[1].value} already"
            return Verdict(meta.group_id, meta.attempt, "duplicate", reason)
        reason = "the ticket is not held by this actor any more"
        return Verdict(meta.group_id, meta.attempt, "late", reason)

    def _refuse(
        self,
        actor_id: str,
        ticket: tuple[int, int] | None,
        reason: str,
        *,
        status: Literal["invalid", "abandoned"] = "invalid",
    ) -> Verdict:
        """Refuse a frame that must not be trained, and lose its ticket where it is known."""
        group_id, attempt = ticket or (-1, -1)
        entry = self._ledger.held.get(actor_id, {}).get(group_id)
        if entry is not None and entry.attempt == attempt:
            self._lose(entry, reason)
        return Verdict(group_id, attempt, status, reason)

    # ---- learner steps ----

    def _again(self) -> RecordedQueue:
        """Read the trained steps from the journal; forgotten when the learner goes on."""
        assert self._journal is not None, "the callers have looked"
        self._recorded = self._recorded or RecordedQueue(str(self._journal.directory))
        return self._recorded

    def _finish_step(self) -> None:
        self._recorded = None
        if self._ledger.training_step is not None:
            for rated in self._pass_rates.rated(e.result for e in self._ledger.training.values()):
                self.record(rated)
            self.record(events.Done(self._ledger.training_step))

    def _current_batch(self) -> Batch:
        step = self._ledger.training_step
        if step is not None and (self._batch is None or self._batch.step != step):
            training = sorted(self._ledger.training.values(), key=lambda entry: entry.group_id)
            self._batch = Batch(step, tuple(entry.result for entry in training))
        assert self._batch is not None, "a step was taken"
        return self._batch


def _pass_rates(rates: Mapping[int, float]) -> dict[str, float]:
    """Count the problems by their pass rates, in fifths."""
    found = Counter(map(fifth_of, rates.values()))
    return {f"replay/pass_rate/{fifth}": float(found[fifth]) for fifth in range(5) if rates}
