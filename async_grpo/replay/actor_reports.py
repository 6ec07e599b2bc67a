"""What rollout actors report: tokens, seconds and counters of their processes.

Runs in: rollout actors, which make reports; the replay queue's process, which keeps the latest one
of every actor and journals the tokens; the driver, which logs the numbers. No other way leads from
an actor to a metric:

    rollout actor --acquire(report)--> queue: ActorReports --QueueMetrics--> driver: ActorReports
                  --final_report, once the queue is closed--> driver --tell--> queue

Hides that a slot may have had several processes: the time between the last report of one and the
first work of its successor is `restarting`, as soon as the successor reports.

Invariants: a report holds running totals since the process began and replaces the one before, so a
report that is lost does no harm; the last report of a dead actor still counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from async_grpo.runtime.time_ledger import ENGINE_CAUSES

TimeTotals = tuple[float, dict[str, float]]
"""When an engine's time began to count (Unix seconds), and its seconds by cause."""


class TokenTotals(NamedTuple):
    """Tokens of one actor's process so far. continued: of partial responses from a checkpoint.
    reprefilled: cached tokens that were computed again after publications.
    """

    sampled: int = 0
    probes: int = 0
    evaluated: int = 0
    continued: int = 0
    reprefilled: int = 0


class ActorReport(NamedTuple):
    """Running totals of one actor's process. began: when its time began to count (Unix seconds,
    0.0: not yet). seconds: by cause. counters: by name, groups and verifier errors among them.
    errors: the first verifier error of every kind, as (kind, text).
    """

    tokens: TokenTotals
    began: float = 0.0
    seconds: tuple[tuple[str, float], ...] = ()
    counters: tuple[tuple[str, float], ...] = ()
    errors: tuple[tuple[str, str], ...] = ()


class QueueMetrics(NamedTuple):
    """Metrics of the queue, and the latest report of every actor that it heard."""

    metrics: dict[str, float]
    reports: dict[str, ActorReport]


class ActorReports:
    """The latest report of every actor, dead ones included."""

    def __init__(self) -> None:
        self.latest: dict[str, ActorReport] = {}

    def tell(self, actor_id: str, report: ActorReport) -> None:
        """Keep a report, unless a later one (totals never fall) is here already."""
        known = self.latest.get(actor_id)
        if known is None or report.tokens.sampled >= known.tokens.sampled:
            self.latest[actor_id] = report

    def news(self, known: Mapping[str, TokenTotals]) -> tuple[tuple[Any, ...], ...]:
        """Rows of a `Sampled` event: token totals that differ from the `known` ones."""
        return tuple(
            (actor_id, *report.tokens)
            for actor_id, report in self.latest.items()
            if known.get(actor_id) != report.tokens
        )

    def verifier_errors(self) -> dict[str, str]:
        """Kinds of verifier errors, each with the text of the newest error at some actor."""
        return dict(error for report in self.latest.values() for error in report.errors)

    def engine_times(self) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """`engine_times` of all actors whose time counts."""
        return engine_times(
            {
                actor_id: (report.began, dict(report.seconds))
                for actor_id, report in self.latest.items()
                if report.began
            }
        )

    def metrics(self) -> dict[str, float]:
        """`time/engine/...` (means over slots), and the counters of `rollout/...` and the speeds of
        engines (sums).
        """
        total: Counter[str] = Counter()
        for report in self.latest.values():
            total.update(dict(report.counters))
        kinds = sorted(name for name in total if name.startswith("verifier_errors_"))
        counters = {name: name for name in ("continued_tokens", "verifier_errors", *kinds)}
        counters["attempts_failed"] = "failed"
        if total.get("kept_overflows"):
            counters["kept_overflows"] = "kept_overflows"
        for name in sorted(total):
            _, is_failure, reason = name.partition("environment_")
            if is_failure:
                counters[f"environment_failures/{reason}"] = name
        counted = {f"rollout/{name}": float(total[known]) for name, known in counters.items()}
        return self.engine_times()[0] | counted | _of_episodes(total) | _speeds(total)


def _speeds(total: Mapping[str, float]) -> dict[str, float]:
    """Measure what engines and verifiers take: `engine/<size>/s`, `tokens` and `steps`, by how many
    responses ran at most, and seconds of a verifier for a response, of a teacher and of judges for
    a group.
    """
    split = ((name.split("_"), value) for name, value in total.items())
    found = {
        f"engine/{parts[1]}/{parts[2]}": float(value)
        for parts, value in split
        if parts[0] == "engine"
    }
    if total.get("verified"):
        found["rollout/verifier_s"] = total["verifying_s"] / total["verified"]
    if total.get("judged"):
        found["rollout/judge_s"] = total["judging_ms"] / 1000 / total["judged"]
    if total.get("taught"):
        found["rollout/teacher_s"] = total["teaching_ms"] / 1000 / total["taught"]
    return found


def _of_episodes(total: Mapping[str, float]) -> dict[str, float]:
    """Measure what rollout actors count in episodes; nothing where there are none."""
    if "turns" not in total:
        return {}
    ended = sum(count for name, count in total.items() if name.startswith("episodes_")) or 1
    waited_s = total.get("waited_ms", 0) / 1000
    found = {"forks": total.get("forks", 0), "environment_s": waited_s / ended}
    for name, value in total.items():
        kind, _, rest = name.partition("_")
        if kind == "prefilled":
            found[f"context_prefilled/{rest}"] = value
        elif kind == "seen":
            found[f"environment/{rest}"] = value / ended
        elif kind in ("forks", "requests") and rest:
            found[f"{kind}/{rest}"] = value
        elif name == "turns_unread":
            found[name] = value
    return {f"rollout/{name}": float(value) for name, value in sorted(found.items())}


def engine_times(
    spent: Mapping[str, TimeTotals],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Average `time/engine/...` over all slots; seconds by cause of each slot (`actor-<slot>`)."""
    slots: dict[str, list[TimeTotals]] = {}
    for actor_id, one in spent.items():
        slots.setdefault(actor_id.partition(".")[0], []).append(one)
    seconds = {
        name: _of_slot(sorted(processes, key=lambda one: one[0]))
        for name, processes in sorted(slots.items())
    }
    if not seconds:
        return {}, {}
    return {
        f"time/engine/{cause}": sum(one[cause] for one in seconds.values()) / len(seconds)
        for cause in ENGINE_CAUSES
    }, seconds


def _of_slot(processes: Sequence[TimeTotals]) -> dict[str, float]:
    out, until = dict.fromkeys(ENGINE_CAUSES, 0.0), processes[0][0]
    for began, seconds in processes:
        out["restarting"] += max(began - until, 0.0)
        for cause, value in seconds.items():
            out[cause] += value
        until = began + sum(seconds.values())
    return out
