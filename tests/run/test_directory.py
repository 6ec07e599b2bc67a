"""The directory of a run: who has it, what a start writes there, and what it sets aside."""

from __future__ import annotations

import io
import json
import os
import queue
from pathlib import Path

import pytest

from async_grpo.config.load import load_settings
from async_grpo.config.schema import Config
from async_grpo.config.stored import read_settings
from async_grpo.errors import DirectoryTaken, SetupError
from async_grpo.observe.console.console import Console
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.directory import RunDirectory
from async_grpo.runtime import run_lock


def settings(run_dir: Path) -> Config:
    return load_settings(
        {
            "run": {"name": "mine", "total_steps": 9, "dir": str(run_dir)},
            "model": {"path": "m"},
            "task": {"name": "arithmetic"},
        },
        source="here",
    )


def directory(path: Path) -> RunDirectory:
    return RunDirectory(path, lost=[].append)


def take(one: RunDirectory) -> bool:
    return one.take(note=lambda text: None, check=lambda: None)


def test_one_start_at_a_time_has_it(tmp_path: Path) -> None:
    first, second = directory(tmp_path / "run"), directory(tmp_path / "run")
    try:
        assert not take(first) and not take(first), "it has it already"
        with pytest.raises(SetupError, match="another run uses"):
            take(second)
        first.release()
        assert not take(second), "nobody had it"
        second.check_own()
    finally:
        first.release()
        second.release()
    assert not (tmp_path / "run" / "lock.json").exists()


def test_what_was_half_replaced_is_finished_and_that_is_told(tmp_path: Path) -> None:
    path = checkpoint.commit(checkpoint.begin(tmp_path, 3), {"step": 3})
    os.replace(path, path.with_name(f"{path.name}.old"))
    one = directory(tmp_path)
    try:
        assert take(one), "what was read there before may have changed"
    finally:
        one.release()
    assert checkpoint.steps(tmp_path) == [3]


def test_who_lost_it_is_told_and_may_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    lost: queue.Queue[DirectoryTaken] = queue.Queue()
    one = RunDirectory(tmp_path, lost=lost.put)
    take(one)
    try:
        one.check_own()
        other = json.loads((tmp_path / run_lock.LOCK).read_text()) | {"token": "another", "pid": 7}
        (tmp_path / run_lock.LOCK).write_text(json.dumps(other))
        told = lost.get(timeout=30)
        with pytest.raises(DirectoryTaken, match="process 7 on") as raised:
            one.check_own()
        assert raised.value is told
    finally:
        one.release()
    assert json.loads((tmp_path / run_lock.LOCK).read_text())["token"] == "another"


def test_a_start_writes_its_settings_and_its_state(tmp_path: Path) -> None:
    config, one = settings(tmp_path), directory(tmp_path)
    one.begin(config, Console(io.StringIO()))
    assert read_settings(tmp_path / "config.yaml")["run"]["name"] == "mine"
    assert json.loads((tmp_path / "status.json").read_text())["run"] == "mine"


def test_a_replay_begins_with_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    directory(tmp_path).begin_again(settings(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "config.yaml").exists() and not (tmp_path / "status.json").exists()


def test_checkpoints_of_another_history_are_set_aside_and_named(tmp_path: Path) -> None:
    for step in (3, 6):
        checkpoint.commit(checkpoint.begin(tmp_path, step), {"step": step})
    said: list[str] = []
    directory(tmp_path).go_on(3, note=said.append)
    [line] = said
    assert "a checkpoint after step 3, where this run continues, is set aside" in line
    assert "step_000006" in line and checkpoint.steps(tmp_path) == [3]
