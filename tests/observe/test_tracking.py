"""The metrics file is always complete; MLflow gets it all, sooner or later, once, and is never in
the way.
"""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.observe.console.console import Console
from async_grpo.observe.tracking import sender as tracking
from async_grpo.observe.tracking import tracker as tracker_module
from async_grpo.observe.tracking.mlflow_sink import check_server
from async_grpo.observe.tracking.outbox import Outbox
from async_grpo.observe.tracking.sink import TrackingError
from async_grpo.observe.tracking.system_metrics import SystemMetrics
from async_grpo.observe.tracking.tracker import Tracker, flatten, log_model
from async_grpo.runtime import provenance
from async_grpo.runtime.provenance import tags, write_code_state
from async_grpo.tools.report.sync import sync
from tests.support import verbs
from tests.support.mlflow_server import WITHIN_S, Begins, Server, _config, _tracker, _until
from tests.support.models import write_model

ROOT = Path(__file__).resolve().parents[2]
STATE = "mlflow_sent.json"

HOSTILE = {
    "ansi": "\x1b[2J\x1b]0;owned\x07",
    "nul": "a\x00b",
    "bell": "\a\b\r",
    "surrogate": "\ud800 \udfff",
    "bidi": "\u202egnp.exe\u2066\u200b",
    "json": '"}],"data":[["x"]]}\n{"step": 1}',
    "html": "<script>alert(1)</script><img src=x onerror=y>",
    "separators": "\u2028\u2029\x85",
    "controls": "".join(map(chr, range(32))) + "\x7f\x9b",
    "long": "x" * 10_000_000,
    "long_controls": "\x00" * 10_000_000,
    "object": object(),
    "nan": float("nan"),
    "infinite": float("inf"),
    "none": None,
    "yes": True,
    "number": 3,
    "text": "2 + 2 = 4\n\u00e9\u6f22\U0001f600",
}


def _rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / name).read_bytes().split(b"\n")[:-1]]


def _history(uri: str, run_id: str, name: str = "score") -> list[tuple[int, float, int]]:
    from mlflow import MlflowClient

    return [
        (point.step, point.value, point.timestamp)
        for point in MlflowClient(uri).get_metric_history(run_id, name)
    ]


def _senders() -> int:
    return sum(thread.name == tracking.THREAD for thread in threading.enumerate())


def _status(uri: str, run_id: str) -> str:
    from mlflow import MlflowClient

    return MlflowClient(uri).get_run(run_id).info.status


# ---- a database
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tracker, Path]]:
    """A tracked run that was interrupted once and resumed."""
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "config.yaml").write_text("seed: 0\n")
    (run_dir / "report.md").write_text("# report\n")
    first = _tracker(run_dir)
    first.log(0, {"rollout/score": 0.25})
    first.start()
    first.log(1, {"rollout/score": 0.5, "train/entropy": float("nan")})
    first.log_samples([{"prompt": "1+1=", "response": "2\x1b[31m"}])
    first.finish("KILLED")
    second = _tracker(run_dir, resume=first.run_id)
    second.start()
    second.log(2, {"rollout/score": 0.75, "replay/ready": 3.0, "train/rho": 1.0})
    second.tag("mlflow.note.content", "- **verdict**: none")
    second.log_samples(
        [{"prompt": "1+2=", "response": "3" * 10_000}, {"prompt": "1+3=", "error": "none"}]
    )
    second.log_artifact(run_dir / "report.md")
    second.finish("FINISHED")
    second.finish("FAILED")
    yield second, run_dir


