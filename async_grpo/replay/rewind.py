"""The ledger of a run that starts again: where it was, or at the step of its learner.

Runs in: the replay queue's process. The learner comes back at step c of a checkpoint, the journal ends later, at step t or in training it:

    roll forward   the ledger is taken as it was at the end. The learner trains c+1 to t again from the recorded batches, so that the
                   weights, and with them the versions of all tokens, are what they were: nothing is lost but time.
    discard        where that cannot be: the batches after c are taken back. Results without a token newer than c are ready again, all
                   other groups wait to be issued again, and `run_epoch` is raised.

In both cases tickets that were out are lost with their actors. Invariant: a result that cannot be read is issued again and counted,
never replaced by another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from async_grpo.replay.ledger import Entry, Ledger, State
from async_grpo.replay.past import Past, Results
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire import WireError


@dataclass
class Report:
    """What a resumed queue took over: groups ready, and groups that wait to be issued again, by reason."""

    ready: int = 0
    again: dict[str, int] = field(default_factory=dict)
    lost_steps: int = 0
    from_step: int = 0
    rolled: int = 0
    """Learner steps after the checkpoint that are trained again from their recorded batches."""
    why: str = ""
    """Why lost steps are not rolled forward."""
    note: str = ""
    continued: str = ""
    """What became of responses that were under way."""

    def waits(self, reason: str) -> None:
        """Count a group that waits."""
        self.again[reason] = self.again.get(reason, 0) + 1

    def __str__(self) -> str:
        listed = ", ".join(f"{count} {reason}" for reason, count in self.again.items())
        text = f"{self.ready} completed groups restored, {sum(self.again.values())} to be issued again" + (f" ({listed})" if listed else "")
        if self.rolled:
            text += f"; {_steps(self.rolled)} after the checkpoint (step {self.from_step}) rolled forward from the recorded batches"
        if self.lost_steps:
            text += f"; {_steps(self.lost_steps)} after the checkpoint (step {self.from_step}) discarded and trained anew: {self.why}"
        return text + "".join(f"; {part}" for part in (self.continued, self.note) if part)


def _steps(count: int) -> str:
    return f"{count} learner step{'s' if count > 1 else ''}"


def obstacle(past: Past, settings: QueueSettings, results: Results) -> str:
    """Why the steps after `settings.trained_steps` cannot be trained again from their recorded batches, or ""."""
    for step in range(settings.trained_steps + 1, past.ledger.newest_version + 1):
        if step not in past.batches:
            return f"the journal does not have the batch of step {step}"
        for group_id in past.batches[step]:
            entry = past.results.get(group_id)
            try:
                results.read(None if entry is None else entry.place, group_id, 0 if entry is None else entry.attempt, settings)
            except WireError as error:
                return f"group {group_id} of step {step} cannot be read ({error})"
    return ""


def forward(past: Past, settings: QueueSettings, results: Results) -> tuple[Ledger, Report]:
    """The ledger as it was at the end, for a learner that will come to the same step; see `obstacle`. What was in flight waits."""
    end = past.ledger
    report = Report(from_step=settings.trained_steps, rolled=end.steps - settings.trained_steps, note="; ".join(past.notes))
    kept = []
    in_slots = [entry for index in end.slots.values() for entry in index.values()]  # in each state in the order of arrival
    for entry in (*in_slots, *end.unused.values()):
        if entry.state == State.TRAINING:
            entry.meta, entry.frame = results.read(entry.place, entry.group_id, entry.attempt, settings)
        elif entry.state != State.TRAINED:
            entry = _taken_over(entry, end.newest_version, settings, results, report)
        kept.append(entry)
    closed = Counter(end.closed)
    closed[State.UNUSED] -= len(end.unused)  # a run that goes on has use for them
    ledger = _started_again(end, {"closed": +closed, "max_attempts": settings.max_attempts}, kept)
    report.ready = len(ledger.slots[State.READY])
    return ledger, report


def rewind(past: Past, settings: QueueSettings, *, results: Results | None = None, why: str) -> tuple[Ledger, Report]:
    """The ledger for a learner at `settings.trained_steps`, and what became of the groups. Without `results`, all are issued again.

    why: the reason why steps after that are not rolled forward; if there are any, or the end is unknown, the run epoch is raised.
    """
    step, end, report = settings.trained_steps, past.ledger, Report(note="; ".join(past.notes), why=why)
    closed = Counter(end.closed)
    closed[State.UNUSED] -= len(end.unused)  # a run that goes on has use for them
    known = end.entries | end.unused
    lost = {group_id: after for after, ids in past.batches.items() if after > step for group_id in ids}
    report.lost_steps, report.from_step = max(end.steps - step, 0), step
    kept: list[Entry] = []
    for group_id in sorted({*known, *lost}):
        entry = known.get(group_id)
        if entry is None:
            closed[State.TRAINED] -= 1  # a lost step had trained it
        elif entry.step is not None and entry.step <= step:
            closed[State.TRAINED] += 1
            continue
        if group_id in lost or entry is None:
            entry = past.results.get(group_id, entry) or Entry(group_id, 1, step, State.WAITING)
        kept.append(_taken_over(entry, step, settings, results, report))
    completed = {group_id: place for place, group_id in enumerate(past.results)}
    kept.sort(key=lambda entry: completed[entry.group_id] if entry.state == State.READY else -1)
    _keep_what_can_be_trained(kept, settings, report)
    then = {"steps": step, "live": step, "training_step": None, "closed": +closed, "max_attempts": settings.max_attempts}
    if end.newest_version > step or past.notes or past.last is None:
        then |= {"run_epoch": end.run_epoch + 1, "epoch_step": step}
    lost_steps = [tokens for after, tokens in past.weighed.items() if step < after <= end.steps]
    if end.training_step is not None and end.training_step <= step:  # the learner had finished it, and the queue had not heard
        trained, masked = end.tokens.in_training(end.training)
        lost_steps.append((-trained, -masked))
    ledger = _started_again(end, then, kept, lost=lost_steps)
    report.ready = len(ledger.slots[State.READY])
    return ledger, report


def _started_again(end: Ledger, then: dict[str, object], entries: Sequence[Entry], *, lost: Iterable[tuple[int, int]] = ()) -> Ledger:
    """Actors, counters of now and faults are of one start of the run; whoever mended the data must not be stopped by old failures.

    lost: tokens, with weight and without, of each learner step that is taken back; below 0 for one that is trained after all.
    """
    fresh = {
        "over": False, "forfeited": [], "rejected_now": {}, "failed_now": {}, "failed": {}, "failed_before": end.closed[State.FAILED],
        "totals": {name: count for name, count in end.totals.items() if name != "restarts"},
    }
    ledger, lost = Ledger.from_snapshot({**end.snapshot(), **fresh, **then}, entries=entries), list(lost)
    ledger.tokens.gone(end.forfeited, place="lost")
    ledger.tokens.taken_over(entries, trained=sum(tokens for tokens, _ in lost), masked=sum(tokens for _, tokens in lost))
    return ledger


def _taken_over(entry: Entry, step: int, settings: QueueSettings, results: Results | None, report: Report) -> Entry:
    """Ready if its result can be trained when the learner is at `step`, otherwise waiting."""
    waiting = Entry(entry.group_id, entry.attempt, step, State.WAITING, failures=entry.failures)
    if entry.place is None:
        report.waits("in flight")
    elif results is None:
        report.waits("completed under other settings or in another run's journal")
    elif entry.policy_version > step:  # known without reading: a long run may have lost many steps
        report.waits("with tokens of lost learner steps")
    else:
        try:
            meta, frame = results.read(entry.place, entry.group_id, entry.attempt, settings)
        except WireError:
            report.waits("unreadable in the journal")
            return waiting
        if meta.max_version <= step:
            ready = replace(waiting, state=State.READY, policy_version=meta.policy_version, place=entry.place)
            ready.meta, ready.frame = meta, frame
            return ready
        report.waits("with tokens of lost learner steps")
    return waiting


def _keep_what_can_be_trained(entries: list[Entry], settings: QueueSettings, report: Report) -> None:
    """With `wait`, ready groups that a smaller bound or batch than before cannot train in time wait for another attempt.

    Order `fifo` trains the waiting ones with a smaller id first, so they count.
    """
    if settings.on_stale != "wait":
        return
    if settings.order == "fifo":
        order = sorted(entries, key=lambda entry: entry.group_id)
    else:
        order = sorted((entry for entry in entries if entry.state == State.READY), key=lambda entry: (entry.policy_version, entry.group_id))
    place = 0
    for entry in order:
        if entry.policy_version + settings.max_staleness < settings.trained_steps + place // settings.rollout_batch_size:
            if entry.state == State.WAITING:
                continue
            report.waits("too old for these settings")
            entry.state, entry.policy_version = State.WAITING, settings.trained_steps
            entry.meta = entry.frame = entry.place = None
        place += 1 if settings.order == "fifo" or entry.state == State.READY else 0
