"""What reaches the stream: how often, in which form, and without control characters where nobody
looks at a screen.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from async_grpo.errors import StopRequested
from async_grpo.observe.console.console import Console
from async_grpo.observe.console.status_file import read_status, read_timeline
from tests.support.waiting import wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


METRICS = {
    "rollout/score": 0.5,
    "rollout/accuracy": 0.37,
    "train/staleness_mean": 0.81,
    "train/staleness_max": 1.0,
    "rollout/response_length": 4.21,
    "train/tokens_per_s": 412.4,
    "time/learner_idle": 0.12,
    "time/step": 0.1,
    "train/grad_norm": float("nan"),
    "other": 3.0,
}


@pytest.fixture(autouse=True)
def _terminal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")


def test_plain_step_lines_are_rare_and_complete() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, clock=clock)
    for step in range(1, 101):
        console.logged(step, 100, METRICS)
        clock.now += 0.25
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "41/100", "81/100", "100/100"]
    assert lines[-1] == (
        "step 100/100  score 0.50  accuracy 37%  staleness 0.81  max 1  length 4.2  "
        "412 tok/s  idle 12%"
    )


def test_the_last_step_of_a_run_that_ends_early_is_printed_once() -> None:
    stream = io.StringIO()
    console = Console(stream, clock=Clock())
    for step in range(1, 8):
        console.logged(step, 100, METRICS)
    console.error("a disk is gone")
    for _ in range(2):
        console.end(4, "a disk is gone")
    lines = stream.getvalue().splitlines()
    assert [line.partition("  score")[0] for line in lines] == [
        "step   1/100",
        "error: a disk is gone",
        "step   7/100",
    ]


def test_a_verdict_is_a_line_when_it_is_another_one_after_half_a_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, clock=clock)
    for second in range(70):
        clock.now = 100.0 + second
        console.bottleneck(kind="learner" if second < 20 else "engines", text=f"at {second}")
    assert stream.getvalue().splitlines() == [f"bottleneck: at {second}" for second in (0, 30)]


def test_plain_output_has_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    console = Console(stream)
    console.info("[bold]answer[/bold] \x1b[31mred\r " + "x" * 300)
    console.error("lost engine 2")
    console.summary(
        "Result\x07", [("accuracy", "37% -> 91%"), ("run", "/a" * 100 + "\x1b]0;title\x07")]
    )
    with console.phase("starting 1 engine"):
        pass
    text = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "[bold]answer[/bold] \\x1b[31mred\\r " + "x" * 300 + "\n" in text
    assert "error: lost engine 2\n" in text
    assert "accuracy   37% -> 91%" in text
    assert "/a" * 100 in text, "a row outside a terminal is one line"


COPIES = """
from async_grpo.observe.console.console import Console
console = Console()
console.info("a note with " + "words " * 30)
console.info("its post-mortem is in /tmp/" + "x" * 100 + "/here, look at it")
console.summary("finished", [
    ("next", "python -m async_grpo.run /tmp/" + "y" * 90 + "/config.yaml run.total_steps=500"),
    ("bottleneck", "learner idle, " + "and engines full " * 12),
])
"""


def test_on_a_terminal_words_are_whole_and_commands_are_not_broken() -> None:
    text, code = on_a_terminal(COPIES)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).splitlines()]
    assert code == 0
    assert "its post-mortem is in /tmp/" + "x" * 100 + "/here, look at it" in lines
    [command] = [line for line in lines if "python -m" in line]
    assert command.endswith("/config.yaml run.total_steps=500") and len(command) > 140
    others = [line for line in lines if "words" in line or "engines" in line]
    assert len(others) == 4 and all(len(line) <= 140 for line in others)
    assert all(word in ("words", "a", "note", "with") for word in " ".join(others[:2]).split())
    assert others[3].startswith(" " * 12), "the second line of a row is below the first"


def test_phases_report_seconds_and_failures() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, clock=clock)
    with console.phase("starting 1 engine"):
        clock.now += 14.2
    with pytest.raises(OSError, match="gone"), console.phase("saving"):
        clock.now += 1.5
        raise OSError("gone")
    console.stopping()
    with pytest.raises(StopRequested), console.phase("evaluating"):
        raise StopRequested("the run was asked to end")
    assert stream.getvalue().splitlines() == [
        "starting 1 engine ... 14.2 s",
        "saving ... failed after 1.5 s",
        "evaluating ... stopped after 0.0 s",
    ]


def test_a_long_phase_says_that_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.observe.console.console._PLAIN_INTERVAL_S", 0.01)
    stream, times = io.StringIO(), iter([100.0, 110.0, 114.0])  # as the clock is read
    console = Console(stream, clock=times.__next__)
    with console.phase("starting 1 engine"):
        wait_until(stream.getvalue, 60, "a line")
    assert stream.getvalue().splitlines() == [
        "starting 1 engine ... 10 s so far",
        "starting 1 engine ... 14.0 s",
    ]


def test_a_run_may_begin_inside_a_phase(tmp_path: Path) -> None:
    console = Console(io.StringIO())
    with console.phase("everything"):
        before = console.progress
        console.begin_run(tmp_path, run="mine")
        with console.phase("inside"):
            assert console.progress.facts()["phase"] == "inside"
    assert console.progress is not before and console.progress.facts()["phase"] == "starting"
    console.end(0, "")
    assert read_status(tmp_path)["exit_code"] == 0
    assert [event["text"] for event in read_timeline(tmp_path) if event["kind"] == "phase"] == [
        "inside",
        "everything",
    ]


def test_evaluations_and_checkpoints_print_no_step_line() -> None:
    stream = io.StringIO()
    console = Console(stream, clock=Clock())
    console.logged(5, 10, {"eval/accuracy_greedy": 0.5})
    console.logged(5, 10, {"checkpoint/mib": 3.0})
    assert stream.getvalue() == "" and console.progress.facts()["evaluations"] == [[5, 0.5]]


SCRIPT = """
import itertools, os, sys, time
from async_grpo.observe.console.console import Console
seconds = {"clock": itertools.count().__next__} if sys.stdout.isatty() else {}
console = Console(**seconds)  # on a terminal each step is drawn
with console.phase("starting engines"):
    time.sleep(0.2)
