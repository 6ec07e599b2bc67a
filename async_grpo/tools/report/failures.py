"""What failed, by reason, and which episodes were the slowest.

Runs in: the report's process. Hides where it comes from: counters of the newest step, and the
frames of the newest groups in the journal, which know when each episode ended.
"""

from __future__ import annotations

from typing import NamedTuple

from async_grpo.errors import RunError
from async_grpo.replay.history import Stretch
from async_grpo.replay.journal import segments
from async_grpo.tools.report.data import RunData
from async_grpo.wire.codec import WireError
from async_grpo.wire.groups import EPISODE_END, GroupMeta, joined

GROUPS, SHOWN = 3000, 10
"""Newest groups that are looked at, and episodes that are shown."""
_ENVIRONMENT, _VERIFIER = "rollout/environment_failures/", "rollout/verifier_errors_"
_REQUESTS = "rollout/requests/"
_MEANING = {
    "timeout": "took longer than its deadline (environment.step_timeout_s, reset_timeout_s)",
    "crash": "its process ended, or said nothing any more",
    "memory": "used more than environment.memory_mb",
    "exception": "an exception, or a program that ended with another status than 0",
    "wrong_type": "an answer that is none, or a reward that nobody knows",
    "not_sendable": "an answer that cannot be sent",
    "start": "its process could not be started",
    "closed": "the run ended",
    "replay": "could not be put back to where it was before a resume",
    "silent": "ended without asking the policy",
    "lease": "its worker said nothing for task.options.lease_s",
    "no_worker": "no worker asked for work within task.options.wait_s",
}
_STATUS = {
    "400": "no room left, or a request that the policy cannot answer",
    "401": "a key of no episode, or of one that has ended",
    "408": "a body that did not come",
    "409": "a second result",
    "413": "larger than endpoint.body_mb",
    "429": "more than endpoint.requests or endpoint.per_minute",
    "503": "the engine failed",
    "left": "the client went away before its answer",
}


class SlowEpisode(NamedTuple):
    """An episode: seconds from its ticket to its end, and what it said meanwhile."""

    seconds: float
    group_id: int
    number: int
    turns: int
    sampled: int
    finish_reason: str
    verdict: float | None
    actor_id: str


def failures(data: RunData) -> list[tuple[str, str, str]]:
    """List (kind, how often, what it means) of what failed, the most frequent first."""
    found: list[tuple[float, str, str]] = []
    for name, count in data.totals.items():
        if not count:
            continue
        if name.startswith(_ENVIRONMENT):
            reason = name.removeprefix(_ENVIRONMENT)
            found.append((count, f"episode: {reason}", _MEANING.get(reason, "")))
        elif name.startswith(_VERIFIER):
            found.append((count, f"verifier: {name.removeprefix(_VERIFIER)}", ""))
        elif (status := name.removeprefix(_REQUESTS)) in _STATUS and status != name:
            found.append((count, f"request: {status}", _STATUS[status]))
    return [(kind, f"{count:,.0f}", what) for count, kind, what in sorted(found, reverse=True)]


def slowest(data: RunData) -> list[SlowEpisode]:
    """Find the slowest of the newest episodes, the slowest first; none where there is no journal,
    or where responses are plain.
    """
    journal = data.directory / "journal"
    if not data.rows or not segments(journal):
        return []
    batch = int(data.setting("rollout.rollout_batch_size") or 1)
    last = data.rows[-1].step
    try:
        stretch = Stretch(journal, first=max(1, last - GROUPS // batch + 1), last=last)
    except RunError:
        return []  # the timeline says why
    found: list[SlowEpisode] = []
    for group_id in sorted(stretch.groups)[-GROUPS:]:
        try:
            meta = stretch.meta(group_id)
        except WireError:
            continue  # damaged: the replay command says so
        if meta is not None:
            found += _episodes(meta)
    return sorted(found, key=lambda one: -one.seconds)[:SHOWN]


def _episodes(meta: GroupMeta) -> list[SlowEpisode]:
    begun = meta.times.get("queued")
    if begun is None:
        return []
    found = []
    for number, places in enumerate(meta.places):
        ended = meta.times.get(f"{EPISODE_END}{number}")
        if ended is not None:
            row = joined([meta.rows[place] for place in places])
            said = (row.turns, row.length, row.finish_reason, row.verdict, meta.actor_id)
            found.append(SlowEpisode(ended - begun, meta.group_id, number, *said))
    return found
