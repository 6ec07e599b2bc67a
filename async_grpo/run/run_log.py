"""The listener of a run: lines and panel, `metrics.jsonl` and MLflow, gauges for Prometheus, the
events of callbacks.

Runs in: the driver; a `RunListener`. Hides who is told what. Invariant: the log holds one history:
what is trained again is recorded once, unless its steps were discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.observe.reward_hacking import EARNED, RewardWatch
from async_grpo.observe.tracking.tracker import Status, Tracker
from async_grpo.run.callbacks.base import Callbacks
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.mirror import Mirror
from async_grpo.run.checkpoint.saver import Saver
from async_grpo.runtime.parts import part
from async_grpo.runtime.text import shortened

if TYPE_CHECKING:  # Ray takes a second to import
    from async_grpo.cluster.prometheus import Exported


WRONG_SAMPLER = 0.1
"""Mean difference of log-probs that no number format explains: bfloat16 has some hundredths."""
FLAT_STEPS = 3
"""Learner steps in a row without anything to learn from before that is said."""


class RunLog:
    """What a run tells. `tracker`, `gauges`, `saver` and `mirror` are None until they begin."""

    def __init__(self, console: Console, run_dir: Path) -> None:
        self._console, self._run_dir = console, run_dir
        self.tracker: Tracker | None = None
        self.gauges: Exported | None = None
        self.saver: Saver | None = None
        self.mirror: Mirror | None = None
        self.mirror_error = ""
        """Why the copy of the run that has ended is not complete."""
        self.callbacks = Callbacks()
        self.reward_watch = RewardWatch()
        self.total_steps = 0
        """What is shown as the last step."""
        self._told_sampler = False
        self._flat_steps = 0
        """Learner steps in a row whose rewards taught nothing; below 0 once that was said."""
        self._example = ""
        self.newest_step = 0
        """Learner step of the newest metrics that count: a repeated one up to it is not new."""

    def note(self, text: str) -> None:
        """Show a line."""
        self._console.info(text)

    def error(self, text: str) -> None:
        """Show a line about something that went wrong, and did not end the run."""
        self._console.error(text)

    def fault(self, text: str) -> None:
        """Tell callbacks of a fault after which the run goes on."""
        self.callbacks.tell("on_fault", text)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show and record metrics; those of a repeated step only if its first log was lost."""
        if "train/repeated" in metrics and step <= self.newest_step:
            return
        if "train/loss" in metrics:
            self.newest_step = max(step, self.newest_step)
            if self.callbacks:
                metrics = {**metrics, "callbacks/errors": float(self.callbacks.errors)}
        if self.tracker is not None:
            self.tracker.log(step, dict(metrics))
        if self.gauges is not None:
            self.gauges.update(step, metrics)
        self._console.logged(step, self.total_steps, metrics)
        if "train/loss" in metrics:
            self._look_for_signal(step, metrics)
        for sign in self.reward_watch.observe(metrics):
            text = f"step {step}: {sign}: {EARNED}"
            self.note(f"warning: {text}")
            self.callbacks.tell("on_reward_alarm", text)
            if self.tracker is not None:
                self.tracker.tag("async_grpo.reward_alarm", text)
        error = metrics.get("weights/sampler_error", 0.0)
        if error > WRONG_SAMPLER and not self._told_sampler:
            self._told_sampler = True
            self._console.error(
                f"step {step}: with the same weights, log-probs of learner and engines differ by "
                f"{error:.2g} on average (weights/sampler_error): the trained policy is not the "
                "sampled one (docs/how-to/failures.md)"
            )

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Record responses, a row each."""
        self._example = next((str(one.get("response", "")) for one in rows), self._example)
        if self.tracker is not None:
            self.tracker.log_samples(rows)

    def published(self, version: int, seconds: float) -> None:
        """Record that a version became live, `seconds` after its weights were staged."""
        self._console.published(version, seconds)
        self.callbacks.tell("on_weight_sync", version, seconds)

    def saved(self, step: int, path: Path) -> None:
        """Tell callbacks of a complete checkpoint, and copy it."""
        self.callbacks.tell("on_checkpoint", step, path)
        if self.mirror is not None:
            self.mirror.wake()

    def rolled_back(self, step: int) -> None:
        """Forget checkpoints and metrics of the learner steps after `step`: another history."""
        checkpoint.set_aside(self._run_dir, step)
        self.newest_step = step
        self.reward_watch = self.reward_watch.again()
        if self.saver is not None:
            self.saver.saved_at = None

    def conclude(
        self,
        config: Config,
        status: Status,
        *,
        ending: tuple[int, str] | None,
        asked: bool,
        report: bool,
    ) -> None:
        """Say how the run ended, write its report, close tracking, and copy the rest, as far as
        these were begun. ending: exit code and message; asked: somebody asked the run to end.
        """
        tracker, self.tracker, self.gauges = self.tracker, None, None
        if tracker is None:
            return
        why = f"on request, after step {self.newest_step}" if asked else "no"
        tracker.tag("async_grpo.stopped", why)  # a resumed run may have one from before
        tracker.conclude(status)  # the report takes a while, and somebody may lose patience
        self._console.stopped(status) if ending is None else self._console.end(*ending)
        if report and (report_on := part("report")) is not None:
            report_on(config, self._console, tracker)
        tracker.finish(status)
        if self.mirror is not None:
            self.mirror_error = self.mirror.finish(limit_s=config.watchdog.step_timeout_s)
            if self.mirror_error:
                self.error(self.mirror_error)

    def _look_for_signal(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say once that no response is better than the others of its group."""
        if self._flat_steps < 0:
            return
        self._flat_steps = self._flat_steps + 1 if nothing_to_learn(metrics) else 0
        if self._flat_steps < FLAT_STEPS:
            return
        self._flat_steps = -1
        example = " ".join(self._example.split())
        helps = "harder problems"
        if metrics.get("rollout/all_right_groups") != 1:
            helps = (
                "a reward that such a response can get (task jsonl: task.options.match=contains, "
                "where it is exact), a larger "
                f"rollout.response_length ({metrics.get('rollout/truncated', 0):.0%} "
                "were cut off), easier problems"
            )
        self.note(
            f"warning: steps {step - FLAT_STEPS + 1} to {step}: nothing to learn: all responses "
            f"of each group have the same reward (score "
            f"{metrics.get('rollout/score', 0):.2f}); what helps: {helps}"
            + (f"; one of them: {shortened(example, 300)!r}" if example else "")
        )


def nothing_to_learn(metrics: Mapping[str, float]) -> bool:
    """Whether no group of a learner step has a better response, and no advantage is left."""
    flat = metrics.get("rollout/zero_std_groups") == 1
    return flat and metrics.get("train/advantage_abs_max", 0.0) < 1e-6
