"""A queue from what its journal says: after its process died, or for a run that starts again.

Runs in: the replay queue's process. Hides how the ledger is rebuilt. The learner of a run that
starts again comes back at step c of a checkpoint, and the journal (`history.Past`) ends later, at
step t or in training it:

    same start      the last segment's snapshot and the events behind it give the ledger as it was.
                    Tickets stay with the actors that hold them, the batch in training can be
                    fetched again
    roll forward    the ledger is taken as it was at the end. The learner trains c+1 to t again from
                    the recorded batches, so that the weights, and with them the versions of all
                    tokens, are what they were: nothing is lost but time
    roll back       where that cannot be, or only up to some step, steps are discarded: the batches
                    after it are taken back. Results without a token newer than it are ready again,
                    all other groups wait to be issued again, and `run_epoch` is raised

With another start, tickets that were out are lost with their actors.

Invariants: a start begins a segment of its own, so what an earlier one left cut off or damaged is
never written over; a step at which the run ended twice without coming further is not rolled forward
to a third time; a result that cannot be read is issued again and counted, never replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.errors import JournalDamage, JournalError, SetupError
from async_grpo.replay.admission import free_again
from async_grpo.replay.events import Drop
from async_grpo.replay.history import Link, Past, Visitor, find_past, read
from async_grpo.replay.journal import (
    JOURNAL_FORMAT,
    Fsync,
    Results,
    Segment,
    Writer,
    segments,
    snapshot_facts,
)
from async_grpo.replay.ledger import GroupEntry, Ledger, State
from async_grpo.replay.order import Due, Others
from async_grpo.replay.partial import PartialStart, choose, told
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire.codec import WireError

if TYPE_CHECKING:
    from async_grpo.config.schema import Config


_TAIL_BYTES = 2**20
_NOT_OF_GROUPS = {
    *("verifier", "max_bad_fraction", "judges", "env_vars", "layout", "columns", "streaming")
}
"""Keys of the task on which a completed group does not depend, or that are digested apart."""


@dataclass
class ResumeReport:
    """What a resumed queue took over: groups ready, and groups to be issued again, by reason."""

    ready: int = 0
    again: Counter[str] = field(default_factory=Counter)
    lost_steps: int = 0
    from_step: int = 0
    rolled: int = 0
    """Learner steps after the checkpoint that are trained again from their recorded batches."""
    rolls_to: int | None = None
    """The step in training at the end, or the last one, if the run rolls forward to it."""
    why: str = ""
    """Why lost steps are not rolled forward."""
    note: str = ""
    continued: str = ""
    """What became of responses that were under way."""

    def __str__(self) -> str:
        listed = ", ".join(f"{count} {reason}" for reason, count in self.again.items())
        text = (
            f"{self.ready} completed groups restored, {self.again.total()} to be issued again"
            + (f" ({listed})" if listed else "")
        )
        if self.rolled:
            text += (
                f"; {_steps(self.rolled)} after the checkpoint (step {self.from_step}) rolled "
                "forward from the recorded batches"
            )
        if self.lost_steps:
            there = f"step {self.rolls_to}"
            after = there if self.rolls_to else f"the checkpoint (step {self.from_step})"
            text += f"; {_steps(self.lost_steps)} after {after} discarded and trained anew"
            text += f": {self.why or 'they are not in the journal'}"
        return text + "".join(f"; {part}" for part in (self.continued, self.note) if part)


def _steps(count: int) -> str:
    return f"{count} learner step{'s' if count > 1 else ''}"


def obstacle(past: Past, settings: QueueSettings, results: Results) -> tuple[int, str]:
    """Find the last step up to which the journal can train those after `settings.trained_steps`;
    why it cannot train the next one, or "".
    """
    newest = past.ledger.newest_version
    for step in range(settings.trained_steps + 1, newest + 1):
        if step not in past.steps:
            return step - 1, f"the journal does not have the batch of step {step}"
        for group_id in past.steps[step]:
            entry = past.results.get(group_id)
            try:
                results.read(entry, max_bytes=settings.max_frame_bytes)
            except WireError as error:
                return step - 1, f"group {group_id} of step {step} cannot be read ({error})"
    return newest, ""


def roll_forward(
    past: Past, settings: QueueSettings, results: Results
) -> tuple[Ledger, ResumeReport]:
    """Take the ledger as it was at the end (see `obstacle`); what was in flight waits."""
    end = past.ledger
    report = ResumeReport(
        from_step=settings.trained_steps,
        rolled=end.steps - settings.trained_steps,
        rolls_to=end.newest_version,
        note="; ".join(past.notes),
    )
    kept = []
    for entry in end.remembered():
        if entry.state == State.TRAINING:
            entry.meta, entry.frame = results.read(entry, max_bytes=settings.max_frame_bytes)
        elif entry.state != State.TRAINED:
            entry = _taken_over(entry, end.newest_version, settings, results, report)
        kept.append(entry)
    closed = Counter(end.closed)
    closed[State.UNUSED] -= len(end.unused)  # a run that goes on has use for them
    ledger = _started_again(end, {"closed": +closed, "max_attempts": settings.max_attempts}, kept)
    report.ready = len(ledger.slots[State.READY])
    return ledger, report


def roll_back(
    past: Past, settings: QueueSettings, *, results: Results | None = None, why: str
) -> tuple[Ledger, ResumeReport]:
    """Rebuild the ledger for a learner at `settings.trained_steps`; without `results`, all is
    reissued.

    why: why later steps are not rolled forward; if there are any, or the end is unknown, the run
    epoch is raised.
    """
    step, end = settings.trained_steps, past.ledger
    report = ResumeReport(note="; ".join(past.notes), why=why)
    closed = Counter(end.closed)
    closed[State.UNUSED] -= len(end.unused)  # a run that goes on has use for them
    known = end.entries | end.unused
    lost = {
        group_id: after for after, ids in past.steps.items() if after > step for group_id in ids
    }
    report.lost_steps, report.from_step = max(end.steps - step, 0), step
    kept: list[GroupEntry] = []
    for group_id in sorted({*known, *lost}):
        entry = known.get(group_id)
        if entry is None:
            closed[State.TRAINED] -= 1  # a lost step had trained it
        elif entry.step is not None and entry.step <= step:
            closed[State.TRAINED] += 1
            continue
        if group_id in lost or entry is None:
            entry = past.results.get(group_id, entry)
            entry = entry or GroupEntry(group_id, 1, step, State.WAITING)
        kept.append(_taken_over(entry, step, settings, results, report))
    kept.sort(key=_completed)
    _keep_what_can_be_trained(kept, settings, report)
    then = {
        "steps": step,
        "live": step,
        "training_step": None,
        "closed": +closed,
        "max_attempts": settings.max_attempts,
    }
    if end.newest_version > step or past.notes or past.last is None:
        then |= {"run_epoch": end.run_epoch + 1, "epoch_step": step}
    lost_steps = [tokens for after, tokens in past.weighed.items() if step < after <= end.steps]
    # the learner had finished it, and the queue had not heard
    if end.training_step is not None and end.training_step <= step:
        trained, masked = end.tokens.in_training(end.training)
        lost_steps.append((-trained, -masked))
    ledger = _started_again(end, then, kept, lost=lost_steps)
    report.ready = len(ledger.slots[State.READY])
    return ledger, report


def _completed(entry: GroupEntry) -> tuple[int, ...]:
    """Key that sorts ready groups as they were completed, which is as the journal has their
    results, and keeps all others as they are, before them.
    """
    return entry.place or () if entry.state == State.READY else ()


def _started_again(
    end: Ledger,
    then: Mapping[str, object],
    entries: Sequence[GroupEntry],
    *,
    lost: Sequence[tuple[int, int]] = (),
) -> Ledger:
    """Forget actors, counters of now and faults, which are of one start: mended data must not meet
    old failures. lost: tokens, with weight and without, of each step taken back; below 0 if
    trained.
    """
    fresh = {
        "over": False,
        "forfeited": [],
        "rejected_now": {},
        "failed_now": {},
        "failed": {},
        "failed_before": end.closed[State.FAILED],
        "totals": {name: count for name, count in end.totals.items() if name != "restarts"},
    }
    ledger = Ledger.from_snapshot({**end.snapshot(), **fresh, **then}, entries=entries)
    ledger.tokens.gone(end.forfeited, place="lost")
    ledger.tokens.taken_over(
        entries, trained=sum(tokens for tokens, _ in lost), masked=sum(tokens for _, tokens in lost)
    )
    return ledger


def _taken_over(
    entry: GroupEntry,
    step: int,
    settings: QueueSettings,
    results: Results | None,
    report: ResumeReport,
) -> GroupEntry:
    """Make a group ready if its result can be trained at `step`, otherwise waiting."""
    waiting = GroupEntry(
        entry.group_id, entry.attempt, step, State.WAITING, failures=entry.failures
    )
    if entry.place is None:
        report.again["in flight"] += 1
    elif results is None:
        report.again["completed under other settings or in another run's journal"] += 1
    elif entry.policy_version > step:  # known without reading: a long run may have lost many steps
        report.again["with tokens of lost learner steps"] += 1
    else:
        try:
            meta, frame = results.read(entry, max_bytes=settings.max_frame_bytes)
        except WireError:
            report.again["unreadable in the journal"] += 1
            return waiting
        if meta.max_version <= step:
            ready = replace(
                waiting, state=State.READY, policy_version=meta.policy_version, place=entry.place
            )
            ready.meta, ready.frame = meta, frame
            return ready
        report.again["with tokens of lost learner steps"] += 1
    return waiting


def _keep_what_can_be_trained(
    entries: list[GroupEntry], settings: QueueSettings, report: ResumeReport
) -> None:
    """With `wait`, reissue ready groups that a smaller bound or batch cannot train in time."""
    if settings.on_stale != "wait":
        return
    ready = [entry for entry in entries if entry.state == State.READY]
    in_time = settings.order_rule.in_time(
        sorted(Due(entry.policy_version, entry.group_id) for entry in ready),
        Others(waiting=[entry.group_id for entry in entries if entry.state == State.WAITING]),
        steps=settings.trained_steps,
    )
    for entry in ready:
        if entry.group_id not in in_time:
            report.again["too old for these settings"] += 1
            entry.state, entry.policy_version = State.WAITING, settings.trained_steps
            entry.meta = entry.frame = entry.place = None


def last_logged_step(run_dir: Path) -> int:
    """Read the newest learner step from the end of `metrics.jsonl`; 0 if there is none."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off: by the death of its writer, or at the beginning of the tail
        if "train/loss" in row:
            return int(row["step"])
    return 0


