"""A tracker is one class: what MLflow gets goes to another one through the same delivery, across
kills and restarts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from async_grpo.observe.tracking import sender as tracking
from async_grpo.observe.tracking.outbox import Outbox
from async_grpo.observe.tracking.sink import TrackingError
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.tools.report.sync import sync
from tests.support.folder_tracker import Folder, points_of
from tests.support.mlflow_server import WITHIN_S, _tracker, _until

ROOT = Path(__file__).resolve().parents[2]
STATE = "folder_sent.json"


def _history(run: Path) -> list[tuple[int, float]]:
    return [(int(step), float(value)) for name, value, _, step in points_of(run) if name == "score"]


def _folder(run_dir: Path, tracker: Tracker) -> Path:
    return run_dir / "folder" / str(tracker.run_id)


def _nothing_waits(run_dir: Path) -> None:
    state = run_dir / STATE
    _until(lambda: json.loads(state.read_text())[0]["todo"] == [], "there is nothing to write")


def _run(run_dir: Path, step: int, **options: Any) -> Tracker:
    """One start of a run that logs one step and ends."""
    tracker = _tracker(run_dir, kind=Folder, **options)
    tracker.start()
    tracker.log(step, {"score": step / 10})
    tracker.finish("FINISHED")
    assert (tracker.errors, tracker.unsent) == (0, 0)
    return tracker


def test_another_tracker_gets_what_mlflow_gets(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "hf").mkdir()
    tracker = _tracker(tmp_path, kind=Folder)
    assert tracker.uri == str(tmp_path / "folder")
    tracker.start()
    tracker.log(1, {"score": 0.5, "replay/ready": 3.0, "train/rho": 1.0})
    tracker.log_samples([{"prompt": "1+1=", "response": "2"}])
    tracker.tag("note", "fine")
    tracker.log_artifact(tmp_path / "hf", name="model", register="adder")
    tracker.finish("FINISHED")
    run = _folder(tmp_path, tracker)
    assert (run / "status").read_text() == "FINISHED"
    assert {name for name, *_ in points_of(run)} == {"score", "replay/ready"}
    assert (run / "parameter run.name").read_text() == "tracked"
    assert (run / "tag note").read_text() == "fine"
    assert json.loads((run / "samples").read_text()) == [{"prompt": "1+1=", "response": "2"}]
    assert (run / "config.yaml").read_text() == "seed: 0\n" and (run / "model").is_dir()
    model = (tmp_path / "folder" / "model adder").read_text()
    assert model == f"{tracker.run_id}/model"
    assert tracker.ready() == [f"Folder: run {tracker.run_id} in {tmp_path / 'folder'}"]


def test_a_resumed_run_sends_what_comes_after_the_offset(tmp_path: Path) -> None:
    first = _run(tmp_path, 1)
    run = _folder(tmp_path, first)
    [entry] = json.loads((tmp_path / STATE).read_text())
    assert entry["metrics"]["sent"] == (tmp_path / "metrics.jsonl").stat().st_size
    second = _run(tmp_path, 2, resume=first.run_id)
    assert second.run_id == first.run_id and _history(run) == [(1, 0.1), (2, 0.2)]
    assert (run / "calls").read_text().splitlines() == ["[1]", "[2]"]
    assert sync(tmp_path, Folder)[0] == "0 lines sent to Folder"


def test_a_killed_run_is_completed_from_its_offset(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from tests.support.folder_tracker import Folder
from tests.support.folder_tracker import Folder, points_of
from tests.support.mlflow_server import _tracker, _until
place = Path({str(tmp_path)!r})
tracker = _tracker(place, kind=Folder)
tracker.start()
tracker.log(1, {{"score": 0.1}})
_until(lambda: tracker.unsent == 0, "the first row is sent")
(place / "folder" / "away").touch()
tracker.log(2, {{"score": 0.2}})
with open(place / "metrics.jsonl", "a") as file:
    file.write('{{"step": 3, "ti')
print(tracker.run_id, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        cwd=ROOT,
        timeout=WITHIN_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL
    run = tmp_path / "folder" / done.stdout.strip()
    assert (run / "status").read_text() == "RUNNING" and _history(run) == [(1, 0.1)]
    with pytest.raises(TrackingError, match=r"Folder at .* did not take everything .*away"):
        sync(tmp_path, Folder)
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    (copy / "folder" / "away").unlink()
    assert _run(copy, 3).run_id != done.stdout.strip()  # the next run completes it as well
    completed = copy / "folder" / done.stdout.strip()
    assert (completed / "status").read_text() == "KILLED"
    assert _history(completed) == [(1, 0.1), (2, 0.2)]
    (tmp_path / "folder" / "away").unlink()
    assert sync(tmp_path, Folder)[-1].endswith("is complete: KILLED")
    assert (run / "status").read_text() == "KILLED" and _history(run) == [(1, 0.1), (2, 0.2)]
    before = (tmp_path / STATE).read_text()
    assert (
        sync(tmp_path, Folder)[0] == "0 lines sent to Folder"
        and (tmp_path / STATE).read_text() == before
    )


def test_a_run_that_the_tracker_lost_is_sent_again(tmp_path: Path) -> None:
    first = _run(tmp_path, 1)
    shutil.rmtree(_folder(tmp_path, first))
    second = _run(tmp_path, 2, resume=first.run_id)
    run = _folder(tmp_path, second)
    assert _history(run) == [(1, 0.1), (2, 0.2)]
    assert (run / "parameter run.name").exists() and (run / "status").read_text() == "FINISHED"


def test_a_run_resumed_in_another_directory_sends_its_own_rows(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    server = str(tmp_path / "folder")
    first = _run(tmp_path / "one", 1, uri=server)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / STATE).unlink()  # as where only checkpoint and files were taken along
    second = _run(tmp_path / "two", 2, uri=server, resume=first.run_id)
    run = Path(server) / str(second.run_id)
    assert second.run_id == first.run_id
    assert (run / "calls").read_text().splitlines() == ["[1]", "[2]"]


def test_what_a_tracker_refuses_costs_nothing_else(tmp_path: Path) -> None:
    tracker = _tracker(tmp_path, kind=Folder)
    tracker.start()
    (tmp_path / "hf").mkdir()
    tracker.log(1, {"a": 1.0, "refused": 1.0, "score": 0.1, "z": 1.0})
    tracker.log_artifact(tmp_path / "hf", name="model", register="a/b")
    tracker.log_artifact(tmp_path / "hf", name="refused", register="adder")
    tracker.finish("FINISHED")
    assert (tracker.errors, tracker.unsent) == (4, 0)
    run = _folder(tmp_path, tracker)
    assert {name for name, *_ in points_of(run)} == {"a", "score", "z"}
    assert (run / "model").is_dir() and json.loads((tmp_path / STATE).read_text())[0]["todo"] == []
    assert not (tmp_path / "folder" / "model adder").exists(), "its files did not come"


def test_how_a_run_ended_is_told_though_nothing_can_be_written(tmp_path: Path) -> None:
    notes: list[str] = []
    tracker = _tracker(tmp_path, kind=Folder, notes=notes)
    tracker.start()
    _nothing_waits(tmp_path)
    (tmp_path / STATE).with_suffix(".json.tmp").mkdir()  # in the way of what is written
    (tmp_path / "hf").mkdir()
    tracker.log(1, {"score": 0.1})
    tracker.log_artifact(tmp_path / "hf")
    tracker.finish("FINISHED")
    run = _folder(tmp_path, tracker)
    assert (run / "status").read_text() == "FINISHED"
    assert _history(run) == [(1, 0.1)] and (run / "hf").is_dir()
    assert tracker.errors > 0, "what cannot be noted is an error"
    assert notes[-1].startswith("Folder does not have all of this run: ")


def test_a_disk_that_does_not_answer_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    (tmp_path / "hf").mkdir()
    tracker = _tracker(tmp_path, kind=Folder, notes=notes)
    tracker.start()
    _nothing_waits(tmp_path)
    hangs, back = threading.Event(), threading.Event()
    monkeypatch.setattr(tracking, "FINISH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(os, "fsync", lambda _: (hangs.set(), back.wait(WITHIN_S)))
    tracker.log_artifact(tmp_path / "hf")
    ending = threading.Thread(target=tracker.finish, args=("FINISHED",), daemon=True)
    try:
        assert hangs.wait(WITHIN_S)
        ending.start()
        ending.join(WITHIN_S / 4)
        assert not ending.is_alive()
    finally:
        back.set()
    assert "it lacks perhaps what was sent last (the disk does not take " in notes[-1]


def test_an_end_that_comes_while_the_sender_turns_round_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings: list[threading.Thread] = []

    class Turning(threading.Event):
        """The run ends while the sender forgets why it was woken."""

        def clear(self) -> None:
            super().clear()
            if endings and endings[0].ident is None:
                endings[0].start()
                _until(self.is_set, "the run ends")
                super().clear()

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Event", Turning)
        tracker = _tracker(tmp_path, kind=Folder)
    tracker.start()
    endings.append(threading.Thread(target=tracker.finish, args=("FINISHED",)))
    tracker.log(1, {"score": 0.1})
    _until(lambda: endings[0].ident is not None, "the sender is woken")
    endings[0].join(tracking.FINISH_TIMEOUT_S / 2)
    assert not endings[0].is_alive(), "it waited for a sender that slept"
    assert (_folder(tmp_path, tracker) / "status").read_text() == "FINISHED"


def test_a_run_is_known_at_once_and_gets_its_rows_though_parameters_fail(tmp_path: Path) -> None:
    run_dir, server = tmp_path / "run", tmp_path / "server"
    run_dir.mkdir()
    server.mkdir()
    (server / "no pairs").touch()
    tracker = _tracker(run_dir, kind=Folder, uri=str(server))
    tracker.start()
    tracker.tag("note", "fine")
    tracker.log(1, {"score": 0.1})
    _until(lambda: tracker.unsent == 0, "the row is sent")
    for copy in ("killed", "again"):  # what a killed process leaves
        shutil.copytree(run_dir, tmp_path / copy)
    tracker.finish("FINISHED")
    (server / "no pairs").unlink()
    run = server / str(tracker.run_id)
    assert sync(tmp_path / "killed", Folder)[-1].endswith("is complete: KILLED")
    assert (run / "status").read_text() == "KILLED" and _history(run) == [(1, 0.1)]
    assert (run / "parameter run.name").read_text() == "tracked"
    _run(tmp_path / "again", 2, uri=str(server), resume=tracker.run_id)
    assert [one["status"] for one in json.loads((tmp_path / "again" / STATE).read_text())] == [
        "FINISHED"
    ], "the resumed run is the one that was killed"
    assert _history(run) == [(1, 0.1), (2, 0.2)] and list(run.parent.iterdir()) == [run]


def test_a_torn_line_of_samples_is_not_waited_for(tmp_path: Path) -> None:
    notes: list[str] = []
    tracker = _tracker(tmp_path, kind=Folder, notes=notes)
    tracker.start()
    tracker.log_samples([{"prompt": "1+1="}])
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"prom')
    tracker.finish("FINISHED")
    shown = _folder(tmp_path, tracker) / "samples"
    assert json.loads(shown.read_text()) == [{"prompt": "1+1="}] and notes == []
    shown.unlink()
    assert sync(tmp_path, Folder)[-1].endswith("is complete: FINISHED") and not shown.exists()


def test_many_rows_are_few_calls_and_fewer_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, written = _run(tmp_path, 1), []
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.writelines(map(_row, range(2, 9002)))
    monkeypatch.setattr(os, "fsync", written.append)
    assert sync(tmp_path, Folder)[0] == "9000 lines sent to Folder"
    calls = (_folder(tmp_path, tracker) / "calls").read_text().splitlines()
    assert [len(json.loads(steps)) for steps in calls] == [1, *[900] * 10]
    assert len(written) < 7, "not at every call"


def test_a_directory_is_opened_again_after_a_failure(tmp_path: Path) -> None:
    _run(tmp_path, 1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(_row(2))
    outbox = Outbox(tmp_path, "Folder")
    in_the_way = (tmp_path / STATE).with_suffix(".json.tmp")
    in_the_way.mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        outbox.open()
    in_the_way.rmdir()
    for one in (Outbox(tmp_path, "Folder"), outbox):
        one.open()
        assert (len(one.runs), one.unsent) == (1, 1)
        one.close()


def test_a_registry_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "hf").mkdir()
    tracker = _tracker(tmp_path, kind=Folder, notes=notes)
    tracker.start()
    (tmp_path / "folder" / "no registry").touch()
    tracker.log_artifact(tmp_path / "hf", name="model", register="adder")
    _until(lambda: tracker.errors > 0, "it was asked")
    tracker.finish("FINISHED")
    [entry] = json.loads((tmp_path / STATE).read_text())
    assert entry["todo"] == [{"model": "adder", "place": "model"}]
    assert "does not have all of this run: it lacks adder (no registry)" in notes[-1]
    (tmp_path / "folder" / "no registry").unlink()
    sync(tmp_path, Folder)
    assert (tmp_path / "folder" / "model adder").exists()


@pytest.mark.parametrize("line", ["[1]", "{", '{"step": 1}', '{"step": 1, "time": 2, "a": "b"}'])
def test_a_line_that_is_no_row_is_counted(tmp_path: Path, line: str) -> None:
    _run(tmp_path, 1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    assert sync(tmp_path, Folder)[-1].startswith(
        "1 records were refused, the last one: a line of metrics.jsonl holds no metrics: "
    )


# ---- directories of before
# --------------------------------------------------------------------------------------------------


class Old(Folder):
    """Has the runs of a directory from when MLflow was the only tracker."""

    title = "MLflow"


def _row(step: int) -> str:
    return json.dumps({"step": step, "time": 1700000000.0 + step, "score": step / 10}) + "\n"


def _old_entry(run_id: str, **values: Any) -> dict[str, Any]:
    """An entry of `mlflow_sent.json` as it was then."""
    return {
        "uri": None,
        "experiment": "grpo",
        "name": "run",
        "parameters": {"run.name": "tracked", "tracking.metrics": "main"},
        "begin": 0,
        "sent": 0,
        "end": None,
        "samples_begin": 0,
        "samples_sent": 0,
        "samples_end": None,
        "run_id": run_id,
        "parameters_sent": True,
        "artifacts": [],
        "places": {},
        "tags": {"host": "one"},
        "tags_sent": True,
        "models": {},
        "status": "RUNNING",
        "status_sent": "RUNNING",
        "created": 1700000000000,
        "ended": None,
        "key": run_id,
    } | values


def _of_before(run_dir: Path) -> tuple[Path, Path]:
    """Two runs of a directory: one cut off after its second row of three, one with a row."""
    rows = [_row(step) for step in (1, 2, 3, 4)]
    ends = [len("".join(rows[:count])) for count in range(5)]
    (run_dir / "metrics.jsonl").write_text("".join(rows))
    (run_dir / "model").mkdir()
    entries = [
        _old_entry(
            "cut",
            sent=ends[2],
            end=ends[3],
            samples_end=0,
            status="FAILED",
            ended=1700000009000,
            artifacts=["model"],
            places={"model": "final"},
            models={"adder": "final"},
        ),
        _old_entry("newest", begin=ends[3], sent=ends[4]),
    ]
    (run_dir / "mlflow_sent.json").write_text(json.dumps(entries))
    for name in ("cut", "newest"):
        (run_dir / "folder" / name).mkdir(parents=True)
    return run_dir / "folder" / "cut", run_dir / "folder" / "newest"


def test_a_directory_of_before_is_completed(tmp_path: Path) -> None:
    cut, newest = _of_before(tmp_path)
    assert sync(tmp_path, Old)[0] == "1 lines sent to MLflow"
    assert _history(cut) == [(3, 0.3)] and (cut / "status").read_text() == "FAILED"
    assert (cut / "final").is_dir()
    assert (tmp_path / "folder" / "model adder").read_text() == "cut/final"
    assert _history(newest) == [] and (newest / "status").read_text() == "KILLED"
    assert not (cut / "parameter run.name").exists(), "the tracker had them"


def test_a_run_of_before_goes_on(tmp_path: Path) -> None:
    cut, newest = _of_before(tmp_path)
    tracker = _tracker(tmp_path, kind=Old, resume="newest")
    tracker.start()
    tracker.log(5, {"score": 0.5})
    tracker.finish("FINISHED")
    assert (tracker.run_id, tracker.errors, tracker.unsent) == ("newest", 0, 0)
    assert _history(newest) == [(5, 0.5)] and _history(cut) == [(3, 0.3)]
    assert (newest / "tag host").read_text() == "one"
    assert not (newest / "parameter run.name").exists()


def test_a_complete_run_of_before_gets_nothing_again(tmp_path: Path) -> None:
    tracker = _run(tmp_path, 1)
    [entry] = json.loads((tmp_path / STATE).read_text())
    del entry["described"], entry["tagged"]
    (tmp_path / STATE).write_text(json.dumps([entry]))
    parameter = _folder(tmp_path, tracker) / "parameter run.name"
    parameter.unlink()
    sync(tmp_path, Folder)
    _run(tmp_path, 2)
    assert not parameter.exists()
    assert len(json.loads((tmp_path / STATE).read_text())) == 1, "the complete one is forgotten"


def test_a_run_of_before_gets_the_parameters_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(_row(1))
    run = tmp_path / "folder" / "grpo" / "k"
    run.mkdir(parents=True)
    entry = _old_entry("grpo/k", key="k", parameters_sent=False)
    (tmp_path / "mlflow_sent.json").write_text(json.dumps([entry]))
    assert sync(tmp_path, Old)[-1].startswith("MLflow run grpo/k at ")
    assert _history(run) == [(1, 0.1)] and (run / "parameter run.name").read_text() == "tracked"