metrics = {"time/step": 0.1, "time/wait": 0.02, "rollout/response_tokens": 50.0,
    "rollout/score": 0.5, "train/staleness_mean": 0.8, "train/staleness_max": 1.0,
    "replay/ready": 7.0, "replay/capacity": 64.0, "replay/live_version": 3.0,
    "cluster/rollout_actors": 2.0, "train/tokens_per_s": 500.0, "time/learner_idle": 0.2}
console.bottleneck(kind="engines", text="learner idle 41 %: " + "add rollout actors " * 12)
for step in range(1, 31):
    console.logged(step, 30, metrics | {"rollout/score": step / 30, "replay/live_version": step,
        "time/learner/idle": 0.02 * step, "time/learner/working": 0.08 * step})
    if step == 10:
        console.info("a rollout actor \x1b[31mdied\x07")
    if step == 15 and len(sys.argv) > 2:
        console.info("resize")
        while os.get_terminal_size(1).columns != int(sys.argv[2]):
            time.sleep(0.01)
        console.info("resized")
    time.sleep(float(sys.argv[1]))
console.summary("finished", [("accuracy", "37 % -> 91 %")])
console.end(0, "")
"""


NOISE = """
import os, subprocess, sys, threading, time
from async_grpo.observe.console.console import Console
console = Console()
def fails():
    raise ValueError("in a thread")
with console.phase("starting engines"):
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    subprocess.run(["sh", "-c", "echo from a child >&2"], check=True)
    os.write(2, b"\\x1b[31mraw\\x1b[0m\\x1b[2J\\n")
    os.write(2, b" 10%\\r 90%\\r100%")
    late = subprocess.Popen(
        ["sh", "-c", "read line; echo late >&2 && echo it lives"], stdin=subprocess.PIPE)
