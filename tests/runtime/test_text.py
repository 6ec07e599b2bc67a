"""Text for people: what shows, how long, and errors on one line."""

from __future__ import annotations

import pytest

from async_grpo.errors import SetupError
from async_grpo.runtime.text import (
    ERROR_CHARS,
    ago,
    counted,
    duration,
    one_line,
    raised,
    visible,
    without_password,
)


def test_what_a_library_raised_is_a_part_of_a_sentence() -> None:
    said = [
        raised(AttributeError("'MiniMaxM2Config' object has no attribute 'rotary_dim'")),
        raised(AssertionError()),
        raised(ValueError("not supported\nfor now.")),
    ]
    assert said == [
        "its configuration has no `rotary_dim`",
        "it fails a check that says no more (AssertionError)",
        "ValueError: not supported for now",
    ]


def test_control_characters_show_and_newlines_stay_where_they_are_wanted() -> None:
    assert visible("a\x1b[31m\n\tb\ud800é") == "a\\x1b[31m\n\tb\\ud800é"
    assert visible("a\n\tb", keep="") == "a\\n\\tb"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (99, "99 s"), (100, "1 min"), (7200, "2 h"), (260_000, "3 days")],
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    assert ago(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(104.4, "104 s"), (299.6, "5 min 0 s"), (5999, "99 min 59 s"), (6000, "1 h 40 min")],
)
def test_a_duration_to_the_second(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_number_has_its_noun() -> None:
    assert counted(1, "step") == "1 step" and counted(0, "step") == "0 steps"
    assert counted(1234567, "token") == "1,234,567 tokens" and counted(0.5, "CPU") == "0.5 CPUs"


def test_an_error_is_one_line_without_passwords() -> None:
    refused = RuntimeError("cannot reach http://me:secret@host/x\nand a page of advice")
    assert one_line(refused) == "cannot reach http://***@host/x"
    refused.__cause__ = ConnectionError(OSError(111, "Connection refused"))
    assert one_line(refused) == "[Errno 111] Connection refused"
    assert one_line(SetupError("first\nsecond")) == "first\nsecond"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) == ERROR_CHARS
    assert without_password("sqlite:///a.db") == "sqlite:///a.db"
