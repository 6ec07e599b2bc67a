"""The shape of the package: imports go down, every library has its home, files and functions stay
small, no error is swallowed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "async_grpo"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
RINGS = (
    "errors groups algo",  # ground
    "wire config runtime batching",
    "tasks replay weights planning post_mortem",  # parts
    "environments",
    "loop rollout learner checkpoint warm_start",  # bodies of processes
    "cluster",  # Ray
    "plan callbacks",  # arithmetic: what a run will come to; what a user's code does
    "observe",  # aside, reading only
    "preflight report status export migrate simulation replay.__main__",  # reading only
    "lifecycle",
    "trainer evaluate plan.__main__",  # face
    "run serve tune",
)
"""Imports go to an earlier ring, or stay inside a package."""
LAYER = {name: ring for ring, names in enumerate(RINGS) for name in names.split()}

LIBRARIES = {
    "config": "pydantic yaml",
    "errors": "",
    "runtime": "",
    "runtime.light_imports": "transformers",
    "runtime.provenance": "transformers",  # the tokenizer
    "groups": "numpy",
    "wire": "msgpack numpy",
    "algo": "torch",
    "algo.accuracy": "",
    "algo.catalog": "",  # the settings read it
    "algo.invariance": "",  # so do the rules
    "algo.filters": "",  # plain numbers: the queue uses them
    "algo.rewards": "",
    "replay": "msgpack numpy",
    "replay.__main__": "rich tokenizers transformers",
    "tasks": "datasets math_verify reasoning_gym pydantic msgpack numpy",
    "environments": "pydantic",
    "environments.tools": "pydantic transformers",  # schemas
    "batching": "",
    "weights": "torch vllm numpy",
    "weights.worker": "torch vllm numpy tqdm",  # a lock of its progress bars
    "weights.transport": "torch",  # what the driver imports
    "weights.coordinator": "",
    "weights.fan_out": "numpy",
    "weights.pinning": "",
    "weights.checks": "numpy",
    "weights.layout": "torch",
    "weights.names": "torch vllm safetensors transformers",  # the headers of the model's files
    "weights.shared_memory": "torch numpy",  # a learner on CPU does without vLLM
    "rollout": "numpy",
    "rollout.engine": "vllm numpy transformers",
    "rollout.engine_support": "vllm numpy",  # whether it can run a model
    "rollout.tool_calls": "vllm",  # its parsers
    "rollout.chat_format": "renderers",
    "rollout.early_process": "setproctitle",  # which vLLM brings
    "rollout.actor": "numpy transformers",  # the tokenizer
    "rollout.endpoint.server": "uvicorn starlette",
    "rollout.partial": "msgpack numpy",
    "rollout.time_accounting": "",
    "learner": "torch deepspeed transformers peft numpy safetensors",
    "learner.forward_choice": "torch transformers numpy huggingface_hub",  # one of its errors
    "checkpoint": "",
    "plan": "",
    "observe": "",
    "observe.tracking.mlflow_sender": "mlflow",
    "observe.tracking.system_metrics": "mlflow",
    "observe.console.console": "rich",
    "observe.console.panel": "rich",
    "report": "matplotlib",
    "report.launch": "",
    "warm_start": "torch",
    "warm_start.model": "torch tokenizers transformers safetensors",
    "post_mortem": "",
    "preflight": "",
    "preflight.model": "transformers safetensors",  # the tokenizer
    "preflight.memory": "torch transformers",
    "preflight.known_models": "transformers",
    "preflight.architecture": "torch transformers",
    "preflight.engine_trial": "torch transformers numpy",
    "simulation": "msgpack numpy",
    "loop": "",
    "planning": "torch",
    "cluster": "ray numpy",
    "cluster.samples": "ray numpy tokenizers",
    "cluster.placement": "",  # tested without a cluster
    "cluster.downloads": "ray huggingface_hub",
    "trainer": "",
    "lifecycle": "",
    "callbacks": "",
    "tune": "ray",
    "run": "",
    "status": "",
    "export": "",
    "migrate": "pydantic",
    "evaluate": "torch",
    "serve": "",
}
"""Third-party libraries per module; the longest matching name counts."""


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file."""
    return {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, also those inside functions, but not of `if TYPE_CHECKING:`
    blocks. `from a import b` gives `a.b`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            for branch in node.orelse:
                yield from imports(ast.Module([branch], []))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names
            )
        else:
            yield from imports(node)


