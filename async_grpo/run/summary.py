"""The closing table of a run: what was learnt, what it cost, and where to go on.

Runs in: the driver, while the trainer still runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.algo.accuracy import powers_of_two
from async_grpo.replay.token_ledger import PLACES
from async_grpo.run.run_log import nothing_to_learn
from async_grpo.runtime.text import counted, duration
from async_grpo.runtime.time_ledger import LearnerTime

if TYPE_CHECKING:
    from async_grpo.run.loop import Loop
    from async_grpo.run.system import System
    from async_grpo.run.trainer import Trainer


def summarise(trainer: Trainer, checkpoint: Path) -> list[tuple[str, str]]:
    """Write the rows (label, text) of the closing table, while the trainer still runs."""
    rows = [*_accuracy(trainer), *_training(trainer)]
    rows += goodput(trainer.system.loop.latest, scope=scope(trainer, "whole run"))
    if trainer.bottleneck is not None:
        rows.append(("bottleneck", trainer.bottleneck.text))
    return [*rows, *_checks_and_faults(trainer.system), *_next_steps(trainer, checkpoint)]


def described(rows: list[tuple[str, str]]) -> str:
    """Write the closing table as Markdown, for the page of the run in MLflow, but for the account
    of tokens, which ends with the run and is a metric there.
    """
    kept = (row for row in rows if not row[0].startswith("goodput"))
    return "\n".join(f"- **{label}**: {text}" for label, text in kept)


def goodput(metrics: Mapping[str, float], *, scope: str = "") -> list[tuple[str, str]]:
    """Say what became of the tokens, largest parts first: a row, or none where none is known."""
    if "goodput/generated" not in metrics:
        return []
    generated = max(metrics["goodput/generated"], 1.0)
    shares = [(metrics[f"goodput/{place}"] / generated, place) for place in PLACES]
    largest = sorted(((share, place) for share, place in shares if share >= 0.001), reverse=True)
    text = ", ".join(f"{share:.1%} {place}" for share, place in largest)
    return [(f"goodput{scope}", f"{generated:,.0f} tokens generated: {text}")]


def _training(trainer: Trainer) -> list[tuple[str, str]]:
    """Say what was trained, how old it was, and what took the learner's time."""
    loop, times = trainer.system.loop, trainer.system.coordinator.times
    steps, spent = len(loop.durations), LearnerTime.between({}, loop.latest, tokens=loop.tokens)
    seconds = max(spent.total, 1e-9)
    rows = [
        ("score", _scores(loop)),
        (
            "learner steps",
            f"{steps} in {duration(seconds)} ({seconds / max(steps, 1):.2f} s each); "
            f"{trainer.steps_done} of {trainer.total_steps} in all",
        ),
        (
            "tokens trained",
            f"{loop.tokens:,} response tokens, {spent.tokens_per_s:,.0f} per second, evaluations "
            "included",
        ),
        (
            "staleness",
            f"mean {loop.lag_sum / max(steps, 1):.2f}, largest "
            f"{counted(loop.lag_max, 'learner step')} "
            f"(bound {trainer.config.replay.max_staleness})",
        ),
        (
            "weight syncs",
            f"{times.count}; the learner waited {times.learner_waited / seconds:.1%} of "
            "its time for them",
        ),
        ("learner time", _learner_time(spent)),
    ]
    rows = [(label + scope(trainer, "this start"), text) for label, text in rows]
    dropped = _dropped(loop.latest)
    return [*rows, ("groups dropped", dropped)] if dropped else rows


