"""Weights & Biases as a tracker: what is in its own files offline, and at a double of its API."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from async_grpo.config.schema import Config
from async_grpo.observe.tracking import sender, wandb_sink
from async_grpo.observe.tracking.sink import Point
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.observe.tracking.wandb_sink import WandbSink
from async_grpo.tools.report.sync import sync
from tests.support.machine_speed import slowness
from tests.support.mlflow_server import _until
from tests.support.wandb_server import WandbServer

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0
STATE = "wandb_sent.json"


@pytest.fixture(autouse=True)
def _own_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's keys
    yield
    wandb.teardown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    made = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", made.url)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    yield made
    made.close()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT_S", wandb_sink.INIT_TIMEOUT_S * slowness())


def tracker_in(run_dir: Path, notes: list[str] | None = None, **options: Any) -> Tracker:
    config = Config.model_validate(
        {
            "run": {"name": "tracked", "total_steps": 9, "dir": str(run_dir)},
            "model": {"path": "m"},
            "tracking": {"mlflow": False, "also": ["wandb"], "system_metrics": False},
        }
    )
    note = (lambda line: None) if notes is None else notes.append
    return Tracker(config, run_dir=run_dir, resume_run_id=None, note=note, **options)


def run_once(run_dir: Path, *steps: int, **options: Any) -> Tracker:
    tracker = tracker_in(run_dir, tags={"code": "v1"}, **options)
    tracker.start()
    for step in steps:
        tracker.log(step, {"score": step / 10, "train/rho": 1.0})
        time.sleep(0.002)  # a row's own millisecond
    tracker.log_samples([{"prompt": "1+1=", "response": "2", "reward": None}])
    tracker.finish("FINISHED")
    return tracker


def records(path: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: a log of LevelDB's, in blocks of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # complete, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""
        if (left := -at % 32768) < 7:
            at += left


def found(run_dir: Path) -> dict[str, Any]:
    """The newest run of the directory, as W&B's file has it."""
    [path] = (run_dir / "wandb" / "latest-run").glob("*.wandb")
    rows, config, summary, code, run_id = [], {}, {}, None, ""
    for record in records(path):
        kind = record.WhichOneof("record_type")
        one = getattr(record, kind)
        if kind == "history":
            rows.append(
                {item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.item}
            )
        elif kind == "summary":
            for item in one.update:
                summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
        elif kind in ("config", "run"):
            run_id = one.run_id if kind == "run" else run_id
            for item in (one.config if kind == "run" else one).update:
                config[item.key or item.nested_key[0]] = json.loads(item.value_json)
        elif kind == "exit":
            code = one.exit_code
    return {"rows": rows, "config": config, "summary": summary, "code": code, "id": run_id}


def steps_of(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["learner_step"], row["score"]) for row in rows]


@pytest.mark.usefixtures("offline")
def test_offline_its_file_has_what_the_run_has(tmp_path: Path) -> None:
    tracker = run_once(tmp_path, *range(1, 6))
    assert (tracker.errors, tracker.unsent) == (0, 0)
    has = found(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert steps_of(has["rows"]) == [(line["step"], line["score"]) for line in lines]
    assert [row["_timestamp"] for row in has["rows"]] == [line["time"] for line in lines]
    assert not any("train/rho" in row for row in has["rows"]), "only the main metrics"
    assert has["config"]["run.name"] == "tracked" and has["config"]["tags.code"] == "v1"
    table = tmp_path / "wandb" / "latest-run" / "files" / has["summary"]["samples"]["path"]
    shown = json.loads(table.read_text())
    assert (shown["columns"], shown["data"]) == (
        ["prompt", "response", "reward"],
        [["1+1=", "2", None]],
    )
    assert has["code"] == 0
    assert list(tracker.summary) == ["WandB"]
    assert tracker.ready()[0].endswith(f"wandb sync {tmp_path / 'wandb' / 'latest-run'}")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("status", "code"), [("FAILED", 1), ("KILLED", 255)])
def test_how_a_run_ended_is_its_exit_code(tmp_path: Path, status: Any, code: int) -> None:
    tracker = tracker_in(tmp_path)
    tracker.start()
    tracker.conclude(status)
    tracker.log(1, {"score": 0.1})  # after what was only to be noted
    tracker.finish(status)
    assert steps_of(found(tmp_path)["rows"]) == [(1, 0.1)] and found(tmp_path)["code"] == code
    assert (tracker.errors, tracker.unsent) == (0, 0)


