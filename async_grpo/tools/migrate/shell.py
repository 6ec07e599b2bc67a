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
from collections.abc import Callable, Iterator
from typing import Any

_LONGEST = 20_000
"""Characters of a word, variables replaced; a longer one is no value of a setting."""
_MOST = 200_000
"""Characters that all variables together are replaced by; a script that wants more is none."""
_SHOWN = 5
"""Values of a variable, or elements of an array, that a reason names."""
_BRACED = r"\$\{(?:[^{}\n]|\{[^{}\n]{0,200}\}){0,500}\}"
_NESTED = r"\((?:[^()\n]|\([^()\n]{0,200}\)){0,200}\)"
_SUM = r"\$\(\((?:[^()\n]|" + _NESTED + r"){0,500}\)\)"
_VALUES = _SUM + r"|\$\([^()\n]{0,500}\)|" + _BRACED + r"|\$(?:\w+|[@*#?!$])"
"""What a shell puts a value in the place of."""
_COMMANDS = r"`[^`\n]{0,500}`"
_PIECES = re.compile(
    r"(?P<joined>\\\n)|(?P<end>\n|;|&&?|\|\|?)|(?P<space>[ \t\r]+)"
    r"|'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\"|\\(?P<escaped>.)"
    r"|(?P<variable>" + _VALUES + r"|" + _COMMANDS + r")"
    r"|(?P<array>[A-Za-z_]\w*\+?=\()|(?P<plain>#|[()]|[^\s'\"\\$`;&|#()]+|.)",
    re.DOTALL,
)
_VARIABLE = re.compile(_VALUES + "|" + _COMMANDS)
_WORD = re.compile(r"(?:" + _BRACED + r"|\S)+")
_ELEMENTS = re.compile(r"\$\{(\w+)\[@\]\}")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\$\{(\w+)(?:\[([@*]|\d{1,4})\])?(?::?[-=](.*))?\}", re.DOTALL)
_INTEGERS = re.compile(r"[\d\s()+*/%-]+")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_INSIDE = ("then", "else", "do")
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_ARITHMETIC: dict[type[Any], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _inner(words: list[str]) -> str:
    """Return the text of the commands that a command hands to a shell, "" for none."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for shell, option, text in zip(words, words[1:], words[2:], strict=False):
        if re.fullmatch(r"(.*/)?(ba|z)?sh", shell) and re.fullmatch(r"-\w*c", option):
            return text
    return ""


class ShellScript:
    """A script, read piece by piece. Between two commands it holds nothing but variables."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._variables: dict[str, list[str]] = {}
        """Elements by name; those of a variable that is no array are one."""
        self._used: set[str] = set()
        self._under_conditions: dict[str, list[str]] = {}
        """Values, first that of before, of variables that are set where a condition holds."""
        self._room = _MOST
        self._depth = 0
        """Of `if`, `case` and loops."""
        self._alone = True
        """Whether no `&&` or `||` is in front of the command."""
        self._words: list[str] = []
        self._word: str | None = None
        """The word under way."""
        self._assigning = True
        """Whether all words so far set variables."""
        self._array = ""
        """Such as `NAME=(` or `NAME+=(`, between its parentheses."""
        self._around: list[str] = []
        """Words in front of that."""

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
        position, commented = 0, False
        while (found := _PIECES.match(text, position)) is not None:
            position, piece = found.end(), str(found.lastgroup)
            if commented:
                commented = found[0] != "\n"
                if commented:
                    continue
            if found[0] == "#" and self._word is None:
                commented = True
            elif piece == "end" and not self._array:
                yield from self._command()
                self._alone = found[0] not in ("&&", "||")
            elif piece in ("space", "end", "joined"):
                self._end_word()
            elif piece == "array" and self._word is None and not self._array:
                self._array = found[0]
                self._around, self._words = self._words, []
            elif piece == "plain" and found[0] == ")" and self._array:
                self._end_array()
            else:
                self._add_piece(piece, str(found[piece]))
        self._end_word()
        if self._array:  # which has no end
            self._words = [*self._around, *self._words]
            self._array, self._around = "", []
        yield from self._command()

    # ---- words

    def _add(self, text: str) -> None:
        self._word = (self._word or "") + text
        if len(self._word) > _LONGEST:
            self._word = "${...}"

    def _end_word(self) -> None:
        if self._word is not None:
            sets = _ASSIGNED.fullmatch(self._word) or self._word in _DECLARES
            self._assigning = self._assigning and bool(sets)
            self._words.append(self._word)
        self._word = None

    def _add_piece(self, kind: str, text: str) -> None:
        if kind == "double":
            self._add_quoted(text)
        elif kind != "variable":
            self._add(text)
        elif self._assigning and not self._array and _ASSIGNED.match(self._word or ""):
            self._add(self._replaced(text))  # the value of an assignment is not split
        else:
            self._add_words(self._replaced(text))

    def _add_words(self, text: str) -> None:
        """Add the value of an unquoted variable, in which spaces end words."""
        if text[:1].isspace():
            self._end_word()
        for index, word in enumerate(_WORD.findall(text)):
            if index:
                self._end_word()
            self._add(word)
        if text[-1:].isspace():
            self._end_word()

    def _add_quoted(self, text: str) -> None:
        """Add a text in double quotes, in which each element of `${NAME[@]}` is a word."""
        parts = _ELEMENTS.split(text)
        for index, part in enumerate(parts):
            if index % 2:
                for place, element in enumerate(self._elements(part)):
                    if place:
                        self._end_word()
                    self._add(element)
            elif part or len(parts) == 1:
                replaced = _VARIABLE.sub(lambda match: self._replaced(match[0]), part)
                self._add(re.sub(r"\\([\"\\$`\n])", lambda match: match[1].strip("\n"), replaced))

    # ---- what a command sets

    def _end_array(self) -> None:
        self._end_word()
        name = self._array.rstrip("+=(")
        if "+" not in self._array:
            self._variables.pop(name, None)
        elements = self._variables.setdefault(name, [])
        before = " ".join(elements[-_SHOWN:])
        elements.extend(self._words)
        if self._depth or not self._alone:
            self._note(name, before, " ".join(elements[-_SHOWN:]))
        self._array = ""
        self._words, self._around = self._around, []

    def _command(self) -> Iterator[list[str]]:
        """Keep what a command assigns; return the words of any other."""
        self._end_word()
        words, self._words, self._assigning = self._words, [], True
        while words and words[0] in _INSIDE:
            words = words[1:]
        first = words[0] if words else ""
        if first in _OPENS:
            self._depth += 1
        elif first in _CLOSES:
            self._depth = max(0, self._depth - 1)
        if first in _DECLARES:
            words = [word for word in words[1:] if not word.startswith("-")]
        assigned = [_ASSIGNED.fullmatch(word) for word in words]
        if not all(assigned):
            yield words
            return
        for name, added, value in (one.groups() for one in assigned if one):
            self._assign(name, value, added=bool(added))

    def _assign(self, name: str, value: str, *, added: bool) -> None:
        conditional = self._depth > 0 or not self._alone
        if conditional and "${" in value:
            return  # an option of the script itself, such as `$2`
        before = self._variables.get(name, [""])[:1]
        value = "".join(before) + value if added else value
        value = value if len(value) <= _LONGEST else "${...}"
        if conditional:
            self._note(name, *before, value)
        self._variables.setdefault(name, [])[:1] = [value]

    def _note(self, name: str, *values: str) -> None:
        known = self._under_conditions.setdefault(name, [value for value in values[:-1] if value])
        if values[-1] in known:
            known.remove(values[-1])
        elif len(known) >= _SHOWN:
            known.pop()
        known.append(values[-1])

    # ---- values

    def _elements(self, name: str) -> list[str]:
        """Return the elements of an array; what the script does not set as `${...}`."""
        self._used.add(name)
        found = self._variables.get(name, [f"${{{name}[@]}}"])
        self._room -= sum(map(len, found)) + len(found) if self._room > 0 else 0
        return found if self._room > 0 else ["${...}"]

    def _replaced(self, text: str) -> str:
        """Return a variable's value, or the result of an expression; else the text as `${...}`."""
        value = self._found(text) if self._room > 0 else "${...}"
        self._room -= len(value) + 1
        return value

    def _found(self, text: str) -> str:
        if text.startswith("$(("):
            names = r"\$?\{?([A-Za-z_]\w*)\}?"
            inside = re.sub(names, lambda match: self._first(match[1], match[0]), text[3:-2])
            result = _calculated(inside)
            return f"${{{inside}}}" if result is None else str(result)
        if text.startswith(("$(", "`")):
            return f"${{{text.strip('`$()')}}}"
        parameter = _PARAMETER.fullmatch(text)
        name, index, default = parameter.groups() if parameter else (text.strip("${}"), None, None)
        if name in self._variables and index is not None:
            elements = self._variables[name]
            self._used.add(name)
            return " ".join(elements if index in "@*" else elements[int(index) :][:1])
        if name not in self._variables and default is not None:
            default = default.replace('"', "")
            return _VARIABLE.sub(lambda match: self._replaced(match[0]), default)
        return self._first(name, f"${{{name}}}" if index is None else text)

    def _first(self, name: str, otherwise: str) -> str:
        """Return a variable's value, of an array that of its first element."""
        self._used.add(name)
        return next(iter(self._variables[name]), "") if name in self._variables else otherwise


def _calculated(text: str) -> int | None:
    if not _INTEGERS.fullmatch(text):
        return None
    try:
        return _number(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result = _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < 2**63:
            return result
    raise ValueError("no arithmetic of integers")
