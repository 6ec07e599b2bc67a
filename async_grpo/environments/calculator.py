"""Calculates with numbers, for a policy that asks: the built-in tool `calculator`.

Runs in: environment children. Hides which expressions are understood. Invariant: the work that an
expression can cause is bounded, so a policy cannot hang the child with it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200
_LARGEST = 10**30
_LARGEST_POWER = 64
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """
    Calculate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, for example (3 + 4) * 2.5
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression may have {LONGEST} characters, not {len(expression)}")
    try:
        tree = ast.parse(expression.strip().replace(",", ""), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    value = _value(tree.body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


calculator.replayable = True  # type: ignore[attr-defined]


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if not math.isfinite(number):
                raise ValueError("a number is too large")
            value = Fraction(str(number))
        case ast.BinOp(left, ast.Pow(), right):
            value = _power(_value(left), _value(right))
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            value = _BINARY[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(sign, operand) if type(sign) in _UNARY:
            value = _UNARY[type(sign)](_value(operand))
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} is not understood; use numbers and + - * / // % **"
            )
    if abs(value) > _LARGEST or value.denominator > _LARGEST:
        raise ValueError("a number is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _LARGEST_POWER:
        raise ValueError(f"a power must be whole, and at most {_LARGEST_POWER}")
    return base ** int(exponent)