console.end(0, "")
print("after the panel", file=sys.stderr)
late.communicate(b"go", timeout=20)
"""


def on_a_terminal(
    script: str, columns: int = 140, rows: int = 40, *, resized: tuple[int, int] | None = None
) -> tuple[str, int]:
    """What a script writes to a pseudo-terminal of its own, and its exit code (-9: it did not end
    by itself). resized: columns and rows from when it says `resize` on.
    """

    def size(columns: int, rows: int) -> None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    ours, theirs = pty.openpty()
    size(columns, rows)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script, "0.05", *map(str, resized or ())],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    if resized is None:
        os.close(theirs)
    written = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            written += os.read(ours, 65536)
            if resized and b"resize" in written:
                size(*resized)
                os.close(theirs)
                resized = None
        process.kill()
    except OSError as error:  # EIO: the other side is closed
        assert error.errno == errno.EIO
    finally:
        os.close(ours)
    return written.decode(), process.wait(timeout=20)


def test_what_others_write_to_stderr_comes_above_the_panel() -> None:
    text, code = on_a_terminal(NOISE)
    assert code == 0
    panel, _, rest = text.partition("after the panel")
    lines = [line for frame in frames(panel) for line in frame]
    for line in ("ValueError: in a thread", "from a child", "raw\\x1b[2J", "100%"):
        assert line in lines, f"{line} has a line of its own"
    assert "\x1b[2J" not in text and "\x1b[31m" not in text and "90%" not in text
    assert "it lives" in rest, "a child that still writes there is not killed by it"


def test_the_traceback_of_a_script_that_dies_with_the_panel_on_is_shown() -> None:
    text, code = on_a_terminal(
        "from async_grpo.observe.console.console import Console\nc = "
        "Console()\nc.logged(1, 2, {'time/step': 1.0})\nraise ValueError('unforeseen')"
    )
    assert code == 1 and "ValueError: unforeseen" in text


def frames(text: str) -> list[list[str]]:
    """Lines as they were written between two erasures of a line, without escape sequences."""
    return [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).replace("\r", "").split("\n")
        for frame in text.split("\x1b[2K")
    ]


@pytest.mark.parametrize(("columns", "rows"), [(140, 40), (60, 24), (24, 5)])
def test_a_terminal_gets_a_panel_that_fits(columns: int, rows: int) -> None:
    text, code = on_a_terminal(SCRIPT, columns, rows)
    assert code == 0
    shown = frames(text)
    assert (
        any(
            "step" in line and "elapsed" in line
            for frame in shown
            for line in frame
            if columns > 30
        )
        or columns <= 30
    )
    assert (
        max(
            len(line)
            for frame in shown
            for line in frame
            if "31mdied" not in line and "score" not in line and " ... " not in line
        )
        <= columns
    )
    assert max(len(frame) for frame in shown) <= rows + 8, "a few lines are printed above the panel"
    assert "\\x1b[31mdied\\x07" in text and "\x1b[31m" not in text and "\x07" not in text
    if rows > 8:
        assert all(
            word in text
            for word in (
                "reward",
                "tokens/s",
                "staleness mean 0.80",
                "actors up 2",
                "version 3",
                "bottleneck",
                "learner idle 41 %",
            )
        )
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert "finished" in frames(text)[-1][-1] or "finished" in text[text.rindex("\x1b[?25h") :], (
        "the table comes after the panel"
    )


def test_a_terminal_may_change_its_size() -> None:
    text, _ = on_a_terminal(SCRIPT, 120, 30, resized=(30, 6))
    assert "Traceback" not in text and "step 30/30" in text
    before, after = text.split("resized", 1)
    assert any("tokens/s" in line for frame in frames(before) for line in frame)
    drawn = [line for frame in frames(after) for line in frame if line.startswith("step 20/30")]
    assert (
        drawn
        and max(map(len, drawn)) <= 30
        and "tokens/s" not in after[after.index("step 20/30") :]
    ), "one line, that fits"


def test_a_pipe_gets_lines_without_control_characters() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "0"], capture_output=True, text=True, timeout=60, check=True
    )
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("starting engines ... 0.")
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/30", "30/30"]
    assert lines[-2:] == ["finished", "  accuracy   37 % -> 91 %"]
