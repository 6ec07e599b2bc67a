"""Decides which answers may reach a scorer that evaluates what it reads.

Runs in: verifier children. Some data sets of reasoning-gym give a response's text to Python's
`eval`, or to sympy, which evaluates it too: `__import__('os').system(...)` would run, and `9**9**9`
would take the memory of the machine. Invariants: only text passes that can neither name nor call
anything but the functions below, and whose value is small; what does not pass is scored like no
answer.
"""

from __future__ import annotations

import ast
import re

from async_grpo.tasks.answers import nesting_depth

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets that evaluate an answer to find a Python list in it."""
EXPRESSIONS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
"""Data sets whose answers are formulas that sympy parses."""

_LONGEST_LITERAL, _LONGEST_EXPRESSION, _DEEPEST = 10_000, 1_000, 12
_MAX_DEGREE = 2_000
_NAMES = "sinh?|cosh?|tanh?|asin|acos|atan|exp|log|sqrt"
_WORDS = re.compile(r"[A-Za-z0-9_ \n]*")
_TOKENS = re.compile(
    r"(?:[0-9]{1,15}(?![0-9])(?:\.[0-9]{1,15}(?![0-9]))?|"
    rf"(?:{_NAMES})(?=\()|[A-Za-z]|\*\*|[-+*/() ])*"
)
_TOUCHING = re.compile(r"[A-Za-z0-9.][ ]*\(|[A-Za-z][0-9A-Za-z]|[0-9.][A-Za-z]|\)\s*[0-9A-Za-z(]")
_FUNCTION = re.compile(rf"(?<![A-Za-z0-9])(?:{_NAMES})(?=\()")
_EXPONENT = re.compile(
    r"\*\*\s*(?:([0-9]{1,3})|\(-?[0-9]{1,2}(?:/[0-9]{1,2})?\))(?![0-9.])(?!\s*\*\*)"
)


def admitted(answer: str, dataset: str) -> bool:
    """Whether the scorer of this data set may see the answer."""
    if dataset in EXPRESSIONS:
        return is_expression(answer)
    return dataset not in LITERALS or is_literal(answer)


def is_literal(text: str) -> bool:
    """Whether a text is plain words, which call nothing, or a short Python literal."""
    if len(text) > _LONGEST_LITERAL or nesting_depth(text) > _DEEPEST:
        return False
    if _WORDS.fullmatch(text):
        return True
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def is_expression(text: str) -> bool:
    """Whether a text is a formula of numbers, one-letter variables, `+ - * / **` with small
    exponents, parentheses and elementary functions.
    """
    if (
        len(text) > _LONGEST_EXPRESSION
        or nesting_depth(text) > _DEEPEST
        or not _TOKENS.fullmatch(text)
    ):
        return False
    if _TOUCHING.search(_FUNCTION.sub("+", text)):
        return False  # two operands without an operator: a call, or a name of several letters
    exponents = list(_EXPONENT.finditer(text))
    if len(exponents) != text.count("**"):
        return False
    largest = nested = 1
    for match in exponents:
        # only an exponent after a parenthesis can raise a value that is a power already
        if text[: match.start()].rstrip().endswith(")"):
            nested *= max(1, int(match[1] or 1))
        else:
            largest = max(largest, int(match[1] or 1))
    return largest * nested <= _MAX_DEGREE
