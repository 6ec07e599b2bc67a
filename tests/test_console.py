"""What reaches the stream: how often, in which form, and without control characters where nobody looks at a screen."""

from __future__ import annotations

import io

import pytest

from async_grpo.console import Console


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {
    "rollout/score": 0.5, "rollout/accuracy": 0.37, "train/lag_mean": 0.81, "train/lag_max": 1.0, "rollout/response_length": 4.21,
    "train/tokens_per_s": 412.4, "time/learner_idle": 0.12, "train/grad_norm": float("nan"), "other": 3.0,
}  # fmt: skip


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
        console.step(step, 100, METRICS)
        clock.now += 0.125
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "17/100", "33/100", "49/100", "65/100", "81/100", "97/100", "100/100"]
    assert lines[-1] == (
        "step 100/100  score 0.50  accuracy 37%  lag 0.81  max 1  length 4.2  412 tok/s  idle 12%"
    )


def test_plain_output_has_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    console = Console(stream)
    console.info("[bold]answer[/bold] \x1b[31mred\r " + "x" * 300)
    console.error("lost engine 2")
    console.summary("Result\x07", [("accuracy", "37% -> 91%"), ("run", "/a" * 100 + "\x1b]0;title\x07")])
    with console.phase("starting 1 engine"):
        pass
    text = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "[bold]answer[/bold] \\x1b[31mred\\r " + "x" * 300 + "\n" in text
    assert "error: lost engine 2\n" in text
    assert "accuracy   37% -> 91%" in text
    assert "/a" * 100 in text, "a row outside a terminal is one line"


def test_phases_report_seconds_and_failures() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, clock=clock)
    with console.phase("starting 1 engine"):
        clock.now += 14.2
    with pytest.raises(OSError, match="gone"), console.phase("saving"):
        clock.now += 1.5
        raise OSError("gone")
    assert stream.getvalue().splitlines() == [
        "starting 1 engine ...", "starting 1 engine ... 14.2 s", "saving ...", "saving ... failed after 1.5 s"
    ]  # fmt: skip


def test_a_terminal_gets_one_refreshed_status_line() -> None:
    stream, clock = Terminal(), Clock()
    console = Console(stream, clock=clock)
    for step in range(1, 31):
        console.step(step, 30, METRICS)
        clock.now += 0.125
    text = stream.getvalue()
    shown = [step for step in range(1, 31) if f"step {step:>2}/30" in text]
    assert shown == [1, 9, 17, 25, 30]
    # Until the last step nothing scrolls: every line before it is erased again.
    assert text.count("\x1b[2K") >= 3
    assert text.endswith("idle 12%\n")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
