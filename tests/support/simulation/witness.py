"""What a simulated run knows by itself of tickets, results and batches: the queue is checked
against it.

Runs in: simulations. Hides the rules of the queue, written down a second time
and more simply than the queue has them. Every check raises AssertionError.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from async_grpo.wire.groups import Batch, GroupTicket
from tests.support.simulation.scenario import LOST, STATES, Job, Scenario


@dataclass(frozen=True, slots=True)
class Completed:
    """A completed group, the `completed`-th of the run: its tokens to train by version, and the
    oldest version of all (the baseline's too).
    """

    key: tuple[int, int]
    policy_version: int
    completed: int
    frame: bytes
    versions: Counter[int]
    oldest: int


class Witness:
    """Its own account of tickets, results and batches, against which the queue is checked."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.capacity = (scenario.max_staleness + 1) * scenario.rollout_batch_size
        self.base = self.live = 0
        self.tickets: dict[int, tuple[GroupTicket, str, float]] = {}
        """The latest ticket of every id, whose it is, and since when."""
        self.taken_away: set[tuple[int, int]] = set()
        self.expired: set[tuple[int, int]] = set()
        self.ready: dict[int, Completed] = {}
        self.done: dict[tuple[int, int], Completed] = {}
        self.trained: dict[int, int] = {}
        self.retired: set[int] = set()
        self.lost: set[int] = set()
        self.next_id = 0
        self.seen: Counter[str] = Counter()

    def issued(self, actor: str, tickets: list[GroupTicket], *, now: float) -> None:
        """Every ticket is new, or the next attempt, or one that this actor was given before; gaps
        between ids are retired problems.
        """
        for ticket in tickets:
            before, holder, _ = self.tickets.get(ticket.group_id, (None, "", 0.0))
            if ticket == before:
                assert holder == actor, f"{ticket} is {holder}'s and was given to {actor}"
                continue
            assert ticket.attempt == (1 if before is None else before.attempt + 1), (
                f"{ticket} after {before}"
            )
            assert ticket.policy_version == self.live, f"{ticket} while {self.live} is live"
            assert ticket.group_id not in self.ready and ticket.group_id not in self.trained, (
                f"{ticket} is done already"
            )
            self.tickets[ticket.group_id] = (ticket, actor, now)
            if before is None:
                self.pass_over(range(self.next_id, ticket.group_id))
                assert (
                    not self.scenario.problems
                    or self.scenario.problem(ticket.group_id) not in self.retired
                ), f"{ticket} is retired"
                self.next_id = ticket.group_id + 1

    def pass_over(self, group_ids: range) -> None:
        """Ids that nobody was given."""
        for group_id in group_ids:
            retired = self.scenario.problems and self.scenario.problem(group_id) in self.retired
            assert retired or self.scenario.weights, f"id {group_id} was never given out"
            self.seen["skipped"] += 1

    def answered(self, job: Job, status: str, *, frame: bytes, rejected: bool, now: float) -> None:
        """Check the verdict on a well-formed group that was put for the first time."""
        latest, _, since = self.tickets[job.ticket.group_id]
        timeout = self.scenario.ticket_timeout_s
        overdue = timeout is not None and (latest != job.ticket or now - since > timeout)
        if status == "late":
            assert job.key in self.taken_away or overdue, (
                f"{job.key} is late and was not taken away"
            )
            self.seen["late" if job.key in self.taken_away else "overdue"] += 1
            return
        assert job.key not in self.taken_away, f"{job.key} was taken away and is {status}"
        assert status == ("rejected" if rejected else "accepted"), f"{job.key} is {status}"
        self.seen[status] += 1
        if self.scenario.problems and (1.0 if rejected else 0.5) >= self.scenario.retire_at:
            self.retired.add(self.scenario.problem(job.ticket.group_id))
        if rejected:
            return
        rows = [
            Counter({span.policy_version: span.end - span.start for span in one.spans()})
            for one in job.rollouts
        ]
        self.seen["spans"] += any(len(row) > 1 for row in rows)
        versions, oldest = sum(rows[: self.scenario.group_size], Counter()), min(map(min, rows))
        self.ready[job.key[0]] = self.done[job.key] = Completed(
            job.key, job.ticket.policy_version, len(self.done), frame, versions, oldest
        )

    def order_key(self, group: Completed) -> tuple[int, ...]:
        """Whatever died meanwhile, `ready` is the order of completion."""
        keys = {
            "oldest": (group.policy_version, *group.key),
            "fifo": group.key,
            "ready": (group.completed,),
        }
        return keys[self.scenario.order]

    def age(self, step: int) -> None:
        """Let groups expire that are too old for `step`, when it is asked for."""
        mode, oldest = self.scenario.on_stale, step - 1 - self.scenario.max_staleness
        for group in list(self.ready.values()):
            if (
                mode != "wait"
                and (max(group.versions) if mode == "mask" else group.oldest) < oldest
            ):
                del self.ready[group.key[0]]
                self.expired.add(group.key)
                self.seen["expired"] += 1

    def no_batch(self, step: int) -> None:
        """Check that there was a reason to wait."""
        self.age(step)
        if self.scenario.on_stale != "wait":
            assert len(self.ready) < self.scenario.rollout_batch_size, (
                f"step {step} waits and {len(self.ready)} groups are ready"
            )

    def batch(self, batch: Batch, frames: list[bytes]) -> Counter[int]:
        """Check that the batch is the first R of the order, once each, with the bytes that were
        put. Returns the tokens by lag.
        """
        size, bound = self.scenario.rollout_batch_size, self.scenario.max_staleness
        self.age(batch.step)
        first = sorted(self.ready.values(), key=self.order_key)[:size]
        ids = [group.group_id for group in batch.groups]
        expected = sorted(group.key[0] for group in first)
        assert ids == expected and len(ids) == size, (
            f"step {batch.step} has {ids}, the order says {expected}"
        )
        lags: Counter[int] = Counter()
        for group_id, frame in zip(ids, frames, strict=True):
            assert group_id not in self.trained, (
                f"{group_id} is trained by steps {self.trained[group_id]} and {batch.step}"
            )
            group = self.ready.pop(group_id)
            self.trained[group_id] = batch.step
            assert frame == group.frame, f"{group_id} is not what was put"
            lag = (
                batch.step
                - 1
                - (max(group.versions) if self.scenario.on_stale == "mask" else group.oldest)
            )
            assert lag <= bound, f"step {batch.step} trains group {group_id} at lag {lag}"
            lags.update(
                {batch.step - 1 - version: count for version, count in group.versions.items()}
            )
        assert min(lags) >= 0, f"step {batch.step} has tokens of later versions: {lags}"
        return lags

    def ledger(self, counts: dict[str, int]) -> None:
        """States sum to the ids issued, and fit into B."""
        assert all(counts[state] >= 0 for state in STATES)
        total = sum(counts[state] for state in STATES)
        assert total >= self.next_id and total - counts["skipped"] == len(self.tickets), (
            f"{len(self.tickets)} ids given, {counts}"
        )
        retiring = counts["trained"] - self.live * self.scenario.rollout_batch_size
        under_way = counts["in_flight"] + counts["ready"] + counts["training"] + retiring
        assert retiring >= 0 and under_way <= self.capacity, f"{under_way} outstanding: {counts}"
        assert counts["ready"] == len(self.ready), f"{sorted(self.ready)} should be ready: {counts}"
        assert counts["expirations"] == self.seen["expired"], (
            f"{self.seen['expired']} should have expired: {counts}"
        )

    def shares(self, states: dict[int, str], owed: Counter[str]) -> None:
        """Groups that are not lost, with those that lost ones still owe, are of the first tasks of
        the order. states: of the ids that the queue remembers.
        """
        quotas = self.scenario.quotas
        self.lost |= {group_id for group_id, state in states.items() if state in LOST}
        kept = Counter(quotas[group_id] for group_id in self.tickets.keys() - self.lost)
        order = Counter(quotas[place] for place in range(kept.total() + owed.total()))
        assert kept + owed == order, f"{kept} and {owed} owed, instead of {order}"
        self.seen["owed"] += owed.total() > 0

    def restart(self, step: int, open_ids: dict[int, str]) -> None:
        """Start the run again after `step` steps, while these ids are open. What the lost steps
        trained must be among them.
        """
        lost = {group_id for group_id, at in self.trained.items() if at > step}
        self.seen["put_back"] += len(lost)
        self.base = self.live = step
        self.trained = {group_id: at for group_id, at in self.trained.items() if at <= step}
        assert lost <= open_ids.keys(), (
            f"{lost} were trained after step {step}, open are {open_ids}"
        )
        assert not open_ids.keys() & self.trained.keys(), (
            f"open are {open_ids}, trained are {self.trained}"
        )
        self.ready = {}
        for group_id, state in open_ids.items():
            ticket = self.tickets[group_id][0]
            if state == "ready":
                self.ready[group_id] = self.done[group_id, ticket.attempt]
                assert max(self.ready[group_id].versions) <= step, (
                    f"{group_id} has tokens of versions that are gone"
                )
            else:
                assert state == "waiting", f"{group_id} is {state} at the start of a run"
                self.taken_away.add((group_id, ticket.attempt))
