"""Finds the final answer in a response and decides whether it equals the reference.

Runs in: verifier children (extraction also where a task reads its data). Hides math-verify.
Invariants: only short text that passes `is_safe` reaches math-verify, since it evaluates what it
reads and `9**9**9` would take the memory of the machine; everything else is compared as text, so it
can be right only by being the reference itself. Every scan of a response is linear in its length.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_ANSWER = 300
_TAIL = 10_000
_MATH_SECONDS = 2

# A minus sign belongs to the number unless it stands after an operand ("5-3"). Thousands are
# grouped by three, so "1, 2" is two numbers.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
_PLAIN_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?")

_CHARACTERS = re.compile(r"[0-9A-Za-z\\{}()\[\]+\-*/^_.,:;=<>|%$ ]*")
_COMMANDS = (
    "frac dfrac tfrac sqrt pi theta alpha beta infty cdot times div pm le leq ge geq ne neq lt gt "
    "cup cap in left right circ text textbf mathrm mathbf mbox quad ln log sin cos tan cot sec "
    "csc arcsin arccos arctan begin end"
)
_ENVIRONMENTS = re.compile(r"\\(?:begin|end)\{[pbv]matrix\}")
_TEXT_ARGUMENT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{[A-Za-z0-9 .,\-()]*\}")
_ESCAPES = re.compile(r"\\[{}%$,;:! \\]")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
# Exponents are a number up to 999, a letter with at most two digits before it, a small fraction, or
# degrees; a second `^` may not follow.
_EXPONENT = re.compile(
    r"\^\s*(?:\{\s*(?P<braced>-?[0-9]{1,3}|-?[0-9]{0,2}[A-Za-z]|-?[0-9]/[0-9]"
    r"|-?\\[dt]?frac\{?[0-9]\}?\{?[0-9]\}?|\\circ)\s*\}"
    r"|(?P<bare>[0-9](?![0-9])|[A-Za-z]|\\circ))(?!\s*\^)"
)
_MAX_DEGREE = 200


def last_number(text: str) -> str | None:
    """Return the last number in the last 10,000 characters, without thousands separators; or
    None.
    """
    found = _NUMBER.findall(text[-_TAIL:])
    return found[-1].replace(",", "") if found else None


def tagged(text: str, tag: str) -> str | None:
    """Text between the last `</tag>` and the `<tag>` before it, stripped; None without the pair."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    return None if start < 0 else text[start + len(opening) : end].strip()


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\fbox{...}`), or of `\boxed 5`; None without one."""
    found = max((text.rfind(command), command) for command in ("\\boxed", "\\fbox"))
    if found[0] < 0:
        return None
    start = found[0] + len(found[1])
    if not text.startswith("{", start):
        bare = re.match(r"\s+([^\s$]{1,30})", text[start : start + 40])
        return bare[1] if bare else None
    start += 1
    depth = 1
    for at in range(start, min(len(text), start + 10 * MAX_ANSWER)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at].strip()
    return None


def equal(answer: str, reference: str) -> bool:
    """Whether texts, numbers or math-verify's forms are equal. Never slow, never an error."""
    if len(answer) > 10 * MAX_ANSWER:
        return False
    answer, reference = _normal(answer), _normal(reference)
    if not answer:
        return False
    if answer == reference:
        return True
    one, other = _as_number(answer), _as_number(reference)
    if (
        one is not None
        and other is not None
        and (one == other or one.denominator == other.denominator == 1)
    ):
        return one == other
    return is_safe(answer) and is_safe(reference) and _math_equal(answer, reference)


def is_safe(text: str) -> bool:
    """Whether the text is short and simple enough for math-verify (a conservative pattern)."""
    if not 0 < len(text) <= MAX_ANSWER or not _CHARACTERS.fullmatch(text) or "**" in text:
        return False
    if re.search(r"[0-9]{31}", text) or nesting_depth(text) > 8:
        return False
    exponents = list(_EXPONENT.finditer(text))
    if len(exponents) != text.count("^") or not _bounded_degree(exponents):
        return False
    bare = _ESCAPES.sub(" ", _TEXT_ARGUMENT.sub(" ", _ENVIRONMENTS.sub(" ", text)))
    if not set(_COMMAND.findall(bare)) <= set(_COMMANDS.split()):
        return False
    # Words outside a command are prose, or a function in disguise ("exp", "factorial").
    return not re.search(r"[A-Za-z]{3}", _COMMAND.sub(" ", bare))


def warm_up() -> None:
    """Import math-verify now (seconds), so that no response pays for it."""
    _engine()


def _bounded_degree(exponents: list[re.Match[str]]) -> bool:
    # Powers nest through parentheses ((x^9)^9), so the product of all of them bounds how large a
    # value or a polynomial can grow.
    degree = 1
    for match in exponents:
        digits = re.sub(r"[^0-9]", "", match["braced"] or match["bare"])
        degree *= max(1, int(digits or 1))
    return degree <= _MAX_DEGREE


def nesting_depth(text: str) -> int:
    """How deeply braces, brackets and parentheses nest."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest


def _normal(text: str) -> str:
    text = text.strip().removesuffix(".").strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text = text.removeprefix("\\$").removeprefix("$").strip()
    worded = _TEXT_ARGUMENT.fullmatch(text)
    text = text[text.index("{") + 1 : -1].strip() if worded else text
    return re.sub(r"\s+", " ", text.replace("\\!", "").replace("−", "-"))


def _as_number(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "")) if _PLAIN_NUMBER.fullmatch(text) else None


def _math_equal(answer: str, reference: str) -> bool:
    # The alarm that limits math-verify works in the main thread only; a verifier child scores
    # there. Elsewhere the pattern alone limits.
    seconds = _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    return _engine()(answer, reference, seconds)


@functools.cache
def _engine() -> Callable[[str, str, int | None], bool]:
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = [LatexExtractionConfig()]

    def compare(answer: str, reference: str, seconds: int | None) -> bool:
        sides: list[list[Any]] = [
            parse(f"\\boxed{{{text}}}", config, parsing_timeout=seconds)
            for text in (reference, answer)
        ]
        return bool(all(sides) and verify(*sides, timeout_seconds=seconds))

    # The first parse builds tables for a second or so; it must not count against the first answer's
    # limit.
    compare("\\frac{1}{2}", "0.5", None)
    return compare
