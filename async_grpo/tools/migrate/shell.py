"""The commands of a shell script, each as its words.

Runs in: a terminal. Hides the part of the shell's language that scripts of trainings use: quotes,
comments, continued lines, variables and arrays that the script sets, words in unquoted ones,
integer arithmetic, `eval` and `bash -c`. Invariants: nothing is executed, and no variable of the
environment is read; what only a shell could know stays in its word as `${...}`.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

_LONGEST, _OPEN = 20_000, "${...}"
"""Characters of a word, variables replaced; a longer one is no value of a setting."""
_MOST = 200_000
"""Characters that all variables together are replaced by; a script that wants more is none."""
_SHOWN = 5
"""Values of a variable, or elements of an array, that a reason names."""
_BRACED = r"\$\{(?:[^{}\n]|\{[^{}\n]{0,200}\}){0,500}\}"
_NESTED = r"\((?:[^()\n]|\([^()\n]{0,200}\)){0,200}\)"
_SUM = r"\$\(\((?:[^()\n]|" + _NESTED + r"){0,500}\)\)"
_VALUE = _SUM + r"|\$\([^()\n]{0,500}\)|" + _BRACED + r"|\$(?:\w+|[@*#?!$])|`[^`\n]{0,500}`"
"""What a shell puts a value in the place of."""
_PIECES = re.compile(
    r"(?P<comment>(?<![^\s;&|(])#[^\n]*)|(?P<end>\n|;|&&?|\|\|?)|(?P<space>[ \t\r]+|\\\n)"
    r"|'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\"|\\(?P<escaped>.)"
    r"|(?P<value>" + _VALUE + r")"
    r"|(?P<array>[A-Za-z_]\w*\+?=\()|(?P<plain>[()]|[^\s'\"\\$`;&|()]+|.)",
    re.DOTALL,
)
_REPLACED = re.compile(_VALUE)
_WORD = re.compile(r"(?:" + _BRACED + r"|\S)+")
_ELEMENTS = re.compile(r"\$\{(\w+)\[@\]\}")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\$\{(\w+)(?:\[([@*]|\d{1,4})\])?(?::?[-=](.*))?\}", re.DOTALL)
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_INSIDE = ("then", "else", "do")
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_ARITHMETIC: dict[type[Any], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


class ShellScript:
    """A script, read piece by piece. Between two commands it holds nothing but variables."""

    def __init__(self, text: str) -> None:
        self._text, self._room = text, _MOST
        self._variables: dict[str, list[str]] = {}
        """Elements by name; those of a variable that is no array are one."""
        self._used: set[str] = set()
        self._under_conditions: dict[str, list[str]] = {}
        """Values, first that of before, of variables that are set where a condition holds."""
        self._depth, self._alone = 0, True
        """Of `if`, `case` and loops; whether no `&&` or `||` is in front of the command."""

    def commands(self) -> Iterator[list[str]]:
        """Return the words of each command that assigns nothing, variables replaced."""
        for words in self._read(self._text):
            inner = _inner(words)
            if inner:
                yield from self._read(inner)
            else:
                yield words

    def conditional(self) -> Iterator[tuple[str, str, str]]:
        """Return name, value and a reason to look at it of the variables that were used, and set
        where a condition holds.
        """
        for name, values in self._under_conditions.items():
            if name in self._used:
                shown = ", ".join(value[:60] for value in values)
                several = f"; of {shown}, the last is taken" if len(values) > 1 else ""
                yield name, values[-1], f"set under a condition, which is taken to hold{several}"

    def _read(self, text: str) -> Iterator[list[str]]:
        parts, around, array, sets = list[str](), list[str](), "", False
        for found in _PIECES.finditer(text):
            kind, piece = str(found.lastgroup), found[str(found.lastgroup)]
            fresh = parts[-1:] in ([], [" "])
            sets = bool(_ASSIGNED.match(piece)) if fresh else sets
            if kind == "end" and not array:
                yield from self._command(_words(parts))
                parts, self._alone = [], piece not in ("&&", "||")
            elif kind in ("space", "end"):
                parts.append(" ")
            elif kind == "array" and fresh and not array:
                array, around, parts = piece, parts, []
            elif kind == "plain" and piece == ")" and array:
                self._set(array.rstrip("+=("), _words(parts), added="+" in array)
                array, parts = "", around
            elif kind != "comment":
                parts.append(self._quoted(kind, piece, split=not sets))
        yield from self._command(_words([*around, *parts] if array else parts))

    def _quoted(self, kind: str, piece: str, *, split: bool) -> str:
        """Return a piece as `shlex` reads it, values in their places. split: whether spaces in an
        unquoted one end words, as they do unless it is what a variable is set to.
        """
        if kind == "double":  # in which each element of `${NAME[@]}` is a word
            parts = [
                self._elements(part) if index % 2 else [self._replaced_in(part)]
                for index, part in enumerate(_ELEMENTS.split(piece))
                if index % 2 or part or not piece
            ]
            return "".join(shlex.join(text) for text in parts)
        if kind != "value":
            return shlex.quote(piece)
        value = self._replaced(piece)
        if not split:
            return shlex.quote(value)
        ends = [" " * edge.isspace() for edge in (value[:1], value[-1:])]
        return shlex.join(_WORD.findall(value)).join(ends)

    def _replaced_in(self, text: str) -> str:
        replaced = _REPLACED.sub(lambda match: self._replaced(match[0]), text)
        return re.sub(r"\\([\"\\$`\n])", lambda match: match[1].strip("\n"), replaced)

    # ---- what a command sets

    def _command(self, words: list[str]) -> Iterator[list[str]]:
        """Keep what a command assigns; return the words of any other."""
        while words and words[0] in _INSIDE:
            words = words[1:]
        first = words[0] if words else ""
        self._depth = max(0, self._depth + (first in _OPENS) - (first in _CLOSES))
        if first in _DECLARES:
            words = [word for word in words[1:] if not word.startswith("-")]
        assigned = [_ASSIGNED.fullmatch(word) for word in words]
        if not all(assigned):
            yield words
            return
        for name, added, value in (one.groups() for one in assigned if one):
            if not self._conditional or "${" not in value:  # an option of the script, such as `$2`
                before, *more = self._variables.get(name, [""])
                value = before + value if added else value
                self._set(name, [value if len(value) <= _LONGEST else _OPEN, *more], added=False)

    @property
    def _conditional(self) -> bool:
        return self._depth > 0 or not self._alone

    def _set(self, name: str, values: list[str], *, added: bool) -> None:
        elements = self._variables.get(name, [])
        before = " ".join(elements[-_SHOWN:])
        elements = elements if added else []
        elements.extend(values)
        self._variables[name] = elements
        if self._conditional:
            known = self._under_conditions.setdefault(name, [before] if before else [])
            if (now := " ".join(elements[-_SHOWN:])) in known:
                known.remove(now)
            known[_SHOWN - 1 :] = []
            known.append(now)

    # ---- values

    def _elements(self, name: str) -> list[str]:
        """Return the elements of an array; what the script does not set as `${...}`."""
        self._used.add(name)
        found = self._variables.get(name, [f"${{{name}[@]}}"])
        self._room -= sum(map(len, found)) + len(found) if self._room > 0 else 0
        return found if self._room > 0 else [_OPEN]

    def _replaced(self, text: str) -> str:
        """Return a variable's value, or the result of an expression; else the text as `${...}`."""
        value = self._found(text) if self._room > 0 else _OPEN
        self._room -= len(value) + 1
        return value

    def _found(self, text: str) -> str:
        if text.startswith("$(("):
            names = r"\$?\{?([A-Za-z_]\w*)\}?"
            inside = re.sub(names, lambda match: self._first(match[1], match[0]), text[3:-2])
            return _calculated(inside) or f"${{{inside}}}"
        if text.startswith(("$(", "`")):
            return f"${{{text.strip('`$()')}}}"
        parameter = _PARAMETER.fullmatch(text)
        name, index, default = parameter.groups() if parameter else (text.strip("${}"), None, None)
        if name in self._variables and index is not None:
            elements = self._variables[name]
            self._used.add(name)
            return " ".join(elements if index in "@*" else elements[int(index) :][:1])
        if name not in self._variables and default is not None:
            return _REPLACED.sub(lambda match: self._replaced(match[0]), default.replace('"', ""))
        return self._first(name, f"${{{name}}}" if index is None else text)

    def _first(self, name: str, otherwise: str) -> str:
        """Return a variable's value, of an array that of its first element."""
        self._used.add(name)
        return next(iter(self._variables[name]), "") if name in self._variables else otherwise


def _words(parts: list[str]) -> list[str]:
    return [word if len(word) <= _LONGEST else _OPEN for word in shlex.split("".join(parts))]


def _inner(words: list[str]) -> str:
    """Return the text of the commands that a command hands to a shell, "" for none."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for shell, option, text in zip(words, words[1:], words[2:], strict=False):
        if re.fullmatch(r"(.*/)?(ba|z)?sh", shell) and re.fullmatch(r"-\w*c", option):
            return text
    return ""


def _calculated(text: str) -> str:
    """Return the result of integer arithmetic, "" for anything else."""
    if not re.fullmatch(r"[\d\s()+*/%-]+", text):
        return ""
    try:
        return str(_number(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return ""


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result = _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < 2**63:
            return result
    raise ValueError("no arithmetic of integers")
