"""What a finished run tells the person who started it.

Runs in: the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.accuracy import powers_of_two
from async_grpo.replay.tokens import PLACES

if TYPE_CHECKING:
    from async_grpo.trainer import Trainer


def summarise(trainer: Trainer, checkpoint: Path) -> list[tuple[str, str]]:
    """Rows (label, text) of the closing table, from the running trainer and its last checkpoint."""
    system, config = trainer.system, trainer.config
    loop, times = system.loop, system.coordinator.times
    rows = _accuracy(trainer)
    steps, seconds = len(loop.durations), max(trainer.rl_seconds, 1e-9)
    rows += [
        (
            "learner steps",
            f"{steps} in {seconds:.0f} s ({seconds / max(steps, 1):.2f} s each); {trainer.steps_done} of {trainer.total_steps} in all",
        ),
        ("tokens trained", f"{loop.tokens:,} response tokens, {loop.tokens / seconds:,.0f} per second"),
        (
            "staleness",
            f"mean {loop.lag_sum / max(steps, 1):.2f}, largest {loop.lag_max:.0f} learner steps (bound {config.replay.max_staleness})",
        ),
        ("publications", f"{times.count}; the learner waited {times.learner_waited / seconds:.1%} of its time for them"),
        ("learner time", f"{loop.seconds['train'] / seconds:.0%} training, {loop.seconds['wait'] / seconds:.0%} waiting for groups"),
    ]
    rows += goodput(loop.latest)
    if trainer.verdict is not None:
        rows.append(("verdict", trainer.verdict.text))
    checks = system.coordinator.measurements()
    if checks["weights/probes"]:
        rows.append((
            "weights checked", f"{checks['weights/probes']:.0f} times while training; engines and learner differ by {checks['weights/drift']:.1e} at most"
        ))
    if times.repeated or times.dropped:
        rows.append(("publication faults", f"{times.repeated} transfers repeated, {times.dropped} engines dropped"))
    if system.actors.restarts:
        rows.append(("restarts", f"{system.actors.restarts} rollout actors replaced"))
    if system.queue_restarts:
        rows.append(("queue restarts", f"{system.queue_restarts}; the replay queue's process went on from its journal"))
    if system.gang.restarts:
        rows.append(("learner restarts", f"{system.gang.restarts}; its ranks repeated the recorded steps after a checkpoint"))
    rows.append(("checkpoint", f"{checkpoint} (Hugging Face format in hf/)"))
    if trainer.tracker is not None and trainer.tracker.summary is not None:
        rows.append(("MLflow", trainer.tracker.summary))
    if config.replay.journal.enable:
        rows.append(("groups", f"python -m async_grpo.replay {trainer.run_dir} shows what was generated and trained"))
    rows.append(("next", f"python -m async_grpo.run {trainer.run_dir}/config.yaml{_longer(trainer)} continues this run"))
    if config.replay.max_staleness:
        rows.append(("to compare", "the same run with replay.max_staleness=0 is synchronous: engines and learner take turns"))
    return rows


def _longer(trainer: Trainer) -> str:
    """The override with which a finished run goes on; one that was stopped early needs none."""
    run = trainer.config.run
    if trainer.steps_done < trainer.total_steps:
        return ""
    return f" run.total_steps={2 * run.total_steps}" if run.total_steps is not None else f" run.epochs={2 * (run.epochs or 1)}"


def _accuracy(trainer: Trainer) -> list[tuple[str, str]]:
    if not trainer.evaluations:
        return []
    (first, before), (last, after) = trainer.evaluations[0], trainer.evaluations[-1]
    rows = []
    n, other = trainer.config.evaluation.n, trainer.config.evaluation.task
    keys = [("eval/accuracy_greedy", "held-out accuracy, greedy"), ("eval/pass_at_1", "held-out accuracy, sampled")]
    keys += [(f"eval/pass_at_{k}", f"held-out pass@{k}") for k in list(powers_of_two(n))[1:][-1:]]
    for key, label in keys:
        if key in after:
            text = f"{after[key]:.1%} after step {last}"
            rows.append((label, text if last == first or key not in before else f"{before[key]:.1%} -> {text}"))
    whose = "none of them in training" if other is None else f"of task {other.name}"
    return [*rows, ("held-out problems", f"{after['eval/problems']:.0f}, {whose}")]


def goodput(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """What became of the tokens, the largest parts first: a row, or none where it is not known."""
    if "goodput/generated" not in metrics:
        return []
    generated = max(metrics["goodput/generated"], 1.0)
    parts = sorted(((metrics[f"goodput/{place}"] / generated, place) for place in PLACES), reverse=True)
    return [("goodput", f"{generated:,.0f} tokens generated: " + ", ".join(f"{share:.1%} {place}" for share, place in parts if share >= 0.001))]
