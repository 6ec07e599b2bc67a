"""TensorBoard as a tracker: what its own reader finds in the files."""

from __future__ import annotations

import errno
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from async_grpo.config.schema import Config
from async_grpo.observe.tracking import kinds
from async_grpo.observe.tracking.kinds import check_trackers
from async_grpo.observe.tracking.sink import Point, RunFacts, TrackingError
from async_grpo.observe.tracking.tensorboard_sink import TensorboardSink
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.tools.report import sync as report_sync
from async_grpo.tools.report.sync import sync_all
from tests.support.folder_tracker import Folder, points_of
from tests.support.mlflow_server import _until

STATE = "tensorboard_sent.json"


def tracker_in(run_dir: Path, *, mlflow: bool = False, **options: Any) -> Tracker:
    tracking = {"mlflow": mlflow, "also": ["tensorboard"] * 2, "system_metrics": False}
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
    found = {tag: reader.Tensors(tag) for tag in reader.Tags()["tensors"]}
    return {tag: one[-1].tensor_proto.string_val[0].decode() for tag, one in found.items()}


def test_it_gets_what_mlflow_gets_under_the_names_of_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    tracker = tracker_in(tmp_path, mlflow=True, tags={"code": "v1"})
    tracker.start()
    for step in range(1, 40):
        tracker.log(step, {"score": step / 100, "replay/ready": 3.0, "train/rho": 1.0})
    tracker.log_samples([{"prompt": "1+1=", "response": "2 <b> or\nthree", "step": 39}])
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
    for tag, cells in (
        ("run/parameters", ("run.name", "tracked")),
        ("run/tags", ("code", "v1")),
        ("run/samples", ("1+1=", "2 &lt;b&gt; or<br>three")),
    ):
        assert "".join(f"<td><code>{cell}</code></td>" for cell in cells) in said[tag]
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
    lines: list[str] = []
    sync_all(tmp_path, say=lines.append)
    assert lines[0] == "6 lines sent to TensorBoard"
    assert found(tmp_path)["score"] == [(step, float(step)) for step in range(1, 7)]


@pytest.mark.parametrize("ends", [False, True])
def test_a_directory_that_is_lost_is_written_anew(tmp_path: Path, ends: bool) -> None:
    tracker = tracker_in(tmp_path)
    tracker.start()
    tracker.log(1, {"score": 1.0})
    _until(lambda: tracker.unsent == 0, "it has the first row")
    if ends:
        tracker.finish("FINISHED")
        tracker = tracker_in(tmp_path, resumed=True)
    shutil.rmtree(tmp_path / "tensorboard")
    if ends:
        tracker.start()
    tracker.log(2, {"score": 2.0})
    tracker.finish("FINISHED")
    assert found(tmp_path)["score"] == [(1, 1.0), (2, 2.0)]


def test_a_disk_that_was_full_and_a_process_that_was_killed_leave_whole_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, places = (
        TensorboardSink(None, tmp_path),
        [Point("score", 0.5, 1000 * n, n) for n in range(9)],
    )
    run_id = sink.start(RunFacts(uri=None, experiment="e", name="n", parameters={}, key="k" * 32))
    sink.log(run_id, points=places[:2])
    whole = RecordWriter.write

    def full(writer: Any, data: bytes) -> None:
        whole(writer, data[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(RecordWriter, "write", full)
        sink.log(run_id, points=places[2:4])
    sink.log(run_id, points=places[:5])
    [file] = (tmp_path / "tensorboard" / run_id).iterdir()
    with file.open("ab") as torn:
        torn.write(b"\x30\0\0\0\0\0\0\0and then nothing")
    again = TensorboardSink(None, tmp_path)
    again.log(run_id, points=places[::-1])
    again.log(run_id, points=places)
    expected = [(n, 0.5) for n in [*range(5), *range(8, 4, -1)]]
    assert found(tmp_path)["score"] == expected, "also those of an earlier time"


def test_one_tracker_that_fails_holds_up_no_other(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "folder").mkdir()
    tracker = tracker_in(tmp_path, mlflow=True, note=notes.append)
    tracker.start()
    (tmp_path / "folder" / "away").write_text("")
    tracker.log(1, {"score": 1.0})
    tracker.finish("FINISHED")
    assert found(tmp_path)["score"] == [(1, 1.0)]
    assert tracker.unsent == 1 and "Folder does not have all of this run" in notes[-1]
    (tmp_path / "folder" / "away").unlink()


def test_sync_sends_each_of_them_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_sync, "KINDS", (Folder, TensorboardSink))
    tracker = tracker_in(tmp_path, mlflow=True)
    tracker.start()
    (tmp_path / "folder" / "away").write_text("")
    shutil.rmtree(tmp_path / "tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    tracker.log(1, {"score": 1.0})
    tracker.finish("FINISHED")
    (tmp_path / "tensorboard").unlink()
    lines: list[str] = []
    with pytest.raises(TrackingError, match=r"Folder at .* did not take everything"):
        sync_all(tmp_path, say=lines.append)
    assert lines[0] == "1 lines sent to TensorBoard" and lines[1].endswith("FINISHED")
    (tmp_path / "folder" / "away").unlink()
    sync_all(tmp_path, say=lines.append)
    assert lines[2] == "1 lines sent to Folder"
    assert found(tmp_path)["score"] == [(1, 1.0)]


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
    lines: list[str] = []
    sync_all(tmp_path, say=lines.append)
    assert "is complete: FINISHED" in lines[-1]
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