def test_mlflow_has_metrics_parameters_samples_and_files(finished: tuple[Tracker, Path]) -> None:
    from mlflow import MlflowClient

    tracker, run_dir = finished
    assert tracker.uri == f"sqlite:///{run_dir}/mlflow.db"
    assert (tracker.errors, tracker.unsent) == (0, 0)
    client = MlflowClient(tracker.uri)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert re.fullmatch(r"tracked-\d{8}-\d{6}", run.info.run_name), "runs are told from each other"
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert run.data.tags["mlflow.note.content"] == "- **verdict**: none"
    assert "watch/replay/ready" in run.data.metrics and "train/rho" not in run.data.metrics
    assert [point[:2] for point in _history(tracker.uri, tracker.run_id, "rollout/score")] == [
        (0, 0.25),
        (1, 0.5),
        (2, 0.75),
    ]
    assert "train/entropy" not in run.data.metrics
    assert run.data.params == flatten(_config().model_dump(mode="json"))
    assert len(run.data.params) > 100
    assert {entry.path for entry in client.list_artifacts(tracker.run_id)} == {
        "config.yaml",
        "report.md",
        "samples.json",
    }
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(
        run_dir / "mlartifacts"
    )
    table = json.loads(next((run_dir / "mlartifacts").rglob("samples.json")).read_text())
    assert table["columns"] == ["prompt", "response", "error"]
    assert table["data"][0] == ["1+1=", "2\\x1b[31m", None]
    assert len(table["data"][1][1]) < 5000 and len(table["data"]) == 3
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "samples.json", "type": "table"}
    ]


