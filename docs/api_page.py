"""The reference page of the API, written from the sources: signatures and docstrings.

`pages.py` writes it. Hides how a name is followed to where it is defined. Invariants: nothing of
the package is imported for it; what is on the page stands in the code, word by word.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "async_grpo"

SECTIONS = {
    "A task of your own": (
        "`task.name: my_module:MyTask` names a class like `Task`; nothing is inherited or "
        "registered ([tasks.md](tasks.md)). Its `score` is the verifier, and runs in children of "
        "the rollout actors. A task with an `environment` has episodes in place of `score` "
        "([agents.md](agents.md)).",
        {
            "tasks.base": "Task Problem Score WarmsUp TaskError",
            "environments.base": "HasEnvironment Environment Action Observation HasTools",
        },
    ),
    "Callbacks and sweeps": (
        "Callbacks that are there, by their names in `run.callbacks` or as objects; one of your "
        "own is a subclass of `Callback`.",
        {"run.callbacks.early_stopping": "*", "contrib.metric_stream": "*", "contrib.tune": "*"},
    ),
    "What plugins are called with": (
        "Functions that are registered get one of these ([extending.md](extending.md)).",
        {
            "algo.losses": "Terms",
            "algo.estimators": "Groups Options",
            "algo.importance_modes": "Ratios",
            "algo.rewards": "ShapedResponse",
            "algo.filters": "GroupFacts",
        },
    ),
    "Inside a running system": (
        "`trainer.system.actors` and `trainer.system.learner`, for those who want to look inside. "
        "Their coroutines belong to the event loop of the trainer.",
        {
            "cluster.rollout_actors": "ActorManager",
            "cluster.learner_group": "LearnerGroup",
            "rollout.generation": "Generated",
        },
    ),
}
"""Heading -> what stands below it, and names by module (`*`: all that it defines, if the module is
there), beside those of `async_grpo` itself."""

_INTRODUCTION = """\
# API

<!-- Written by `make docs` from the code: change it there. -->

Signatures, with the first paragraph of each docstring; the rest stands in the code. What takes long
to import (torch, Ray, vLLM) is imported when a name needs it, not with the package.

## `async_grpo`

