"""TensorBoard as a tracker: what its own reader finds in the files."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_grpo.config.schema import Config
from async_grpo.observe.tracking import kinds
from async_grpo.observe.tracking.kinds import check_trackers
from async_grpo.observe.tracking.sink import TrackingError
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.tools.report.sync import sync_all
from tests.support.folder_tracker import Folder, points_of

STATE = "tensorboard_sent.json"


def tracker_in(run_dir: Path, *, mlflow: bool = False, **options: Any) -> Tracker:
    tracking = {"mlflow": mlflow, "also": ["tensorboard"], "system_metrics": False}
    config = Config.model_validate(
        {
            "run": {"name": "tracked", "total_steps": 9, "dir": str(run_dir)},
            "model": {"path": "m"},
            "tracking": tracking,
        }
    )
    return Tracker(config, run_dir=run_dir, resume_run_id=None, kind=Folder, **options)


def found(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    [directory] = (run_dir / "tensorboard").iterdir()
    reader = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def texts(run_dir: Path) -> dict[str, str]:
    [directory] = (run_dir / "tensorboard").iterdir()
    reader = EventAccumulator(str(directory)).Reload()
    return {
        tag.removesuffix("/text_summary"): reader.Tensors(tag)[-1]
        .tensor_proto.string_val[0]
        .decode()
        for tag in reader.Tags()["tensors"]
    }


def test_it_gets_what_mlflow_gets_under_the_names_of_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    tracker = tracker_in(tmp_path, mlflow=True, tags={"code": "v1"})
    tracker.start()
    for step in range(1, 40):
        tracker.log(step, {"score": step / 100, "replay/ready": 3.0, "train/rho": 1.0})
    tracker.log_samples([{"prompt": "1+1=", "response": "2 | or\nthree", "step": 39}])
    tracker.log_artifact(tmp_path / "config.yaml", name="config.yaml")
    tracker.finish("FINISHED")
    assert (tracker.errors, tracker.unsent) == (0, 0)
    expected = [(step, step / 100) for step in range(1, 40)]
    scalars = found(tmp_path)
    assert scalars["score"] == expected and len(scalars["replay/ready"]) == 39
    assert "train/rho" not in scalars, "only the main metrics"
    folder = tmp_path / "folder" / str(tracker.run_id)
    assert sum(name == "score" for name, *_ in points_of(folder)) == 39
    said = texts(tmp_path)
    assert (
        "| run.name | tracked |" in said["run/parameters"] and "| code | v1 |" in said["run/tags"]
    )
    assert "| 39 | 2 \\| or<br>three |" in said["run/samples"]
    assert tracker.ready()[1].endswith(f"tensorboard --logdir {tmp_path / 'tensorboard'}")
    assert list(tracker.summary) == ["Folder", "TensorBoard"]


def test_a_run_that_goes_on_goes_on_there_and_nothing_is_there_twice(tmp_path: Path) -> None:
    for begin in (1, 4):
        tracker = tracker_in(tmp_path, resumed=begin > 1)
        tracker.start()
        for step in range(begin, begin + 3):
            tracker.log(step, {"score": float(step)})
        tracker.finish("FINISHED")
    assert found(tmp_path)["score"] == [(step, float(step)) for step in range(1, 7)]
    state = json.loads((tmp_path / STATE).read_text())
    state[0]["metrics"]["sent"] = 0  # a crash before it was noted
    (tmp_path / STATE).write_text(json.dumps(state))
    assert sync_all(tmp_path)[0] == "6 lines sent"
    assert found(tmp_path)["score"] == [(step, float(step)) for step in range(1, 7)]


def test_a_directory_that_is_lost_is_written_anew(tmp_path: Path) -> None:
    tracker = tracker_in(tmp_path)
    tracker.start()
    tracker.log(1, {"score": 1.0})
    tracker.finish("FINISHED")
    shutil.rmtree(tmp_path / "tensorboard")
    again = tracker_in(tmp_path, resumed=True)
    again.start()
    again.log(2, {"score": 2.0})
    again.finish("FINISHED")
    assert found(tmp_path)["score"] == [(1, 1.0), (2, 2.0)]


def test_a_tracker_that_cannot_be_used_ends_no_run(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "tensorboard").write_text("in the way")
    tracker = tracker_in(tmp_path, note=notes.append)
    tracker.start()
    tracker.log(1, {"score": 1.0})
    tracker.finish("FINISHED")
    assert tracker.errors and tracker.unsent == 1
    assert notes[0].startswith("TensorBoard: ") and "training continues" in notes[0]
    assert "TensorBoard does not have all of this run" in notes[-1]
    (tmp_path / "tensorboard").unlink()
    assert "is complete: FINISHED" in sync_all(tmp_path)[-1]
    assert found(tmp_path)["score"] == [(1, 1.0)]


def test_a_package_that_is_not_installed_is_told_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "m"},
            "tracking": {"also": ["tensorboard"], "mlflow": False},
        }
    )
    check_trackers(config)
    missing = {"tensorboard": None}
    monkeypatch.setattr(kinds, "find_spec", lambda name: missing.get(name, find_spec(name)))
    with pytest.raises(TrackingError, match=r"`tracking.also` names tensorboard, which is not"):
        check_trackers(config)