@dataclass(frozen=True)
class JournalSettings:
    """Where and how the queue keeps its journal; plain values that can be pickled.

    `start` names this start: opened again under it, the queue goes on; under another one it
    resumes, and under `<start>.<n>` it resumes for a learner that went back. `identity` names all
    that a result depends on but the weights: under another one, results are not taken over.
    `training` names what makes other weights of a batch: under another one, `lost_steps` are
    discarded, whatever was asked for; `reason` says why that was asked for. `fresh` deletes what is
    there.
    """

    directory: str
    start: str
    identity: str = ""
    training: str = ""
    reason: str = "checkpoint.on_lost_steps is discard"
    lost_steps: Literal["replay", "discard"] = "replay"
    fsync: Fsync = "group"
    segment_bytes: int = 2**28
    fresh: bool = False
    reached: int = 0
    """The newest learner step that the metrics have: one that the journal lacks is lost."""

    @classmethod
    def of(cls, config: Config, *, start: str, fingerprint: str) -> JournalSettings:
        """Read the settings from the run's configuration and data."""
        from async_grpo.config.resume import training_digest  # in the driver only

        checkpoint, asked = config.checkpoint, cls.reason
        named = checkpoint.resume_path is not None
        return cls(
            directory=str(Path(config.run.dir) / "journal"),
            start=start,
            identity=identity(config, fingerprint),
            training=training_digest(config),
            reason="checkpoint.resume names the checkpoint to go on from" if named else asked,
            lost_steps="discard" if named else checkpoint.on_lost_steps,
            fsync=config.replay.journal.fsync,
            fresh=checkpoint.resume == "never",
            reached=last_logged_step(Path(config.run.dir)),
        )