`from async_grpo import ...` gives these names. How they are used:
[running.md](running.md#in-a-notebook), [extending.md](extending.md).
"""


DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Found:
    """A definition: its name, the module that it stands in, and its statement
    (of a module its source)."""

    name: str
    module: str
    node: ast.AST


@cache
def _tree(module: str) -> ast.Module | None:
    """Parse a module, by its dotted name in the package; None where there is none."""
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def find(name: str, module: str) -> Found:
    """Follow a name from a module that has or imports it to its definition. Raises LookupError."""
    tree = _tree(module)
    for node in _statements(tree) if tree else ():
        if isinstance(node, DEFINITIONS):
            if node.name == name:
                return Found(name, module, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _imported(node, alias.name)
    raise LookupError(f"{_dotted(module)} neither defines nor imports {name}")


def _imported(node: ast.ImportFrom, name: str) -> Found:
    package, _, module = f"{node.module}.".partition(".")
    if package != PACKAGE.name:
        raise LookupError(f"{name} is from {node.module}")
    inside = f"{module}{name}"
    if (tree := _tree(inside)) is not None:  # a module of a package
        return Found(name, inside, tree)
    return find(name, module.rstrip("."))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements at the top of a module, and inside its `if`s."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


def public() -> list[str]:
    """Return the names of `async_grpo.__all__`."""
    root = _tree("")
    for node in root.body if root is not None else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise LookupError("async_grpo has no __all__")


# ---- signatures ----


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = False) -> str:
    """Write `(a: int, *, b: str = "x") -> None`; `bound` leaves the first argument out."""
    given, parts = node.args, []
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for argument, default in list(zip(plain, defaults, strict=True))[1 if bound else 0 :]:
        parts.append(_argument(argument, default))
    if given.vararg or given.kwonlyargs:
        parts.append("*" + (_argument(given.vararg, None) if given.vararg else ""))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parts.append(_argument(argument, default))
    if given.kwarg:
        parts.append("**" + _argument(given.kwarg, None))
    gives = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({', '.join(parts)}){gives}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    note = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    if default is None:
        return argument.arg + note
    value = ast.unparse(default).replace("'", '"')
    for made, shown in (("list", "[]"), ("dict", "{}")):
        value = value.replace(f"field(default_factory={made})", shown)
    return f"{argument.arg}{note}{' = ' if note else '='}{value}"


def _decorated(node: ast.stmt, *names: str) -> bool:
    """Whether a definition has a decorator of one of these names."""
    decorators = getattr(node, "decorator_list", ())
    words = [ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in decorators]
    return bool(set(words) & set(names))


def _summary(node: ast.AST) -> str:
    """Return the first paragraph of a docstring, on one line."""
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    return " ".join(text.partition("\n\n")[0].split())


# ---- the page ----


def render() -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION]
    for name in public():
        parts += _entry(find(name, ""), shown=PACKAGE.name)
    for heading, (text, modules) in SECTIONS.items():
        parts.append(f"## {heading}\n\n{text}\n")
        for module, names in modules.items():
            for name in _defined(module) if names == "*" else names.split():
                parts += _entry(find(name, module), shown=_dotted(module))
    return "\n".join(parts)


def _defined(module: str) -> Iterator[str]:
    """Find the public functions and classes that a module defines; none where it is missing."""
    tree = _tree(module)
    for node in tree.body if tree else ():
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            yield node.name


def _dotted(module: str) -> str:
    return f"{PACKAGE.name}.{module}" if module else PACKAGE.name


def _entry(found: Found, *, shown: str) -> Iterator[str]:
    """Lines about one name; `shown` is the module to import it from."""
    yield f"### `{found.name}`\n"
    node = found.node
    if isinstance(node, ast.ClassDef):
        yield from _class(found, node, shown)
    elif isinstance(node, ast.Module):
        yield _text(f"module {_dotted(found.module)}", node)
        yield from _listed(_contents(found))
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield _text(f"{shown}.{found.name}{signature(node)}", node)


def _text(head: str, node: ast.AST) -> str:
    return "\n\n".join(part for part in (f"`{head}`", _summary(node)) if part) + "\n"


def _contents(found: Found) -> Iterator[str]:
    """List the public functions and classes of a module."""
    for name in _defined(found.module):
        node = find(name, found.module).node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name += signature(node)
        yield _line(name, _summary(node))


def _class(found: Found, node: ast.ClassDef, shown: str) -> Iterator[str]:
    known = {*public()} - {found.name}  # what is inherited from these is on the page already
    chain = [one for one in _ancestry(found) if one.name not in known]
    yield _text(f"{shown}.{found.name}{_made(chain)}", node)
    if _is_section(chain):
        yield "Its fields are the settings: [configuration.md](configuration.md).\n"
    members: dict[str, str] = {}
    for one in chain:
        for name, line in _members(one, fields=not _is_section(chain)):
            members.setdefault(name, line)
    yield from _listed(members.values())


def _listed(lines: Iterable[str]) -> Iterator[str]:
    if together := "\n".join(lines):
        yield f"{together}\n"


def _ancestry(found: Found) -> Iterator[ast.ClassDef]:
    """Find a class and those of the package that it inherits from."""
    node = found.node
    assert isinstance(node, ast.ClassDef)
    yield node
    for base in node.bases:
        try:
            above = find(ast.unparse(base).partition("[")[0], found.module)
        except LookupError:  # of a library
            continue
        if isinstance(above.node, ast.ClassDef):
            yield from _ancestry(above)


def _is_section(chain: list[ast.ClassDef]) -> bool:
    """Whether a class holds settings."""
    return any(node.name == "Section" for node in chain)


def _made(chain: list[ast.ClassDef]) -> str:
    """How an object of the class is made; its bases where it is not made by a user."""
    for node in chain:
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                return signature(method, bound=True).removesuffix(" -> None")
        if _decorated(node, "dataclass"):
            fields = [_argument(ast.arg(name, note), value) for name, note, value, _ in _kept(node)]
            return f"({', '.join(fields)})"
    bases = ", ".join(map(ast.unparse, chain[0].bases))
    return f"({bases})" if bases and not _is_section(chain) else ""


def _kept(
    node: ast.ClassDef | ast.FunctionDef,
) -> Iterator[tuple[str, ast.expr, ast.expr | None, str]]:
    """Find public annotated names of a class's body: name, type, default, and the text below."""
    for line, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name | ast.Attribute):
            name, text = ast.unparse(line.target).removeprefix("self."), ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = " ".join(str(below.value.value).split())
            if not name.startswith("_"):
                yield name, line.annotation, line.value, text


def _members(node: ast.ClassDef, *, fields: bool) -> Iterator[tuple[str, str]]:
    """List public attributes, properties and methods of a class: (name, line)."""
    for name, note, _, text in _kept(node) if fields else ():
        if text or not _decorated(node, "dataclass"):  # the others are in the signature
            yield name, _line(f"{name}: {ast.unparse(note)}", text)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for name, note, _, text in _kept(method):
                yield name, _line(f"{name}: {ast.unparse(note)}", text)
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name, special = method.name, method.name.startswith("__")
        if name == "__init__" or (name.startswith("_") and not (special and _summary(method))):
            continue
        if _decorated(method, "property", "cached_property"):
            gives = f": {ast.unparse(method.returns)}" if method.returns else ""
            yield name, _line(f"{name}{gives}", _summary(method))
        elif not _decorated(method, "setter", "overload"):
            waits = "async " if isinstance(method, ast.AsyncFunctionDef) else ""
            given = signature(method, bound=not _decorated(method, "staticmethod"))
            yield name, _line(f"{waits}{name}{given}", _summary(method))


def _line(code: str, text: str) -> str:
    return f"- `{code}`" + (f"<br>{text}" if text else "")