@pytest.mark.usefixtures("offline")
def test_offline_a_run_that_goes_on_has_all_rows_in_its_newest_directory(tmp_path: Path) -> None:
    run_once(tmp_path, 1, 2)
    first = found(tmp_path)["id"]
    run_once(tmp_path, 3, resumed=True)
    assert found(tmp_path)["id"] == first
    assert steps_of(found(tmp_path)["rows"]) == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_run_that_goes_on_goes_on_there_and_nothing_is_there_twice(
    tmp_path: Path, server: WandbServer
) -> None:
    first = run_once(tmp_path, 1, 2)
    assert (first.errors, first.unsent) == (0, 0)
    [run] = server.history
    state = json.loads((tmp_path / STATE).read_text())
    state[0]["metrics"]["sent"] = 0  # a crash before it was noted
    (tmp_path / STATE).write_text(json.dumps(state))
    run_once(tmp_path, 3, resumed=True)
    assert list(server.history) == [run]
    assert steps_of(server.rows(run)) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert server.exits == {run: [0, 0]} and server.table()["data"][0][:2] == ["1+1=", "2"]
    assert server.config[run]["run.name"] == {"value": "tracked"}


def test_what_comes_twice_or_out_of_order_is_there_once(
    tmp_path: Path, server: WandbServer
) -> None:
    points = [Point("score", n / 10, 1000 * n, n) for n in range(1, 5)]
    sink = WandbSink(None, tmp_path)
    facts = wandb_sink.RunFacts(uri=None, experiment="e", name="n", parameters={}, key="k" * 32)
    run_id = sink.start(facts)
    sink.log(run_id, points=points[1::-1])
    sink.log(run_id, points=points)
    sink.log(run_id, points=points[:3])
    sink.set_status(run_id, "FINISHED", None)
    sink.set_status(run_id, "FINISHED", None)
    assert steps_of(server.rows(run_id)) == [(n, n / 10) for n in range(1, 5)]
    assert server.exits == {run_id: [0]}


@pytest.mark.parametrize("ails", ["500", "hangs", "refused"])
def test_a_server_that_is_away_holds_up_nothing_and_gets_the_rest_later(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch, ails: str
) -> None:
    monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sender, "FINISH_TIMEOUT_S", 0.5)
    server.ails, notes, begun = ails, [], time.monotonic()
    if ails == "refused":
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracker = run_once(tmp_path, 1, 2, notes=notes)
    assert time.monotonic() - begun < WITHIN_S / 4
    assert tracker.errors and tracker.unsent == 2
    assert notes[0].startswith("WandB: ") and "training continues" in notes[0]
    assert "it lacks 2 lines of metrics.jsonl" in notes[-1] and "report --sync" in notes[-1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    server.ails = ""
    monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT_S", 10.0)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    sender_threads_end()
    assert sync(tmp_path, WandbSink)[0] == "2 lines sent to WandB"
    [run] = server.history
    assert steps_of(server.rows(run)) == [(1, 0.1), (2, 0.2)] and server.exits == {run: [0]}


def sender_threads_end() -> None:
    """Wait for senders that were given up."""
    for thread in threading.enumerate():
        if thread.name == sender.THREAD:
            thread.join(WITHIN_S)
            assert not thread.is_alive()


def test_a_server_that_comes_back_gets_all_while_the_run_is_on(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT_S", 0.5)
    server.ails, notes = "500", []
    tracker = tracker_in(tmp_path, notes)
    tracker.start()
    tracker.log(1, {"score": 0.1})
    server.ails = ""
    monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT_S", 10.0)
    _until(lambda: tracker.unsent == 0, "it has the row")
    tracker.finish("FINISHED")
    [run] = server.history
    assert steps_of(server.rows(run)) == [(1, 0.1)]
    assert notes[1:] == ["WandB answers again, and has all metrics"]


PROGRAM = """
import sys
from pathlib import Path
from async_grpo.observe.tracking import sender, wandb_sink
from tests.observe.test_wandb import tracker_in
sender.FINISH_TIMEOUT_S, wandb_sink.UPLOAD_TIMEOUT_S = 1.0, 600.0
tracker = tracker_in(Path(sys.argv[1]), notes := [])
tracker.start()
tracker.log(1, {"score": 0.1})
print("ready", flush=True)
sys.stdin.readline()
tracker.log_samples([{"prompt": "1+1=", "response": "2"}])
tracker.finish("FINISHED")
print(notes[-1][:40], flush=True)
"""


@pytest.mark.slow
def test_a_process_ends_though_the_server_hangs(tmp_path: Path, server: WandbServer) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        server.ails, begun = "hangs", time.monotonic()
        out, err = process.communicate("\n", timeout=WITHIN_S)
    assert time.monotonic() - begun < WITHIN_S / 3
    assert process.returncode == 0 and "Traceback" not in err, err
    assert out == "WandB does not have all of this run: it \n"
    server.ails = ""
    assert sync(tmp_path, WandbSink)[-1].endswith("is complete: FINISHED")
    [run] = server.history
    assert steps_of(server.rows(run)) == [(1, 0.1)] and server.table()["data"] == [["1+1=", "2"]]


def test_without_a_key_nobody_is_asked_and_the_run_begins(tmp_path: Path) -> None:
    ours, terminal = pty.openpty()
    program = PROGRAM.replace("sys.stdin.readline()", "tracker.log(2, {})").replace(
        "print(notes[-1][:40]", "print(notes[0]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=WITHIN_S,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    os.close(ours)
    assert "No API key configured" in done.stdout and "wandb login" in done.stdout
    assert "training continues" in done.stdout
