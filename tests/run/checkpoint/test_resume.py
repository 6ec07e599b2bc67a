"""Which recorded steps a learner alone can repeat, and from where."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.replay.journal import segment_path, segments
from async_grpo.replay.resume import JournalSettings, last_logged_step, open_queue
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.resume import (
    changes,
    differences,
    find_checkpoint,
    first_evaluation,
    plan_rerun,
    verified,
)
from tests.support.frames import frame_of
from tests.support.queues import queue_settings


def record(run_dir: Path, *, steps: int, saved: tuple[int, ...]) -> None:
    """A run of this many steps with checkpoints after some of them, each of which begins a
    segment.
    """

    async def live() -> None:
        queue = open_queue(
            replace(queue_settings(), total_steps=99),
            JournalSettings(str(run_dir / "journal"), "start", fsync="never"),
        )
        for step in range(1, steps + 1):
            tickets = await queue.acquire("a", step - 1, [], 2)
            await queue.put("a", [frame_of(ticket) for ticket in tickets])
            assert await queue.get_batch(step) is not None
            await queue.live(step)
            if step in saved:
                await queue.snapshot()
                (checkpoint.begin(run_dir, step) / "queue.json").write_text("{}")
                checkpoint.commit(
                    checkpoint.path_for(run_dir, step).with_suffix(".tmp"), {"step": step}
                )

    asyncio.run(live())


def test_it_begins_as_early_as_it_can(tmp_path: Path) -> None:
    record(tmp_path, steps=9, saved=(3, 6))
    assert plan_rerun(tmp_path, after=None, until=99) == plan_rerun(tmp_path, after=0, until=9)
    whole = plan_rerun(tmp_path, after=None, until=99)
    assert (whole.first, whole.last, whole.checkpoint) == (1, 9, None)
    later = plan_rerun(tmp_path, after=6, until=8)
    assert (later.first, later.last, later.checkpoint) == (7, 8, checkpoint.path_for(tmp_path, 6))
    segment_path(
        tmp_path / "journal", segments(tmp_path / "journal")[0]
    ).unlink()  # as when the oldest checkpoint is of step 3
    kept = plan_rerun(tmp_path, after=None, until=99)
    assert (kept.first, kept.last, kept.checkpoint) == (4, 9, checkpoint.path_for(tmp_path, 3))


@pytest.mark.parametrize("after", [0, 2, 9, 40])
def test_what_cannot_be_repeated_is_said_with_what_can(tmp_path: Path, after: int) -> None:
    record(tmp_path, steps=9, saved=(3, 6, 9))
    segment_path(tmp_path / "journal", segments(tmp_path / "journal")[0]).unlink()
    with pytest.raises(
        SetupError,
        match=f"after step {after}: the journal has steps 4 to 9, .* --after 3, --after 6$",
    ):
        plan_rerun(tmp_path, after=after, until=99)


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="has no journal"):
        plan_rerun(tmp_path, after=None, until=9)


def test_settings_that_matter_to_the_learner_are_told_apart(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"total_steps": 9}, "model": {"path": "m"}})
    (tmp_path / "config.yaml").write_text(dump(config))
    assert list(differences(config, tmp_path / "config.yaml")) == []
    other = Config.model_validate(
        {
            "run": {"total_steps": 8},
            "model": {"path": "m"},
            "learner": {"lr": 3e-5},
            "evaluation": {"max_samples": 3},
        }
    )
    assert list(differences(other, tmp_path / "config.yaml")) == ["learner.lr: 1e-06 -> 3e-05"]
    assert list(differences(other, tmp_path / "nothing.yaml")) == []


def saved(run_dir: Path, step: int) -> Path:
    directory = checkpoint.begin(run_dir, step)
    (directory / "queue.json").write_text("[]")
    return checkpoint.commit(directory, {"step": step})


def settings(run_dir: Path, resume: str) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 9, "dir": str(run_dir)},
            "model": {"path": "m"},
            "checkpoint": {"resume": resume},
        }
    )


def test_which_checkpoint_a_run_goes_on_from(tmp_path: Path) -> None:

    def find(resume: str, total_steps: int = 9) -> Path | None:
        return find_checkpoint(settings(tmp_path, resume), total_steps=total_steps, data="")[0]

    assert find("auto") is None
    first, second = saved(tmp_path, 3), saved(tmp_path, 6)
    assert (find("never"), find("auto"), find(str(first))) == (None, second, first)
    with pytest.raises(SetupError, match="is of step 6, the run ends at step 5; raise"):
        find("auto", 5)
    for nothing in (tmp_path, first / "queue.json"):
        with pytest.raises(SetupError, match="has no manifest"):
            find(str(nothing))


def test_a_damaged_checkpoint_is_answered_with_an_older_one(tmp_path: Path) -> None:
    first, second = saved(tmp_path, 3), saved(tmp_path, 6)
    assert verified(first)["step"] == 3
    (second / "queue.json").write_text("{}")
    with pytest.raises(SetupError, match=r"contents of queue\.json .*resume=.*step_000003$"):
        verified(second)
    (first / "queue.json").write_text("{}")
    with pytest.raises(SetupError, match=r"resume=.*step_000006$"):
        verified(first)


def test_a_run_without_a_past_has_no_changes(tmp_path: Path) -> None:
    assert changes(settings(tmp_path, "auto"), None).refusal(tmp_path) == ""
    assert changes(settings(tmp_path, "auto"), saved(tmp_path, 3)).refusal(tmp_path) == ""


def test_what_the_metrics_file_tells_of_a_run_that_was_cut_off(tmp_path: Path) -> None:
    assert last_logged_step(tmp_path) == 0 and first_evaluation(tmp_path) is None
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "train/lo')
    assert last_logged_step(tmp_path) == 0 and first_evaluation(tmp_path) is None
    file.write_text(
        '{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "train/loss": 1.0}\n'
        '{"step": 2, "train/loss": 1.0}\n{"step": 3, "train/lo'
    )
    assert last_logged_step(tmp_path) == 2
    assert first_evaluation(tmp_path) == (0, {"step": 0, "eval/accuracy": 0.5})
    file.write_text('{"step": 0, "eval/accu')
    assert first_evaluation(tmp_path) is None
