"""Text for people: characters that show, durations, errors on one line, no passwords.

Runs in: any process. Invariant: what `visible` returns can move no cursor and change no colour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from async_grpo.errors import RunError

ERROR_CHARS = 300


def filled(template: str, facts: Mapping[str, str]) -> str:
    """Put facts into a template at once, so that a response cannot contain a placeholder; unknown
    names stay as they are.
    """
    return re.sub(r"\{(\w+)\}", lambda found: facts.get(found[1], found[0]), template)


def visible(text: str, *, keep: str = "\n\t") -> str:
    """Replace control characters, except those of `keep`, and lone surrogates by escapes."""
    return "".join(
        letter
        if letter.isprintable() or letter in keep
        else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in text
    )


def dialogue(said: Sequence[str]) -> str:
    """Write down what policy and environment said in turn; what one said alone stays as it is."""
    if len(said) == 1:
        return said[0]
    who = ("policy", "environment")
    return "\n".join(f"{who[number % 2]}: {text}" for number, text in enumerate(said))


def without_colours(text: str) -> str:
    """Remove the colours that Ray and others put into their texts."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def on_one_line(text: str) -> str:
    """Replace all control characters, newlines and tabs too, by escapes."""
    return visible(text, keep="")


def shortened(text: str, most: int) -> str:
    """Cut the text to `most` characters, the last three of which are dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(names: Sequence[str], most: int) -> str:
    """Write the first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def ago(seconds: float) -> str:
    """Write a duration as one number with its unit: 99 s, 5 min, 12 h, 4 days."""
    seconds = max(0, round(seconds))
    if seconds < 100:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    if minutes < 100:
        return f"{minutes} min"
    return f"{hours} h" if hours < 72 else f"{hours // 24} days"


def duration(seconds: float) -> str:
    """Write a duration to the second: 250 s, 7 min 5 s, 2 h 3 min."""
    whole = max(0, round(seconds))
    if whole < 300:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(number: float, thing: str) -> str:
    """Write a number with its noun: 1 learner step, 2 learner steps."""
    return f"{number:,.10g} {thing}{'' if number == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """Shorten an error to a line without passwords, by its system error; a RunError stays whole."""
    if isinstance(error, RunError):
        return str(error)
    inner = error
    while (deeper := _below(inner)) is not None:
        inner = deeper
    text = str(inner if isinstance(inner, OSError) else error).strip() or type(error).__name__
    return without_password(text.splitlines()[0])[:ERROR_CHARS]


def raised(error: BaseException, text: str | None = None, *, most: int = ERROR_CHARS) -> str:
    """Say in a part of a sentence what a library raised about a model; text: its words."""
    said = (" ".join(str(error).split()) if text is None else text).rstrip(".")
    if lacks := re.search(r"Config' object has no attribute '(\w+)'", said):
        return f"its configuration has no `{lacks[1]}`"
    if not said:
        return f"it fails a check that says no more ({type(error).__name__})"
    return shortened(f"{type(error).__name__}: {said}", most)


def first_line(error: BaseException) -> str:
    """Take the first line of an error's message; its class without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def last_line(error: BaseException) -> str:
    """Take the last line of an error's message, where Ray puts the cause; its class without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _below(error: BaseException) -> BaseException | None:
    """Find the error behind an error; libraries also put it among the arguments."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return behind or next(
        (argument for argument in error.args if isinstance(argument, BaseException)), None
    )


def without_password(text: str) -> str:
    """Replace user and password in every URI by `***`."""
    return re.sub(r"://[^/@\s]*@", "://***@", text)
