"""The listener of a run: what is trained again is logged once, unless its steps were discarded."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_grpo.observe.console.console import Console
from async_grpo.observe.reward_hacking import RewardWatch
from async_grpo.run.callbacks.base import Callback, Callbacks
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.run_log import RunLog
from async_grpo.run.summary import described

STEP = {"train/loss": 1.0, "time/step": 1.0}


class Told:
    """Tracker and gauges at once."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.exported: list[int] = []
        self.rows: list[dict] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append(step)

    def log_samples(self, rows: list[dict]) -> None:
        self.rows += rows

    def update(self, step: int, metrics: dict[str, float]) -> None:
        self.exported.append(step)


def test_a_repeated_step_is_logged_unless_its_first_log_counts(tmp_path: Path) -> None:
    log, told = RunLog(Console(io.StringIO()), tmp_path), Told()
    log.logged(1, STEP)  # nobody records yet
    log.tracker = log.gauges = told
    log.logged(2, STEP)
    for step in (1, 2, 3):
        log.logged(step, STEP | {"train/repeated": 1.0})
    log.logged(3, {"eval/problems": 4.0})
    log.samples([{"step": 3}])
    assert told.logged == told.exported == [2, 3, 3] and told.rows == [{"step": 3}]


def test_steps_that_were_rolled_back_are_logged_again_and_their_checkpoints_set_aside(
    tmp_path: Path,
) -> None:
    log, told = RunLog(Console(io.StringIO()), tmp_path), Told()
    log.tracker, log.saver = told, SimpleNamespace(saved_at=2)
    for step in (1, 2):
        log.logged(step, STEP)
        checkpoint.commit(checkpoint.begin(tmp_path, step), {"step": step})
    log.rolled_back(1)
    assert checkpoint.steps(tmp_path) == [1] and log.saver.saved_at is None
    log.logged(2, STEP | {"train/repeated": 1.0})
    assert told.logged == [1, 2, 2]


class Alarmed(Callback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_reward_alarm(self, trainer: Any, text: str) -> None:
        self.told.append(text)


def test_an_alarm_is_a_line_an_event_and_a_tag(tmp_path: Path) -> None:
    stream, alarmed, tags = io.StringIO(), Alarmed(), {}
    log = RunLog(Console(stream), tmp_path)
    log.callbacks = Callbacks([alarmed])
    log.tracker = SimpleNamespace(log=lambda *line: None, tag=tags.__setitem__)
    log.reward_watch = RewardWatch(["nice"])
    for step in range(1, 41):
        grows = {"rollout/score": step / 40, "rollout/accuracy": step / 40}
        log.logged(step, STEP | grows | {"rollout/reward/nice": 1 - step / 40})
    log.callbacks.deliver(None)
    [text] = alarmed.told
    assert text.startswith("step 20: the score rose from 0.14 to 0.39, and rollout/reward/nice, ")
    assert text.endswith(": the reward may be earned without the task")
    assert f"warning: {text}" in stream.getvalue().splitlines()
    assert tags == {"async_grpo.reward_alarm": text}


def test_without_a_tracker_samples_are_left_out_and_lines_are_shown(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = RunLog(Console(stream), tmp_path)
    log.samples([{"step": 1}])
    log.note("all is well")
    log.error("a disk is full")
    assert stream.getvalue().splitlines() == ["all is well", "error: a disk is full"]


def test_a_learner_that_does_not_train_what_was_sampled_is_named_once(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = RunLog(Console(shown), tmp_path)
    for step, error in enumerate((0.0, 0.05, 1.9, 2.1), 1):
        log.logged(step, STEP | {"weights/sampler_error": error})
    said = [line for line in shown.getvalue().splitlines() if "sampler_error" in line]
    assert len(said) == 1 and "step 3:" in said[0] and "differ by 1.9" in said[0]


def test_a_run_that_can_learn_nothing_says_so_once_with_a_response(tmp_path: Path) -> None:
    flat = {"rollout/zero_std_groups": 1.0, "rollout/score": 0.0, "rollout/truncated": 0.75}
    without = STEP | flat | {"train/advantage_abs_max": 0.0}
    kinds = {
        "flat": [without] * 9,
        "right": [without | {"rollout/all_right_groups": 1.0}] * 9,
        # a baseline over the step compares groups
        "other": [without | {"train/advantage_abs_max": 0.7}] * 9,
        "some": [without, without, STEP | flat | {"rollout/zero_std_groups": 0.9}] * 3,
    }
    said = {}
    for kind, steps in kinds.items():
        console = Console(shown := io.StringIO())
        log = RunLog(console, tmp_path)
        log.samples([{"response": "The answer\nis 42." + "!" * 400}])
        for step, metrics in enumerate(steps, 1):
            log.logged(step, metrics)
        said[kind] = [line for line in shown.getvalue().splitlines() if "warning" in line]
        assert said[kind] == console.progress.facts()["notes"], "the panel has it too"
    assert len(said["flat"]) == len(said["right"]) == 1 and not said["other"] + said["some"]
    assert said["flat"][0].startswith("warning: steps 1 to 3: nothing to learn: all ")
    for part in ("score 0.00", "match=contains", "75% were cut", "'The answer is 42.!!", "...'"):
        assert part in said["flat"][0]
    assert "harder problems" in said["right"][0] and "contains" not in said["right"][0]


def test_the_page_in_mlflow_has_the_closing_table_without_what_is_not_counted_yet() -> None:
    rows = [
        ("bottleneck", "balanced"),
        ("goodput (this start)", "12 tokens generated: 50% trained"),
    ]
    assert described(rows) == "- **bottleneck**: balanced"