def part_of(name: str) -> str:
    """The longest dotted beginning of a name that has a layer; the first name where none has."""
    parts = name.split(".")
    beginnings = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((beginning for beginning in beginnings if beginning in LAYER), parts[0])


def check_imports(name: str, tree: ast.AST) -> list[str]:
    """What module `name` imports against the table."""
    top, faults = part_of(name), []
    if top not in LAYER:
        return [f"{name} is in no layer"]
    for target in imports(tree):
        first, _, rest = target.partition(".")
        if not first:
            faults.append(f"{name} has a relative import {target}")
        elif first == "async_grpo":
            other = part_of(rest)
            if other != top and not LAYER.get(other, 99) < LAYER[top]:
                faults.append(
                    f"{name} (layer {LAYER[top]}) imports {other} (layer {LAYER.get(other)})"
                )
        elif first not in sys.stdlib_module_names:
            key = name
            while key not in LIBRARIES:
                key = key.rpartition(".")[0]
            if first not in LIBRARIES[key].split():
                faults.append(
                    f"{name} imports {first}; {key} may import: {LIBRARIES[key] or 'nothing'}"
                )
    return faults


def check_code(name: str, tree: ast.AST) -> list[str]:
    """Functions that are too long, errors that are swallowed, parts that do not exist yet."""
    faults = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
        ):
            faults.append(f"{name}: {node.name} has {node.end_lineno - node.lineno + 1} lines")
        elif isinstance(node, ast.ExceptHandler):
            caught = (
                set()
                if node.type is None
                else {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
            )
            empty = all(
                isinstance(line, ast.Pass | ast.Continue | ast.Break) or _is_constant(line)
                for line in node.body
            )
            if node.type is None or (empty and caught & {"Exception", "BaseException"}):
                faults.append(f"{name}:{node.lineno} swallows every error")
        elif (
            isinstance(node, ast.Name)
            and node.id == "exit_code"
            and name != "errors"
            and isinstance(node.ctx, ast.Store)
        ):
            faults.append(f"{name}:{node.lineno} sets an exit code, which only errors.py does")
        elif isinstance(node, ast.Name) and node.id == "NotImplementedError":
            faults.append(f"{name}:{node.lineno} is not implemented")
    return faults


def late_attributes(trees: Mapping[str, ast.Module]) -> list[str]:
    """`Class.attribute` for every attribute of `self` that is assigned in a method and neither in
    `__init__` nor at class level, there or in a base class.
    """
    classes = {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def declared(name: str) -> set[str]:
        if name not in classes:
            return set()
        node = classes[name]
        own = {
            part.id
            for line in node.body
            if isinstance(line, ast.Assign | ast.AnnAssign)
            for part in ast.walk(line)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        for method in _methods(node):
            if method.name == "__init__":
                own |= _assigned(method)
        return own.union(*(declared(ast.unparse(base).rpartition(".")[2]) for base in node.bases))

    return sorted(
        f"{name}.{attribute}"
        for name, node in classes.items()
        for attribute in set().union(*map(_assigned, _methods(node))) - declared(name)
    )


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [line for line in node.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)]


def _assigned(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Attributes that the method gives its first argument."""
    first = method.args.args[0].arg if method.args.args else ""
    return {
        part.attr
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == first == "self"
    }


def _is_constant(line: ast.stmt) -> bool:
    """`...`, a string, or a bare `return`."""
    return (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)) or (
        isinstance(line, ast.Return) and line.value is None
    )


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {
        name: ast.parse(path.read_text(encoding="utf-8"))
        for name, path in modules().items()
        if path.name != "__init__.py"
    }


def test_imports_go_down_and_libraries_stay_at_home(trees: dict[str, ast.Module]) -> None:
    assert len(trees) > 40, "the package is not where this test looks"
    assert [fault for name, tree in trees.items() for fault in check_imports(name, tree)] == []


def test_functions_are_short_and_errors_are_not_swallowed(trees: dict[str, ast.Module]) -> None:
    assert [fault for name, tree in trees.items() for fault in check_code(name, tree)] == []


def test_no_attribute_is_born_outside_init(trees: dict[str, ast.Module]) -> None:
    """What is started later is an object of its own, which is there or not."""
    assert list(late_attributes(trees)) == []


def test_a_late_attribute_is_found() -> None:
    source = """
class Base:
    kind: str
    def __init__(self): self.a, self.b = 1, 2
class Part(Base):
    def start(self):
        self.a = self.kind = self.c = 3
        self.other.d = 4
    async def stop(self): self.b = 5
"""
    assert late_attributes({"x": ast.parse(source)}) == ["Part.c"]


def test_files_are_short_and_package_files_empty() -> None:
    for path in modules().values():
        lines, name = (
            len(path.read_text(encoding="utf-8").splitlines()),
            str(path.relative_to(PACKAGE)),
        )
        if (
            path.name == "__init__.py" and path.parent != PACKAGE
        ):  # the root has the library's names
            assert lines == 0, f"{name} is not empty"
        assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines"
    for folder in {path.parent for path in modules().values()}:
        assert (folder / "__init__.py").exists(), f"{folder} is no package"


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("loop", "import ray", "loop imports ray"),
        ("learner.x", "def f():\n    from mlflow import log_metric", "learner.x imports mlflow"),
        ("wire", "import torch.nn", "wire imports torch"),
        ("algo.filters", "import torch", "algo.filters imports torch"),
        ("tasks.x", "if True:\n    import vllm", "tasks.x imports vllm"),
        (
            "replay.x",
            "try:\n    import torch\nexcept ImportError:\n    raise",
            "replay.x imports torch",
        ),
        (
            "runtime.x",
            "from async_grpo.errors import RunError\nfrom async_grpo import replay",
            "runtime.x (layer 1) imports replay (layer 2)",
        ),
        (
            "loop",
            "from async_grpo.rollout.actor import RolloutActor",
            "loop (layer 4) imports rollout (layer 4)",
        ),
        (
            "config.load",
            "from async_grpo.run.trainer import Trainer",
            "config.load (layer 1) imports trainer (layer 10)",
        ),
        ("batching", "from . import wire", "batching has a relative import"),
        ("helpers", "", "helpers is in no layer"),
        (
            "replay.x",
            "from async_grpo.tools.inspect.command import main",
            "replay.x (layer 2) imports replay.__main__ (layer 8)",
        ),
    ],
)
def test_a_bad_import_is_found(name: str, source: str, fault: str) -> None:
    [found] = check_imports(name, ast.parse(source))
    assert found.startswith(fault)


def test_typing_only_imports_are_free() -> None:
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray\nelse:\n    "
        "import torch"
    )
    assert check_imports("wire", ast.parse(source)) == [
        "wire imports torch; wire may import: msgpack numpy"
    ]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("try:\n    f()\nexcept:\n    g()", "x:3 swallows"),
        ("try:\n    f()\nexcept Exception:\n    pass", "x:3 swallows"),
        ("try:\n    f()\nexcept (OSError, Exception) as error:\n    ...", "x:3 swallows"),
        (
            "for i in x:\n    try:\n        f()\n    except BaseException:\n        continue",
            "x:4 swallows",
        ),
        ("def f():\n    raise NotImplementedError", "x:2 is not implemented"),
        ("class Lost(Exception):\n    exit_code = 4", "x:2 sets an exit code"),
        ("def f():\n" + "    g()\n" * 60, "x: f has 61 lines"),
    ],
)
def test_bad_code_is_found(source: str, fault: str) -> None:
    [found] = check_code("x", ast.parse(source))
    assert found.startswith(fault)
    assert (
        check_code(
            "x",
            ast.parse("try:\n    f()\nexcept ValueError:\n    pass\ndef g():\n" + "    h()\n" * 59),
        )
        == []
    )


def test_no_test_imports_a_test() -> None:
    tests = Path(__file__).resolve().parent
    for path in sorted(tests.rglob("*.py")):
        for target in imports(ast.parse(path.read_text(encoding="utf-8"))):
            named = [part for part in target.split(".")[:-1] if part.startswith("test_")]
            assert not (target.startswith("tests.") and named), f"{path}: {target}"


def public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions of a module, and public methods of those classes."""
    for node in tree.body:
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def test_everything_public_has_a_docstring(trees: dict[str, ast.Module]) -> None:
    bare = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in trees.items()
        for node in public(tree)
        if ast.get_docstring(node) is None
    ]
    assert bare == []


def test_public_classes_have_unique_names(trees: dict[str, ast.Module]) -> None:
    homes: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_assignment_gives_more_than_two_attributes(trees: dict[str, ast.Module]) -> None:
    wide = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store)
        if sum(isinstance(part, ast.Attribute) for part in node.elts) > 2
    ]
    assert wide == []
