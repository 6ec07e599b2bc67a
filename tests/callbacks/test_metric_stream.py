"""JSON lines to a file, a named pipe and a URL, with readers that are slow or gone."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.callbacks import metric_stream
from async_grpo.callbacks.metric_stream import MetricStream

TRAINER: Any = SimpleNamespace(
    steps_done=0, total_steps=3, config=SimpleNamespace(run=SimpleNamespace(name="r"))
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_stream, "PAUSE_S", 0.01)
    monkeypatch.setattr(metric_stream, "CLOSE_S", 5.0)


def tell_all(stream: MetricStream, steps: int = 3) -> None:
    stream.on_start(TRAINER)
    for step in range(1, steps + 1):
        stream.on_step(TRAINER, {"training_iteration": step, "loss": 0.5, "bad": float("nan")})
    stream.on_publication(TRAINER, 3, 0.1)
    stream.on_evaluation(TRAINER, 3, {"eval/accuracy_greedy": 1.0})
    stream.on_checkpoint(TRAINER, 3, Path("/c"))
    stream.on_fault(TRAINER, "an actor died")
    stream.on_end(TRAINER, "FINISHED")


def check(text: str, steps: int = 3) -> None:
    lines = [json.loads(line) for line in text.splitlines()]
    events = ["start", *["step"] * steps, "publication", "evaluation", "checkpoint", "fault", "end"]
    assert [line["event"] for line in lines] == events
    assert [line["step"] for line in lines[1 : steps + 1]] == list(range(1, steps + 1))
    assert lines[1]["bad"] is None and lines[1]["loss"] == 0.5 and lines[0]["total_steps"] == 3
    assert lines[-1]["status"] == "FINISHED" and all(line["run"] == "r" for line in lines)


def test_a_file_gets_the_lines_behind_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("before\n")
    tell_all(MetricStream(str(tmp_path / "out")))
    first, _, rest = (tmp_path / "out").read_text().partition("\n")
    assert first == "before"
    check(rest)


def test_a_pipe_gets_them_once_somebody_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    threading.Timer(0.2, reader.start).start()
    tell_all(MetricStream(str(tmp_path / "pipe")))
    reader.join(5)
    check(read[0])


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_stream, "CLOSE_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TimeoutError, match="did not take all lines"):
        tell_all(MetricStream(str(tmp_path / "pipe")))
    os.close(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK))  # lets the thread go


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_stream, "BACKLOG", 3)
    os.mkfifo(tmp_path / "pipe")
    stream = MetricStream(str(tmp_path / "pipe"))
    stream._lines.maxsize = 3
    stream.on_start(TRAINER)
    for step in range(1, 11):
        stream.on_step(TRAINER, {"training_iteration": step})
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    while not stream._lines.empty():
        pass
    stream.on_end(TRAINER, "FINISHED")
    reader.join(5)
    lines = [json.loads(line) for line in read[0].splitlines()]
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 10
    assert lines[-1]["event"] == "end" and lines[-1]["dropped"] == 10 - len(steps)


@pytest.fixture
def server() -> Iterator[Any]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            web.got.append((self.headers["Content-Type"], body.decode()))
            self.send_response(web.status)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    web: Any = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    web.got, web.status = [], 200
    threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
    yield web
    web.shutdown()
    web.server_close()


def test_a_url_gets_them_as_posts(server: Any) -> None:
    tell_all(MetricStream(f"http://127.0.0.1:{server.server_port}/in"), steps=30)
    assert {kind for kind, _ in server.got} == {"application/x-ndjson"}
    check("".join(text for _, text in server.got), steps=30)


@pytest.mark.parametrize("where", ["refuses", "nowhere"])
def test_a_url_that_takes_nothing_is_said(server: Any, where: str) -> None:
    server.status = 500
    port = server.server_port if where == "refuses" else 1
    with pytest.raises(RuntimeError, match="did not take the lines"):
        tell_all(MetricStream(f"http://127.0.0.1:{port}/in"))
