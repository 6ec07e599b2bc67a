"""JSON lines to a file, a named pipe and a URL, with readers that are slow or gone."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.contrib import metric_stream
from async_grpo.contrib.metric_stream import MetricStream
from tests.support.waiting import wait_until

SAID: list[str] = []
TRAINER: Any = SimpleNamespace(
    steps_done=0,
    total_steps=3,
    config=SimpleNamespace(run=SimpleNamespace(name="r")),
    console=SimpleNamespace(error=SAID.append),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_stream, "PAUSE_S", 0.01)
    monkeypatch.setattr(metric_stream, "CLOSE_S", 5.0)
    SAID.clear()


def tell_all(stream: MetricStream, steps: int = 3) -> None:
    stream.on_start(TRAINER)
    for step in range(1, steps + 1):
        stream.on_step(TRAINER, {"training_iteration": step, "loss": 0.5, "bad": float("nan")})
    stream.on_weight_sync(TRAINER, 3, 0.1)
    stream.on_evaluation(TRAINER, 3, {"eval/accuracy_greedy": 1.0})
    stream.on_checkpoint(TRAINER, 3, Path("/c"))
    stream.on_fault(TRAINER, "an actor died")
    stream.on_end(TRAINER, "FINISHED")


def check(text: str, steps: int = 3) -> None:
    lines = [json.loads(line) for line in text.splitlines()]
    events = ["start", *["step"] * steps, "weight_sync", "evaluation", "checkpoint", "fault", "end"]
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
    monkeypatch.setattr(metric_stream, "CLOSE_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    stream = MetricStream(str(tmp_path / "pipe"))
    tell_all(stream)
    assert stream._thread is not None and not stream._thread.is_alive()
    assert "did not take the last 9 lines, and 0 before them" in SAID[-1]


def test_a_reader_that_goes_away_and_another_that_comes(tmp_path: Path) -> None:
    """Nothing is raised, and the other one has what is said from then on."""
    os.mkfifo(tmp_path / "pipe")
    stream, first = MetricStream(str(tmp_path / "pipe")), tmp_path / "pipe"
    stream.on_start(TRAINER)
    with open(first) as reader:
        assert json.loads(reader.readline())["event"] == "start"
    for step in range(1, 6):
        stream.on_step(TRAINER, {"training_iteration": step})
        time.sleep(0.02)
    read: list[str] = []
    other = threading.Thread(target=lambda: read.append(first.read_text()))
    other.start()
    stream.on_end(TRAINER, "FINISHED")
    other.join(5)
    events = [json.loads(line)["event"] for line in read[0].splitlines()]
    assert events[-1] == "end" and events.count("step") >= 4
    assert any("takes no lines now" in line for line in SAID)


def test_what_does_not_fit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_stream, "BACKLOG", 3)
    os.mkfifo(tmp_path / "pipe")
    stream = MetricStream(str(tmp_path / "pipe"))
    stream.on_start(TRAINER)
    for step in range(1, 11):
        stream.on_step(TRAINER, {"training_iteration": step})
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    wait_until(lambda: not stream._lines, 5, "the reader to have what there is")
    stream.on_end(TRAINER, "FINISHED")
    reader.join(5)
    lines = [json.loads(line) for line in read[0].splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2]
    assert lines[-1]["event"] == "end" and lines[-1]["dropped"] == 8


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MetricStream(str(tmp_path / "no" / "such")).on_start(TRAINER)


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


def test_a_url_that_fails_for_a_while_gets_all_of_them(server: Any) -> None:
    server.status = 500
    stream = MetricStream(f"http://127.0.0.1:{server.server_port}/in")
    stream.on_start(TRAINER)
    wait_until(lambda: len(server.got) > 2, 5, "some attempts")
    server.status, before = 200, len(server.got)
    wait_until(lambda: not stream._lines, 5, "the line to be taken")
    stream.on_end(TRAINER, "FINISHED")
    taken = "".join(text for _, text in server.got[before - 1 :])
    assert '"start"' in taken and '"end"' in taken and not stream._lines
    assert "takes no lines now: HTTP Error 500" in SAID[0] and len(SAID) == 1


def test_a_url_that_is_nowhere_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_stream, "CLOSE_S", 0.2)
    tell_all(MetricStream("http://127.0.0.1:1/in"))
    assert "did not take the last 9 lines" in SAID[-1]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"garbage\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200, "got more than 100 headers"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[bad\r\n\r\n", "Invalid IPv6 URL"),
    ],
)
def test_a_server_that_answers_nonsense_is_tried_again(answer: bytes, says: str) -> None:
    def serve() -> None:
        fine = b"HTTP/1.1 200 OK\r\n\r\n"
        for text in (answer, answer, fine, fine):
            taken, _ = listener.accept()
            with taken:
                while not got.endswith(b"}\n"):
                    got.extend(taken.recv(65536))
                got.append(0)
                taken.sendall(text)

    got = bytearray()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        stream = MetricStream(f"http://127.0.0.1:{listener.getsockname()[1]}/in")
        stream.on_start(TRAINER)
        wait_until(lambda: not stream._lines, 5, "the third answer")
        stream.on_end(TRAINER, "FINISHED")
        server.join(5)
    assert got.count(b'"start"') == 3 and got.count(b'"end"') == 1
    assert len(SAID) == 1 and f"takes no lines now: {says}" in SAID[0] and "\n" not in SAID[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://exa mple:80/",
        "https://[bad",
        "http://",
        "http://host:port/",
        "http://host:99999/",
        "http://host/\n",
        "http://host/\u00e4",
        "http://somebody:secret@host/",
    ],
)
def test_what_is_no_url_is_said_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL that can be posted to: give it as") as caught:
        MetricStream(url)
    assert "secret" not in str(caught.value)
