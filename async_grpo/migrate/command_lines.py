"""Command lines in shell scripts: the options of the command that trains.

Runs in: a terminal. Hides the part of the shell's language that such scripts use: quotes, comments,
continued lines, variables that the script sets, integer arithmetic. Invariants: nothing is
executed, and no variable of the environment is read; what only a shell could know stays in the
value as `${...}`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from async_grpo.config import yaml12

PROGRAMS = ("openrlhf", "verl", "roll", "start_rlvr_pipeline", "recipe", "areal", "prime_rl", "trl")
"""What the path of a command that trains has in it, as a word."""
_LONGEST = 20_000
"""Characters of a word, variables replaced; a longer one is no value of a setting."""
_VALUES = (
    r"\$\(\([^\n]{0,500}?\)\)|\$\([^()\n]{0,500}\)"
    r"|\$\{(?:[^{}\n]|\{[^{}\n]{0,200}\}){0,500}\}|\$\w+"
)
"""What a shell puts a value in the place of."""
_COMMANDS = r"`[^`\n]{0,500}`"
_PIECES = re.compile(
    r"(?P<joined>\\\n)|(?P<end>\n|;|&&?|\|\|?)|(?P<space>[ \t\r]+)"
    r"|'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\"|\\(?P<escaped>.)"
    r"|(?P<variable>" + _VALUES + r"|\$[@*#?!$]|" + _COMMANDS + r")"
    r"|(?P<plain>#|[^\s'\"\\$`;&|#]+|.)",
    re.DOTALL,
)
_VARIABLE = re.compile(_VALUES + "|" + _COMMANDS)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"\d*[<>]")
_PARAMETER = re.compile(r"\$\{(\w+)(?::?[-=](.*))?\}", re.DOTALL)
_ARITHMETIC: dict[type[Any], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def looks_like_a_command(text: str) -> bool:
    """Whether the text is a script or a command line, and no YAML."""
    return text.startswith("#!") or bool(
        re.search(r"(^|\s)(--[a-z][\w.-]*[ =]|python3?\s+(-\w\s+)*-m\s)", text)
    )


def arguments_of(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return what the command that trains starts, and its options in their order."""
    best: tuple[str, list[tuple[str, Any]]] = ("", [])
    for words in _commands(text):
        at = next((i for i, word in enumerate(words) if _trains(word)), None)
        program = "" if at is None else words[at]
        found = list(_options(words if at is None else words[at + 1 :]))
        if (bool(program), len(found)) > (bool(best[0]), len(best[1])):
            best = (program, found)
    return best


def _trains(word: str) -> bool:
    known = not word.startswith("-") and "=" not in word
    return known and bool(set(re.split(r"[./]", word)) & set(PROGRAMS))


def _options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Pair options with their values: `--key value`, `--key=value`, `--switch`, `key=value`."""
    option, values = "", list[str]()
    for word in [*words, "--"]:
        if _REDIRECTION.match(word):
            word = "--"  # what follows is a file
        if not word.startswith("--"):
            override = None if option and not values else _OVERRIDE.fullmatch(word)
            if override is None:
                values.append(word)
                continue
        if option:
            yield option, _value(values)
        option, values = "", []
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif override is not None:
            yield override[1], _value([override[2]])


def _value(words: list[str]) -> Any:
    if not words:
        return True
    values = [_scalar(word) for word in words]
    return values[0] if len(values) == 1 else values


def _scalar(text: str) -> Any:
    try:
        value, _ = yaml12.read(text)
    except yaml12.YamlError:
        return text
    return value if isinstance(value, int | float | list | None) else text


def _commands(text: str) -> Iterator[list[str]]:
    """Split a script into commands, and these into words, the script's variables replaced."""
    variables: dict[str, str] = {}
    words: list[str] = []
    word: str | None = None
    position, commented = 0, False
    while (found := _PIECES.match(text, position)) is not None:
        position, piece = found.end(), found.lastgroup
        if commented:
            commented = found[0] != "\n"
            if commented:
                continue
        if piece == "plain" and found[0] == "#" and word is None:
            commented = True
        elif piece in ("space", "end", "joined"):
            if word is not None:
                words.append(word)
                word = None
            if piece == "end":
                yield from _command(words, variables)
                words = []
        else:
            word = (word or "") + _piece(found, variables)
            if len(word) > _LONGEST:
                word = "${...}"
    if word is not None:
        words.append(word)
    yield from _command(words, variables)


def _piece(found: re.Match[str], variables: dict[str, str]) -> str:
    kind, text = str(found.lastgroup), str(found[found.lastgroup or 0])
    if kind == "double":
        replaced = _VARIABLE.sub(lambda match: _replaced(match[0], variables), text)
        return re.sub(r"\\([\"\\$`\n])", lambda match: match[1].strip("\n"), replaced)
    return _replaced(text, variables) if kind == "variable" else text


def _command(words: list[str], variables: dict[str, str]) -> Iterator[list[str]]:
    """Keep what a command assigns; return the words of any other."""
    while words and words[0] in ("export", "local", "readonly", "declare"):
        words = words[1:]
    assigned = [_ASSIGNED.fullmatch(word) for word in words]
    if words and all(assigned):
        variables.update((one[1], one[2]) for one in assigned if one)
    elif words:
        yield words


def _replaced(text: str, variables: dict[str, str]) -> str:
    """Return a variable's value, or the result of an expression; else the text as `${...}`."""
    if text.startswith("$(("):
        inside = re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: variables.get(match[1], match[0]), text[3:-2]
        )
        result = _calculated(inside)
        return f"${{{inside}}}" if result is None else str(result)
    if text.startswith(("$(", "`")):
        return f"${{{text.strip('`$()')}}}"
    parameter = _PARAMETER.fullmatch(text)
    name = parameter[1] if parameter is not None else text.strip("${}")
    if name in variables:
        return variables[name]
    if parameter is not None and parameter[2] is not None:
        default = parameter[2].replace('"', "")
        return _VARIABLE.sub(lambda match: _replaced(match[0], variables), default)
    return f"${{{name}}}"


def _calculated(text: str) -> int | None:
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