def test_the_metrics_file_has_every_step_of_both_starts(finished: tuple[Tracker, Path]) -> None:
    _, run_dir = finished
    rows = _rows(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["train/entropy"] is None
    assert rows[2]["rollout/score"] == 0.75
    assert rows[2]["tracking/errors"] == 0


def test_what_mlflow_refuses_is_counted_and_costs_nothing_else(
    finished: tuple[Tracker, Path], tmp_path: Path
) -> None:
    tracker = _tracker(tmp_path, uri=finished[0].uri)
    tracker.start()
    for step in range(3):
        tracker.log(
            step,
            {
                "a": 1.0,
                "m" * 300: 1.0,
                "../up": 2.0,
                "line\nbreak": 3.0,
                "score": float(step),
                "z": 1.0,
            },
        )
    tracker.finish("FINISHED")
    tracker.log(3, {"late": 1.0})
    assert (tracker.errors, tracker.unsent) == (9, 0)
    assert [point[:2] for point in _history(tracker.uri, tracker.run_id)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
    ]
    assert len(_history(tracker.uri, tracker.run_id, "z")) == 3
    assert [row["step"] for row in _rows(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("lost", ["unknown", "deleted"])
def test_a_resumed_run_whose_mlflow_run_is_gone_sends_everything_to_a_new_one(
    finished: tuple[Tracker, Path], tmp_path: Path, lost: str
) -> None:
    from mlflow import MlflowClient

    first = _tracker(tmp_path, uri=finished[0].uri)
    first.start()
    first.log(1, {"score": 0.5})
    first.finish("KILLED")
    gone = first.run_id
    if lost == "deleted":
        MlflowClient(first.uri).delete_run(gone)
    else:  # as on another server
        gone = "f" * 32
        (tmp_path / STATE).write_text((tmp_path / STATE).read_text().replace(first.run_id, gone))
    second = _tracker(tmp_path, resume=gone, uri=first.uri)
    second.start()
    second.log(2, {"score": 0.6})
    second.finish("FINISHED")
    assert second.run_id not in (gone, None) and second.unsent == 0
    assert [point[:2] for point in _history(second.uri, second.run_id)] == [(1, 0.5), (2, 0.6)]
    assert MlflowClient(second.uri).get_run(second.run_id).data.params["run.name"] == "tracked"


def test_a_run_that_is_deleted_while_it_trains_is_sent_to_a_new_one(
    finished: tuple[Tracker, Path], tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    tracker = _tracker(tmp_path, uri=finished[0].uri)
    tracker.start()
    tracker.log(1, {"score": 0.5})
    _until(lambda: tracker.unsent == 0, "the first row is sent")
    gone = tracker.run_id
    MlflowClient(tracker.uri).delete_run(gone)
    tracker.log(2, {"score": 0.6})
    _until(lambda: tracker.unsent == 0, "the rows are sent again")
    assert tracker.run_id not in (gone, None)
    tracker.finish("FINISHED")
    assert tracker.errors == 1, "one attempt failed, and nothing was refused"
    assert [point[:2] for point in _history(tracker.uri, tracker.run_id)] == [(1, 0.5), (2, 0.6)]


def test_runs_of_one_directory_do_not_mix(
    finished: tuple[Tracker, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, ids = finished[0].uri, []
    for number, resume in enumerate([None, None, 0, None, 3]):
        if number == 4:
            (
                tmp_path / "metrics.jsonl"
                # somebody makes room; the run that is continued had been sent further than the new
                # file
                # is long
            ).unlink()
        # rows and ends of two are left to the third one, which continues the first
        monkeypatch.setattr(Begins, "silent", number < 2)
        resumed_id = None if resume is None else ids[resume]
        tracker = _tracker(tmp_path, uri=uri, resume=resumed_id, kind=Begins)
        tracker.start()
        tracker.log(number, {"score": float(number)})
        ids.append(tracker.run_id)
        if number == 2:
            _until(lambda tracker=tracker: tracker.unsent == 0, "all rows are sent")
            assert _status(uri, ids[0]) == "RUNNING"
        tracker.finish("FAILED" if number < 2 else "FINISHED")
        assert number < 2 or tracker.unsent == 0, "earlier rows that were sent had been waiting"
    assert (ids[2], ids[4], len(set(ids))) == (ids[0], ids[3], 3)
    for run_id, steps, status in (
        (ids[0], [0, 2], "FINISHED"),
        (ids[1], [1], "FAILED"),
        (ids[3], [3, 4], "FINISHED"),
    ):
        assert ([point[0] for point in _history(uri, run_id)], _status(uri, run_id)) == (
            steps,
            status,
        )


def test_a_tracker_that_was_never_started_leaves_the_file(tmp_path: Path) -> None:
    notes: list[str] = []
    tracker = _tracker(tmp_path, notes=notes)
    tracker.log(0, {"a": 1.0})
    tracker.finish("FAILED")
    assert (len(_rows(tmp_path)), tracker.unsent, notes) == (1, 1, [])


def test_without_mlflow_it_is_not_imported(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from async_grpo.config.schema import Config, Model, Run, Tracking
from async_grpo.observe.tracking.tracker import Tracker
config = Config(run=Run(total_steps=1), model=Model(path="x"), tracking=Tracking(mlflow=False))
tracker = Tracker(config, run_dir=Path({str(tmp_path)!r}), resume_run_id=None)
tracker.start()
tracker.log(1, {{"a": 1.0}})
tracker.log_samples([{{"prompt": "p"}}])
tracker.finish("FINISHED")
assert (tracker.run_id, tracker.uri, tracker.summary) == (None, None, dict())
assert (tracker.errors, tracker.unsent) == (0, 0)
assert not [name for name in sys.modules if name.split(".")[0] == "mlflow"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=WITHIN_S)
    [row] = _rows(tmp_path)
    assert set(row) == {"step", "time", "a"}
    assert _rows(tmp_path, "samples.jsonl") == [{"prompt": "p"}]
    assert verbs.report(["--sync", str(tmp_path)]) == 2


# ---- servers
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts while the tests run that need none."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(starting: Server) -> Server:
    starting.wait()
    return starting


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the seconds that a call may take: few where nobody answers, many where a busy machine
    does.
    """
    monkeypatch.setattr(tracking, "_LAST_RETRY_S", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    return lambda seconds: monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(seconds))


@pytest.fixture
def nobody() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_goes_away_gets_everything_when_it_is_back(
    server: Server, tmp_path: Path, patience: Callable[[int], None]
) -> None:
    notes: list[str] = []
    tracker = _tracker(tmp_path, uri=server.uri, notes=notes)
    tracker.start()
    tracker.log(1, {"score": 0.1})
    _until(lambda: tracker.unsent == 0, "the first row is sent")
    server.kill()
    for step in range(2, 202):
        tracker.log(step, {"score": step / 10, "other": 1.0})
    tracker.log_samples([{"prompt": "p", "response": "r"}])
    _until(lambda: tracker.errors >= 2, "the outage is counted")
    tracker.log(202, {"score": 20.2})
    assert (
        _rows(tmp_path)[-1]["tracking/unsent"] >= 200
        and _rows(tmp_path)[-1]["tracking/errors"] >= 2
    )
    assert "calls failed" in tracker.summary["MLflow"] and "lines wait" in tracker.summary["MLflow"]
    server.start()
    server.wait()
    _until(lambda: tracker.unsent == 0, "the server gets what it missed")
    tracker.finish("FINISHED")
    assert _status(server.uri, tracker.run_id) == "FINISHED"
    rows = [(row["step"], row["score"], round(row["time"] * 1000)) for row in _rows(tmp_path)]
    assert _history(server.uri, tracker.run_id) == rows and len(rows) == 202
    assert len(notes) == 2 and notes[0].endswith(
        "training continues, metrics are kept in metrics.jsonl and sent later"
    )
    assert len(notes[0]) < 150 and notes[1].startswith("MLflow answers again")


def test_what_is_left_at_the_end_is_said_and_sent_by_sync_once(
    server: Server,
    tmp_path: Path,
    patience: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlflow import MlflowClient

    notes: list[str] = []
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    tracker = _tracker(tmp_path, uri=server.uri, notes=notes)
    tracker.start()
    tracker.log(1, {"score": 0.1})
    _until(
        lambda: (
            tracker.unsent == 0 and MlflowClient(server.uri).list_artifacts(tracker.run_id) != []
        ),
        "everything is sent so far, row and config.yaml",
    )
    patience(1)
    server.stop_answering()
    try:
        tracker.log(2, {"score": 0.2})
        tracker.log(3, {"score": 0.3})
        tracker.log_samples([{"prompt": "p", "response": "r"}])
        started = time.monotonic()
        tracker.finish("FAILED")
        assert time.monotonic() - started < tracking.FINISH_TIMEOUT_S + 5
        assert "it lacks 2 lines of metrics.jsonl, status or tags, samples (" in notes[-1]
        assert notes[-1].endswith(f"async-grpo report --sync {tmp_path}")
        assert verbs.report(["--sync", str(tmp_path)]) == 2
        assert "2 lines are left" in capsys.readouterr().err
    finally:
        server.answer_again()
        patience(60)
    before = (tmp_path / STATE).read_text()
    assert verbs.report(["--sync", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 lines sent to MLflow",
        f"MLflow run {tracker.run_id} at {server.uri} is complete: FAILED",
    ]
    history = _history(server.uri, tracker.run_id)
    assert [point[:2] for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3)] and _status(
        server.uri, tracker.run_id
    ) == "FAILED"
    (tmp_path / STATE).write_text(before)  # as if nothing had been acknowledged
    assert verbs.report(["--sync", str(tmp_path)]) == 0
    assert _history(server.uri, tracker.run_id) == history
    assert {
        artifact.path for artifact in MlflowClient(server.uri).list_artifacts(tracker.run_id)
    } == {"config.yaml", "samples.json"}


def test_an_unreachable_server_is_an_error_at_the_start_unless_offline_is_ok(
    server: Server, tmp_path: Path, nobody: str, patience: Callable[[int], None]
) -> None:
    (tmp_path / "refused").mkdir()
    tracker = _tracker(tmp_path / "refused", uri="nonsense://user:secret@server")
    with pytest.raises(
        TrackingError, match=r"nonsense://\*\*\*@server cannot be used .*tracking.offline_ok=true"
    ) as caught:
        tracker.start()
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    tracker.log(0, {"a": 1.0})
    tracker.finish("FAILED")
    assert len(_rows(tmp_path / "refused")) == 1

    notes: list[str] = []
    patience(1)
    offline = _tracker(tmp_path, uri=nobody, notes=notes, offline_ok=True)
    offline.start()
    assert offline.run_id is None
    offline.log(1, {"score": 0.1})
    assert "not reached yet" in offline.summary["MLflow"]
    offline.finish("KILLED")
    assert "training continues" in notes[0] and "it lacks 1 lines of metrics.jsonl, " in notes[-1]
    patience(60)
    resumed = _tracker(
        tmp_path, uri=server.uri, resumed=True
    )  # from a checkpoint that knows no MLflow run
    resumed.start()
    resumed.log(2, {"score": 0.2})
    resumed.finish("FINISHED")
    assert [point[:2] for point in _history(server.uri, resumed.run_id)] == [(1, 0.1), (2, 0.2)]


def test_a_run_that_began_offline_is_created_by_sync(
    server: Server, tmp_path: Path, nobody: str, patience: Callable[[int], None]
) -> None:
    patience(1)
    offline = _tracker(tmp_path, uri=nobody, offline_ok=True)
    offline.start()
    offline.log(1, {"score": 0.1})
    _until(lambda: offline.errors >= 2, "it tries again")
    entered = _tracker(tmp_path, uri=nobody)
    with pytest.raises(TrackingError, match="another process sends"):
        entered.start()
    with pytest.raises(TrackingError, match="another process sends"):
        sync(tmp_path)
    entered.finish("FAILED")
    offline.finish("FINISHED")
    patience(60)
    state = json.loads((tmp_path / STATE).read_text())
    (tmp_path / STATE).write_text(json.dumps([{**entry, "uri": server.uri} for entry in state]))
    assert [line.split(":")[-1].strip() for line in sync(tmp_path)] == [
        "1 lines sent to MLflow",
        "FINISHED",
    ]
    [entry] = json.loads((tmp_path / STATE).read_text())
    from mlflow import MlflowClient

    run = MlflowClient(server.uri).get_run(entry["run_id"])
    assert (run.info.status, run.info.start_time, run.data.params["run.name"]) == (
        "FINISHED",
        entry["created"],
        "tracked",
    )
    assert [point[:2] for point in _history(server.uri, entry["run_id"])] == [(1, 0.1)]


def test_a_server_that_never_answers_does_not_hold_up_log(
    tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "MLFLOW_HTTP_REQUEST_TIMEOUT", "600"
    )  # of the user: it holds the sender for good
    monkeypatch.setattr(tracking, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(tracking, "FINISH_TIMEOUT_S", 0.5)
    for name, offline_ok in (("a", True), ("b", False)):
        (tmp_path / name).mkdir()
        tracker, before = _tracker(tmp_path / name, uri=nobody, offline_ok=offline_ok), _senders()
        if offline_ok:
            tracker.start()
        else:
            with pytest.raises(TrackingError, match="no answer within 0 s"):
                tracker.start()
        for step in range(1000):
            tracker.log(step, {"score": 1.0})
        assert _senders() == before + 1 and tracker.errors == 0, (
            "the sender was to hang in its first call"
        )
        assert len(_rows(tmp_path / name)) == 1000
        tracker.finish("FINISHED")
        assert _senders() == before + 1
        assert json.loads((tmp_path / name / STATE).read_text())[-1]["status"] == "FINISHED"
        again = Outbox(tmp_path / name, "MLflow")
        again.open()  # the lock is free although the thread still hangs
        again.close()


# ---- files
# --------------------------------------------------------------------------------------------------


def test_text_of_a_response_breaks_nothing(finished: tuple[Tracker, Path], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    tracker = _tracker(tmp_path, uri=finished[0].uri)
    tracker.start()
    tracker.log_samples(
        [{"kind": kind, "response": text, "note": "n"} for kind, text in HOSTILE.items()]
    )
    tracker.log(1, {"score": 1.0})
    tracker.finish("FINISHED")
    assert (tracker.errors, tracker.unsent) == (0, 0)
    rows = {row["kind"]: row["response"] for row in _rows(tmp_path, "samples.jsonl")}
    assert list(rows) == list(HOSTILE)
    for kind, text in rows.items():
        if isinstance(text, str):
            assert len(text) < 4100 and all(c.isprintable() or c == "\n" for c in text), kind
            text.encode()
    assert (
        rows["ansi"] == "\\x1b[2J\\x1b]0;owned\\x07"
        and rows["surrogate"] == "\\ud800 \\udfff"
        and rows["bidi"].startswith("\\u202egnp")
    )
    assert (
        rows["text"] == HOSTILE["text"]
        and rows["json"] == HOSTILE["json"]
        and rows["html"] == HOSTILE["html"]
    )
    assert (rows["nan"], rows["infinite"], rows["none"], rows["yes"], rows["number"]) == (
        "nan",
        "inf",
        None,
        True,
        3,
    )
    assert rows["long"].endswith("... (10000000 characters)") and rows["long_controls"].endswith(
        "... (10000000 characters)"
    )
    path = MlflowClient(tracker.uri).download_artifacts(
        tracker.run_id, "samples.json", str(tmp_path)
    )
    table = json.loads(Path(path).read_text(), parse_constant=pytest.fail)
    assert [row[:2] for row in table["data"]] == [[kind, text] for kind, text in rows.items()]


def test_a_full_disk_stops_nothing_and_rows_follow_when_there_is_room(tmp_path: Path) -> None:
    notes: list[str] = []
    tracker = _tracker(tmp_path, mlflow=False, notes=notes)
    tracker.log(0, {"a": 1.0})
    handler, limits = (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, limits[1])
        )
        for step in (1, 2, 3):
            tracker.log(step, {"a": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (
        len(_rows(tmp_path)) == 1
        and len(notes) == 1
        and "cannot be written (File too large)" in notes[0]
    )
    tracker.log(4, {"a": 1.0})
    tracker.finish("FINISHED")
    assert [row["step"] for row in _rows(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_damaged_record_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / STATE).write_text('[{"uri"')
    assert verbs.report(["--sync", str(tmp_path)]) == 2
    assert "move it away" in capsys.readouterr().err
    tracker = _tracker(tmp_path)
    with pytest.raises(TrackingError, match="move it away"):
        tracker.start()
    tracker.finish("FAILED")


# ---- what is told besides numbers
# --------------------------------------------------------------------------------------------------


def test_tags_model_and_its_registration_arrive_once(
    finished: tuple[Tracker, Path], tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    model = tmp_path / "checkpoints" / "step_000007" / "hf"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    client, uri = MlflowClient(finished[0].uri), finished[0].uri
    first = Tracker(
        _config(uri=uri),
        run_dir=tmp_path,
        resume_run_id=None,
        tags={"host": "one", "python": "3.11"},
        note=lambda line: None,
    )
    first.start()
    first.tag("run_epoch", "0")
    first.log_artifact(model, name="model", register="adder")
    first.log(1, {"score": 0.5})
    first.finish("KILLED")
    second = Tracker(
        _config(uri=uri),
        run_dir=tmp_path,
        resume_run_id=first.run_id,
        tags={"host": "two"},
        note=lambda line: None,
    )
    second.start()
    second.tag("run_epoch", "1")
    second.log_artifact(model, name="model", register="adder")
    second.log(2, {"score": 0.5})
    second.finish("FINISHED")
    assert (second.errors, second.unsent) == (0, 0)
    run = client.get_run(first.run_id)
    assert {name: run.data.tags[name] for name in ("host", "python", "run_epoch")} == {
        "host": "two",
        "python": "3.11",
        "run_epoch": "1",
    }
    assert [entry.path for entry in client.list_artifacts(first.run_id, "model")] == [
        "model/config.json"
    ]
    [version] = client.search_model_versions("name = 'adder'")
    assert (version.run_id, version.version) == (first.run_id, 1) and version.source.endswith(
        "/artifacts/model"
    )
    assert json.loads((tmp_path / STATE).read_text())[-1]["todo"] == []


def test_system_metrics_are_rows_like_any_other(
    finished: tuple[Tracker, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "async_grpo.observe.tracking.tracker.SystemMetrics", partial(SystemMetrics, every_s=0.1)
    )
    tracker = _tracker(tmp_path, uri=finished[0].uri, system_metrics=True)
    tracker.start()
    tracker.log(5, {"score": 0.5})
    _until(lambda: len(_rows(tmp_path)) > 2, "some rows of the system")
    tracker.finish("FINISHED")
    rows = _rows(tmp_path)
    measured = [row for row in rows if "system/cpu_utilization_percentage" in row]
    assert len(measured) == len(rows) - 1 and {
        row["step"] for row in measured if row["time"] > rows[0]["time"]
    } <= {0, 5}
    assert all(
        0 < row["system/system_memory_usage_percentage"] < 100
        and row["system/disk_available_megabytes"] > 0
        for row in measured
    )
    assert len(_history(tracker.uri, tracker.run_id, "system/cpu_utilization_percentage")) == len(
        measured
    )


def test_the_code_of_a_run_is_written_down(tmp_path: Path) -> None:
    assert {"host", "python", "packages.torch", "packages.ray"} <= set(tags())
    assert ("code.commit" in tags()) == ("mlflow.source.git.commit" in tags())
    earlier = f"a difference {tmp_path.name}"  # which the checkout of this test cannot hold
    (tmp_path / "code.diff").write_text(earlier)
    written = write_code_state(tmp_path)
    state = json.loads((tmp_path / "code.json").read_text())
    assert {"version", "commit", "digest"} & set(state) and all(path.is_file() for path in written)
    assert (
        (tmp_path / "code.diff").exists()
        == (tmp_path / "code.diff" in written)
        == bool(state.get("changed"))
    )
    assert (
        not (tmp_path / "code.diff").exists() or earlier not in (tmp_path / "code.diff").read_text()
    )


@pytest.mark.parametrize("offline_ok", [False, True])
def test_a_port_that_cannot_be_is_one_sentence(offline_ok: bool) -> None:
    config = _config(uri="http://me:secret@host:99999", offline_ok=offline_ok)
    with pytest.raises(TrackingError, match=r"is http://\*\*\*@host:99999: Port out of range"):
        check_server(config)
    with pytest.raises(TrackingError, match="no scheme: write http://localhost:5000"):
        check_server(_config(uri="localhost:5000", offline_ok=offline_ok))
    with pytest.raises(TrackingError, match=r"begins with htp:, .*: is http: meant"):
        check_server(_config(uri="htp://localhost:5000", offline_ok=offline_ok))


def test_a_sqlite_file_needs_its_directory(tmp_path: Path) -> None:
    check_server(_config(uri=f"sqlite:///{tmp_path}/mlflow.db"))
    check_server(_config(uri=str(tmp_path / "mlruns")))
    with pytest.raises(TrackingError, match="there, which is no directory: create it"):
        check_server(_config(uri=f"sqlite:///{tmp_path}/there/mlflow.db"))
    assert not (tmp_path / "there").exists()


def test_uncommitted_changes_are_written_beside_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, run_dir = tmp_path / "code" / "package", tmp_path / "run"
    package.mkdir(parents=True)
    run_dir.mkdir()
    (package / "a.py").write_text("before\n")

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, "-C", str(package.parent), *arguments], check=True, timeout=60)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(provenance, "_PACKAGE", package)
    assert write_code_state(run_dir) == [run_dir / "code.json"]
    (package / "a.py").write_text("after\n")
    (package / "b.py").write_text("new\n")
    assert write_code_state(run_dir) == [run_dir / "code.json", run_dir / "code.diff"]
    state = json.loads((run_dir / "code.json").read_text())
    assert state["dirty"] and state["changed"] == ["package/a.py"]
    assert state["untracked"] == ["b.py"]
    assert "+after" in (run_dir / "code.diff").read_text()


def test_a_registered_model_is_loaded_by_mlflow_and_generates(
    finished: tuple[Tracker, Path], tmp_path: Path
) -> None:
    import mlflow

    model = Path(write_model(tmp_path / "hf"))
    uri = finished[0].uri
    config = _config(uri=uri, register_model="adds")
    config = config.unchecked_copy(
        update={"run": config.run.unchecked_copy(update={"dir": str(tmp_path)})}
    )
    tracker, said = Tracker(config, run_dir=tmp_path, resume_run_id=None), io.StringIO()
    tracker.start()
    log_model(config, Console(said), tracker, model)
    tracker.finish("FINISHED")
    assert said.getvalue() == "" and tracker.errors == 0
    mlflow.set_tracking_uri(uri)
    try:
        loaded = mlflow.pyfunc.load_model("models:/adds/1")
        answers = loaded.predict(["1+1="], params={"max_new_tokens": 3})
    finally:
        mlflow.set_tracking_uri(None)
    assert len(answers) == 1 and isinstance(answers[0], str)


def test_a_model_that_cannot_be_packaged_is_kept_and_said(tmp_path: Path) -> None:
    config = _config(register_model="adds")
    config = config.unchecked_copy(
        update={"run": config.run.unchecked_copy(update={"dir": str(tmp_path)})}
    )
    (tmp_path / "hf").mkdir()
    sent, said = [], io.StringIO()
    tracker = SimpleNamespace(log_artifact=lambda path, **how: sent.append((path, how)))
    log_model(config, Console(said), tracker, tmp_path / "hf")
    assert sent == [(tmp_path / "hf", {"name": "model", "register": None})]
    assert "is not registered as adds, since MLflow cannot package it" in said.getvalue()


def test_a_model_that_is_too_large_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sent(list):
        def log_artifact(self, path: Path, **how: str | None) -> None:
            self.append((path, how))

    monkeypatch.setattr(tracker_module, "package", lambda model, into: None)
    (tmp_path / "weights").write_bytes(bytes(2**20))
    for limit, sent, lines in ((1.0, 1, 0), (0.0005, 0, 1), (0.0, 0, 0)):
        tracker, said = Sent(), io.StringIO()
        log_model(
            _config(log_model_max_gb=limit, register_model="adder" if limit else None),
            Console(said),
            tracker,
            tmp_path,
        )
        assert (len(tracker), said.getvalue().count("\n")) == (sent, lines), limit
        assert all(how == {"name": "model", "register": "adder"} for _, how in tracker)


def test_rewards_have_columns_of_their_own(tmp_path: Path) -> None:
    tracker = _tracker(tmp_path, mlflow=False)
    tracker.log_samples(
        [
            {
                "step": 3,
                "prompt": "1+1=",
                "rewards": {"correct": 1.0, "format": float("nan")},
                "lag": 2,
            }
        ]
    )
    tracker.finish("FINISHED")
    assert _rows(tmp_path, "samples.jsonl") == [
        {"step": 3, "prompt": "1+1=", "lag": 2, "reward/correct": 1.0, "reward/format": "nan"}
    ]


def test_a_run_that_was_killed_is_completed_by_sync_or_by_the_next_one(
    finished: tuple[Tracker, Path], tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    uri, program = (
        finished[0].uri,
        f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.mlflow_server import Begins, _tracker, _until
tracker = _tracker(Path({str(tmp_path)!r}), uri={finished[0].uri!r}, kind=Begins)
tracker.start()
tracker.log(1, {{"score": 0.5}})
_until(lambda: tracker.unsent == 0, "the first row is sent")
Begins.silent = True
tracker.log(2, {{"score": 0.6}})
with open({str(tmp_path / "metrics.jsonl")!r}, "a") as file:
    file.write('{{"step": 3, "ti')
print(tracker.run_id, flush=True)
os.kill(os.getpid(), 9)
""",
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        cwd=ROOT,
        timeout=WITHIN_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL
    killed = done.stdout.strip()
    assert _status(uri, killed) == "RUNNING"
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    assert sync(copy)[-1] == f"MLflow run {killed} at {uri} is complete: KILLED"
    assert _status(uri, killed) == "KILLED" and len(_history(uri, killed)) == 2
    MlflowClient(uri).update_run(killed, status="RUNNING")
    tracker = _tracker(tmp_path, uri=uri)
    tracker.start()
    tracker.log(1, {"score": 0.7})
    tracker.finish("FINISHED")
    assert _status(uri, killed) == "KILLED" and [point[:2] for point in _history(uri, killed)] == [
        (1, 0.5),
        (2, 0.6),
    ]
    assert tracker.run_id != killed and _status(uri, tracker.run_id) == "FINISHED"
    assert [point[:2] for point in _history(uri, tracker.run_id)] == [(1, 0.7)]
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 1]