def identity(config: Config, fingerprint: str) -> str:
    """Digest all that a completed group depends on, except trained weights."""
    parts = {
        "seed": config.seed,
        "data": fingerprint,
        "model": config.model.model_dump(include={"path", "warm_start", "dtype"}),
        "task": config.task.model_dump(exclude=_NOT_OF_GROUPS),
        **({"tasks": _of_tasks(config)} if config.tasks else {}),
        **({"routes": "r3"} if config.learner.routing_replay == "r3" else {}),
        "baseline": config.algorithm.has_baseline,
        "rollout": config.rollout.model_dump(
            include={"group_size", "prompt_length", "response_length", "temperature"}
        )
        # those that older runs do not have count where they are set
        | config.rollout.model_dump(
            include={"turn_length", "context_length", "max_turns", "top_p", "top_k", "min_p"},
            exclude_defaults=True,
        ),
    }
    algorithm, distill = config.algorithm, config.algorithm.distill

    def model(name: str) -> Any:
        frozen = config.frozen.get(name)  # None: the policy itself
        return name if frozen is None else frozen.model_dump(include={"path", "dtype"})

    if teachers := [model(one) for one in distill.teachers]:
        parts["teacher"] = teachers[0]
        parts |= {"teachers": [distill.teachers, teachers]} if len(teachers) > 1 else {}
        parts |= {"top_k": distill.teacher_top_k} if distill.teacher_top_k else {}
        parts |= {"teacher_prompt": distill.teacher_prompt} if distill.teacher_prompt else {}
    if algorithm.sft_loss_coef:
        parts["sft"] = algorithm.sft_model and model(algorithm.sft_model)
    if judges := {key.removeprefix("task.judges."): one for key, one in config.judges.items()}:
        who = {"path", "dtype", "url", "served_name"}
        parts["judges"] = {
            name: [judge.model_dump(), config.frozen[judge.model].model_dump(include=who)]
            for name, judge in judges.items()
        }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _of_tasks(config: Config) -> dict[str, Any]:
    unlike = {*_NOT_OF_GROUPS, "filter_groups", "teacher", "after"}
    found = {name: one.model_dump(exclude=unlike) for name, one in config.tasks.items()}
    if all(len(one.weights) == 1 for one in config.tasks.values()):
        return found
    return found | {"groups of a step": config.rollout.rollout_batch_size}