def _scores(loop: Loop) -> str:
    """Say how the reward went, from the first tenth of the steps to the last."""
    if not loop.scores:
        return "no step was trained"
    part = max(1, len(loop.scores) // 10)
    first, last = (sum(some) / part for some in (loop.scores[:part], loop.scores[-part:]))
    flat = "; the last step had nothing to learn from: no response better than its group's others"
    means = "mean reward of the first and of the last tenth of the steps"
    return f"{first:.2f} -> {last:.2f}: {means}" + flat * nothing_to_learn(loop.latest)


def _learner_time(spent: LearnerTime) -> str:
    """Write the shares of the learner's time, which add up to 100 % but for rounding."""
    named = {
        "training": spent.share("working"),
        "waiting for groups": spent.idle,
        "evaluating": spent.share("evaluating"),
    }
    shown = [f"{share:.0%} {what}" for what, share in named.items() if share or what == "training"]
    other = 1 - sum(named.values())
    return ", ".join(shown + [f"{other:.0%} other"] * (other >= 0.005))


def scope(trainer: Trainer, scope: str) -> str:
    """Say what a number is of, where a run was resumed and there are two answers."""
    return f", {scope}" if trainer.resumed_at else ""


def _checks_and_faults(system: System) -> list[tuple[str, str]]:
    """Write a row for every kind of check that was made, and of fault that was survived."""
    checks, times = system.coordinator.weight_metrics(), system.coordinator.times
    errors = [
        f"{system.loop.latest.get(f'rollout/verifier_errors_{kind}', 1.0):.0f} x {text}"
        for kind, text in system.verifier_errors.told.items()
    ]
    rows = [
        (errors, "verifier errors", "; ".join(errors)),
        (
            checks["weights/probes"],
            "weights checked",
            f"{counted(checks['weights/probes'], 'time')} while training; log-probs of engines and "
            f"learner differ by {checks['weights/drift']:.1e} at most",
        ),
        (
            times.caches_kept or times.caches_recomputed,
            "KV caches",
            f"kept {counted(times.caches_kept, 'time')}, computed again "
            f"{counted(times.caches_recomputed, 'time')}",
        ),
        (
            times.repeated or times.dropped,
            "weight sync faults",
            f"{times.repeated} transfers repeated, {times.dropped} engines dropped",
        ),
        (
            replaced := system.actors.budget.restarts,
            "restarts",
            f"{replaced} rollout actors replaced",
        ),
        (
            system.queue_restarts,
            "queue restarts",
            f"{system.queue_restarts}; the replay queue's process continued from its journal",
        ),
        (
            learner := system.supervisor.restarts,
            "learner restarts",
            f"{learner}; its ranks repeated the recorded steps after a checkpoint",
        ),
    ]
    return [(label, text) for happened, label, text in rows if happened]


def _next_steps(trainer: Trainer, checkpoint: Path) -> list[tuple[str, str]]:
    """Say where the results are, and with which commands to go on."""
    config, tracker = trainer.config, trainer.tracker
    run_dir = str(trainer.run_dir)
    rows = [("checkpoint", f"{checkpoint} (Hugging Face format in hf/)")]
    if tracker is not None:
        rows += tracker.summary.items()
    if config.replay.journal.enable:
        shows = "shows what was generated and trained"
        rows.append(("groups", f"async-grpo inspect {shlex.quote(run_dir)} {shows}"))
    again = shlex.quote(f"{run_dir}/config.yaml") + _longer(trainer)
    rows.append(("next", f"async-grpo train {again} continues this run"))
    return rows


def _dropped(metrics: Mapping[str, float]) -> str:
    """Count the groups that were not trained, by what became of them; "" where there are none."""
    prefix = "replay/rejected/"
    counts = {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
    reasons = sorted(counts.items(), key=lambda one: -one[1])
    why = ", ".join(f"{count:,.0f} {reason}" for reason, count in reasons if count)
    parts = [
        f"{metrics[f'replay/{state}']:,.0f} {state}"
        + (f" ({why})" if state == "rejected" and why else "")
        for state in ("rejected", "expired", "failed", "skipped")
        if metrics.get(f"replay/{state}")
    ]
    return "; ".join(parts)


def _longer(trainer: Trainer) -> str:
    """Write the override with which a finished run goes on; none for one stopped early."""
    run = trainer.config.run
    if trainer.steps_done < trainer.total_steps:
        return ""
    if run.total_steps is not None:
        return f" run.total_steps={2 * run.total_steps}"
    return f" run.epochs={2 * (run.epochs or 1)}"


def _accuracy(trainer: Trainer) -> list[tuple[str, str]]:
    if not trainer.evaluations:
        return []
    (first, before), (last, after) = trainer.evaluations[0], trainer.evaluations[-1]
    rows = []
    n, other = trainer.config.evaluation.n, trainer.config.evaluation.task
    keys = [
        ("eval/accuracy_greedy", "held-out accuracy, greedy"),
        ("eval/pass_at_1", "held-out accuracy, sampled"),
    ]
    keys += [(f"eval/pass_at_{k}", f"held-out pass@{k}") for k in list(powers_of_two(n))[1:][-1:]]
    for key, label in keys:
        if key in after:
            change = f"{before[key]:.1%} -> " if last != first and key in before else ""
            rows.append((label, f"{change}{after[key]:.1%} after step {last}"))
    for name in trainer.config.tasks:
        if (key := f"eval/task/{name}/accuracy_greedy") in after:
            change = f"{before[key]:.1%} -> " if last != first and key in before else ""
            rows.append((f"  {name}", f"{change}{after[key]:.1%}"))
    whose = "none of them in training" if other is None else f"of task {other.name}"
    return [*rows, ("held-out problems", f"{after['eval/problems']:.0f}, {whose}")]