def open_queue(
    settings: QueueSettings,
    journal: JournalSettings | None = None,
    *,
    snapshot: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReplayQueue:
    """Open the queue of a run: new, continued after its process died, or for
    `settings.trained_steps`.

    snapshot: what the checkpoint kept (`ReplayQueue.snapshot`, and the `beginnings` of responses).
    `queue.report` says what was taken over. Raises JournalError for a journal that cannot be read,
    SetupError for a snapshot of another learner step or format.
    """
    if snapshot is not None:
        _check_snapshot(snapshot, settings)
    if journal is None:
        if snapshot is None:
            return ReplayQueue(settings, clock=clock)
        ledger, report = roll_back(Past(snapshot), settings, why="there is no journal")
        ledger.tokens.new_actors(over=False)
        return ReplayQueue(settings, ledger=ledger, clock=clock, report=report)
    directory = Path(journal.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(
            f"the journal's directory {directory} cannot be made: {error.strerror or error}"
        ) from error
    opening = _Opening(settings, journal, directory, clock)
    beginnings = [PartialStart(*one) for one in (snapshot or {}).get("beginnings", ())]
    if (own := opening.own_segment()) is None:
        return opening.resume(snapshot, beginnings)
    return opening.go_on(own, beginnings if own.snapshot["start"] == journal.start else [])


@dataclass(frozen=True)
class _Opening:
    """Turns a journal into a queue again."""

    settings: QueueSettings
    journal: JournalSettings
    directory: Path
    clock: Callable[[], float]

    def own_segment(self) -> Segment | None:
        """Find the last segment, if this start of the run wrote it. Raises JournalDamage if this
        start wrote it and it cannot be read: the learner has gone on from what it says.
        """
        damage = None
        for number in reversed(segments(self.directory)):
            try:
                segment = Segment(self.directory, number)
            except JournalDamage as error:
                damage = damage or error
                continue
            if _process(segment.snapshot) != self.journal.start:
                return None
            if damage is not None:
                raise damage
            return segment
        return None

    def go_on(self, last: Segment, beginnings: list[PartialStart]) -> ReplayQueue:
        """Open the queue of a process that died: everything is as it was."""
        visitor, max_bytes = Visitor(last.snapshot), self.settings.max_frame_bytes
        read([Link(last, None)], visitor)
        ledger = visitor.ledger
        results, unreadable = Results(self.directory), []
        for entry in (*ledger.slots[State.READY].values(), *ledger.training.values()):
            try:
                entry.meta, entry.frame = results.read(entry, max_bytes=max_bytes)
            except WireError as error:
                if entry.state == State.TRAINING:
                    raise JournalError(
                        f"group {entry.group_id} of the learner step in training cannot be "
                        f"read from the journal: {error}"
                    ) from error
                unreadable.append(entry)
        ledger.totals["restarts"] += 1
        facts = {name: value for name, value in last.snapshot.items() if name != "ledger"}
        queue = self._queue(ledger, self._writer(last.number, last), facts, beginnings)
        for entry in unreadable:
            queue.record(Drop(entry.group_id, entry.attempt))
        return queue

    def resume(
        self, snapshot: dict[str, Any] | None, beginnings: list[PartialStart]
    ) -> ReplayQueue:
        """Open the queue of another start; without a fitting journal, all is generated again."""
        settings, journal, numbers = self.settings, self.journal, segments(self.directory)
        past, note, step = None, "", settings.trained_steps
        if numbers and not journal.fresh:
            past, note = find_past(self.directory, snapshot, step=step, identity=journal.identity)
        facts = snapshot_facts(
            journal.identity, journal.training, start=journal.start, from_step=step
        )
        ledger = report = None
        continued: list[PartialStart] = []
        if past is not None:
            facts |= {"journal": past.snapshot["journal"], "epoch": past.snapshot["epoch"] + 1}
            ledger, report, continued = self._taken_up(past, beginnings)
        elif snapshot is not None:
            facts["epoch"] = snapshot["epoch"] + 1
            ledger, report = roll_back(Past(snapshot), settings, why="")
        if report is not None:
            known = report.rolls_to or step
            report.lost_steps = max(report.lost_steps, journal.reached - known)
        if ledger is not None and (past is None or _process(past.snapshot) != _process(facts)):
            ledger.tokens.new_actors(over=past is not None and past.ledger.over)
        if note:
            report = report or ResumeReport()
            report.note = note
        writer = self._writer(max(numbers, default=0), None if past is None else past.last)
        if journal.fresh:
            writer.remove(set(numbers))
        queue = self._queue(ledger, writer, facts, continued)
        queue.report, queue.rolls_to = report, None if report is None else report.rolls_to
        return queue

    def _taken_up(
        self, past: Past, beginnings: list[PartialStart]
    ) -> tuple[Ledger, ResumeReport, list[PartialStart]]:
        """Rebuild the ledger; the summary, and the partial rollouts that continue."""
        same = past.snapshot["identity"] == self.journal.identity
        settings, results = self.settings, Results(self.directory) if same else None
        step = settings.trained_steps
        until, why = self._way_forward(past, results)
        if results is not None and until > step and not why:
            ledger, report = roll_forward(past, settings, results)
        else:  # to the last step before what cannot be trained again
            there = replace(settings, trained_steps=until)
            ledger, report = roll_back(past, there, results=results, why=why)
            if until > step:
                report.from_step, report.rolls_to = step, until
                report.rolled = until - step
        if not same:  # they are of other problems
            for of_problems in (ledger.rates, ledger.mixed, ledger.accuracies, ledger.owed):
                of_problems.clear()
        if not beginnings or results is None:
            return ledger, report, []
        free, end = free_again(settings, ledger), past.ledger
        continued, useless = choose(beginnings, ledger, end=end, settings=settings, free=free)
        report.continued = told(continued, useless)
        return ledger, report, continued

    def _way_forward(self, past: Past, results: Results | None) -> tuple[int, str]:
        """Find the step to which the run rolls forward, and why it goes no further, or ""."""
        newest, step = past.ledger.newest_version, self.settings.trained_steps
        if newest <= step:
            return step, ""
        if self.journal.lost_steps == "discard":
            return step, self.journal.reason
        if results is None:
            return step, "they were trained under another model, data or sampling"
        if past.snapshot["training"] != self.journal.training:
            return step, "settings of training have changed since"
        if past.snapshot["rolled_to"] == newest:
            return step, f"the run ended twice at learner step {newest}"
        return obstacle(past, self.settings, results)

    def _writer(self, number: int, last: Segment | None) -> Writer:
        """Continue after what was read of `last`, in segments after `number`."""
        return Writer(
            self.directory,
            fsync=self.journal.fsync,
            segment_bytes=self.journal.segment_bytes,
            clock=self.clock,
            segment=number,
            sequence=0 if last is None else last.sequence,
            parent=None if last is None else last.number,
        )

    def _queue(
        self,
        ledger: Ledger | None,
        writer: Writer,
        facts: dict[str, Any],
        continued: list[PartialStart],
    ) -> ReplayQueue:
        if ledger is not None:
            for entry in ledger.slots[State.READY].values():
                entry.ready_at = self.clock()
            for entry in ledger.slots[State.IN_FLIGHT].values():
                entry.issued_at = self.clock()
        queue = ReplayQueue(
            self.settings,
            ledger=ledger,
            journal=writer,
            facts=facts,
            clock=self.clock,
            continued=continued,
        )
        queue.begin_segment()
        return queue


def _process(facts: dict[str, Any]) -> str:
    """Name the start of the whole run: a learner that went back keeps the actors."""
    return str(facts["start"]).partition(".")[0]


def _check_snapshot(snapshot: dict[str, Any], settings: QueueSettings) -> None:
    if snapshot.get("format") != JOURNAL_FORMAT:
        raise SetupError(
            f"the checkpoint's queue is of format {snapshot.get('format')}, this program "
            f"reads {JOURNAL_FORMAT}: continue the run with the version that wrote it"
        )
    steps = (snapshot["ledger"]["steps"], snapshot["ledger"]["training_step"])
    if settings.trained_steps not in steps:
        raise SetupError(
            f"the checkpoint's queue is of step {steps[0]} (in training: {steps[1]}) and the "
            f"learner of step {settings.trained_steps}: they are not from the same checkpoint; "
            "name another one (checkpoint.resume)"
        )
