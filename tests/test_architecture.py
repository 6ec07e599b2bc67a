"""The shape of the package: imports go down, every library has its home, no error is swallowed.
How large files and functions are, `make lint` prints (tests/figures.py).
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "async_grpo"
RINGS = (
    "errors old_names",
    "algo runtime",  # formulas; what any process needs
    "config wire",
    "observe tasks replay weights",
    "environments",
    "rollout learner",  # bodies of processes
    "cluster",  # Ray
    "run",  # the driver
    "agents contrib",  # registered by name, as a user's plugin is
    "tools",  # one verb of the command line each
    "cli",
    "__main__ run.__main__ __init__",
)
"""Imports go to an earlier ring, or stay inside a package; those inside functions and for types
alone too.
"""
LAYER = {name: ring for ring, names in enumerate(RINGS) for name in names.split()}
BY_NAME = ("agents", "contrib", "tools")
"""Folders that the core does without: nobody below imports them, and these modules name them."""
REGISTRIES = ("cli", "run.callbacks.registry", "runtime.parts", "tasks.registry")

CIRCLES = {
    "config.algorithm_checks config.checks config.docs config.frozen_checks config.plugins "
    "config.schema": ("the schema checks itself, and a check says what a setting is called"),
    "replay.ledger replay.token_ledger": "the ledger's type in the signature of what sums it",
    "replay.admission replay.order replay.outstanding replay.partial replay.rules": (
        "types of the queue's parts in each other's signatures"
    ),
    "learner.checkpoint learner.learner": "the learner's type in the signature of what saves it",
    "run.callbacks.base run.callbacks.registry run.run_log run.trainer": (
        "a callback is given the trainer that calls it"
    ),
    "contrib.warm_start.cache contrib.warm_start.model": "the child imports the model, late",
}
"""Modules that import each other, with the reason; none over packages."""

LIBRARIES = {
    "config": "pydantic yaml",
    "errors": "",
    "runtime": "",
    "runtime.storage": "fsspec",
    "runtime.light_imports": "transformers",
    "runtime.provenance": "transformers",  # the tokenizer
    "wire": "msgpack numpy",
    "algo": "torch",
    "algo.accuracy": "",
    "algo.catalog": "",  # the settings read it
    "algo.invariance": "",  # so do the rules
    "algo.filters": "",  # plain numbers: the queue uses them
    "algo.rewards": "",
    "replay": "msgpack numpy",
    "tools.inspect": "rich tokenizers transformers",
    "tasks": "datasets fsspec math_verify reasoning_gym pyarrow pydantic msgpack numpy",
    "environments": "pydantic",
    "environments.tools": "pydantic transformers",  # schemas
    "learner.batching": "",
    "weights": "torch numpy",
    "weights.delta": "numpy",
    "weights.files": "numpy",
    "weights.transport": "torch",  # what the driver imports
    "weights.coordinator": "",
    "weights.fan_out": "numpy",
    "weights.pinning": "",
    "weights.checks": "numpy",
    "weights.layout": "torch",
    "weights.names": "torch safetensors transformers",  # the headers of the model's files
    "rollout": "numpy",
    "rollout.engine": "numpy",
    "rollout.engine.base": "numpy transformers",  # which tokens end a response
    "rollout.engine.vllm": "vllm torch numpy",
    "rollout.engine.vllm.worker": "vllm torch tqdm",  # a lock of its progress bars
    "rollout.chat_format": "renderers",
    "rollout.engine.vllm.early_process": "setproctitle",  # which vLLM brings
    "rollout.host": "numpy transformers",  # the tokenizer
    "rollout.frozen": "numpy transformers",  # as well
    "agents.endpoint.server": "uvicorn starlette",
    "rollout.partial": "msgpack numpy",
    "rollout.time_accounting": "",
    "learner": "torch transformers peft numpy safetensors",
    "learner.kernels": "torch transformers liger_kernel",
    "learner.backend.deepspeed": "torch deepspeed transformers",
    "learner.forward_choice": "torch transformers numpy huggingface_hub",  # one of its errors
    "run.checkpoint": "",
    "tools.predict": "",
    "observe": "",
    "observe.tracking.mlflow_sink": "mlflow",
    "observe.tracking.tensorboard_sink": "tensorboard",
    "observe.tracking.wandb_sink": "wandb",
    "observe.tracking.system_metrics": "mlflow",
    "observe.console.console": "rich",
    "observe.console.panel": "rich",
    "tools.hub": "huggingface_hub",
    "tools.report": "matplotlib",
    "tools.report.launch": "",
    "tools.watch.command": "starlette uvicorn",
    "contrib.warm_start": "torch",
    "contrib.warm_start.model": "torch tokenizers transformers safetensors",
    "run.preflight": "",
    "run.preflight.model": "transformers safetensors",  # the tokenizer
    "run.preflight.memory": "torch transformers",
    "tools.check.known_models": "transformers",
    "run.preflight.architecture": "torch transformers",
    "run.preflight.engine_trial": "torch transformers numpy",
    "run.planning": "torch",
    "cluster": "ray numpy",
    "cluster.addresses": "openai",
    "cluster.samples": "ray numpy tokenizers",
    "cluster.placement": "",  # tested without a cluster
    "cluster.downloads": "ray huggingface_hub",
    "cluster.restart_budget": "",
    "contrib.tune": "ray",
    "run": "",
    "agents": "pydantic",
    "contrib": "pydantic",
    "tools": "",
    "tools.doctor.machine": "torch packaging",
    "tools.doctor.cluster": "ray",
    "tools.doctor.services": "huggingface_hub",
    "cli": "",
    "old_names": "",
    "__main__": "",
    "__init__": "",
    "tools.migrate": "pydantic",
    "tools.evaluate": "torch",
}
"""Third-party libraries per module; the longest matching name counts."""


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file."""
    return {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, also those inside functions and of `if TYPE_CHECKING:` blocks.
    `from a import b` gives `a.b`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names
            )


def at_run_time(tree: ast.Module) -> ast.Module:
    """The module without what is imported for types alone, which no library needs."""

    class WithoutTypes(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            only = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            return node.orelse if only else node

    return ast.fix_missing_locations(WithoutTypes().visit(copy.deepcopy(tree)))


def part_of(name: str) -> str:
    """The longest dotted beginning of a name that has a layer; the first name where none has."""
    parts = name.split(".")
    beginnings = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((beginning for beginning in beginnings if beginning in LAYER), parts[0])


def check_imports(name: str, tree: ast.Module) -> list[str]:
    """What module `name` imports, and names by a string, against the tables."""
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
    for target in imports(at_run_time(tree)):
        first = target.partition(".")[0]
        if first and first != "async_grpo" and first not in sys.stdlib_module_names:
            key = name
            while key not in LIBRARIES:
                key = key.rpartition(".")[0]
            if first not in LIBRARIES[key].split():
                faults.append(
                    f"{name} imports {first}; {key} may import: {LIBRARIES[key] or 'nothing'}"
                )
    if top not in BY_NAME and name not in REGISTRIES:
        faults += [f"{name} names {text}" for text in named_by_strings(tree)]
    return faults


def named_by_strings(tree: ast.AST) -> Iterator[str]:
    """Modules of the folders that are found by name, where a string names one."""
    for text in strings(tree):
        if found := re.match(rf"async_grpo\.({'|'.join(BY_NAME)})\b\S*", text):
            yield found[0]


def strings(tree: ast.AST) -> Iterator[str]:
    """All strings other than docstrings."""
    documented = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        constant = isinstance(node, ast.Constant) and id(node) not in documented
        if constant and isinstance(node.value, str):
            yield node.value


def circles(trees: Mapping[str, ast.Module]) -> set[frozenset[str]]:
    """Modules that import each other, be it round several corners, inside functions, or for types:
    the largest sets.
    """
    to = {
        name: {_module(target, trees) for target in imports(tree)} for name, tree in trees.items()
    }
    reached = {name: _reached(name, to) for name in to}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in to}
    return {circle for circle in found if len(circle) > 1}


def _module(target: str, trees: Mapping[str, ast.Module]) -> str:
    """The module of this package that an import is of, or ""."""
    parts = target.split(".")[1:]
    beginnings = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((one for one in beginnings if one in trees), "")


def _reached(name: str, to: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(to[name])
    while waiting:
        one = waiting.pop()
        if one in to and one not in seen:
            seen.add(one)
            waiting += to[one]
    return seen


def check_code(name: str, tree: ast.AST) -> list[str]:
    """Errors that are swallowed, parts that do not exist yet."""
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
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


def test_modules_that_import_each_other_are_named_with_their_reason(
    trees: dict[str, ast.Module],
) -> None:
    assert circles(trees) == {frozenset(names.split()) for names in CIRCLES}
    for names in CIRCLES:
        assert len({name.partition(".")[0] for name in names.split()}) == 1, names


def test_a_circle_is_found() -> None:
    trees = {
        "a.x": ast.parse("def f():\n    from async_grpo.b import y"),
        "b.y": ast.parse("if TYPE_CHECKING:\n    from async_grpo.a.x import f"),
        "c": ast.parse("from async_grpo.b.y import g"),
    }
    assert circles(trees) == {frozenset({"a.x", "b.y"})}


def test_a_backend_of_the_learner_is_one_folder(trees: dict[str, ast.Module]) -> None:
    """One module names it; the others know neither its modules nor what it makes of settings and
    parameters.
    """
    inside = [name for name in trees if re.match(r"learner\.backend\.\w+\.", name)]
    folders = {name.rpartition(".")[0] for name in inside}
    assert folders == {"learner.backend.deepspeed"}
    others = {name: tree for name, tree in trees.items() if name not in inside}
    assert {
        (name, target.removeprefix("async_grpo."))
        for name, tree in others.items()
        for target in imports(tree)
        if any(f"{target}.".startswith(f"async_grpo.{folder}.") for folder in folders)
    } == {("learner.learner", "learner.backend.deepspeed.backend.DeepspeedBackend")}
    assert [
        f"{name}:{node.lineno} {node.attr}"
        for name, tree in others.items()
        if name.startswith("learner.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match("zero_stage$|deepspeed$|ds_", node.attr)
    ] == []


def test_an_engine_is_one_folder(trees: dict[str, ast.Module]) -> None:
    """One module names it; the others know neither its modules, nor its library, nor its section of
    the settings.
    """
    inside = [name for name in trees if re.match(r"rollout\.engine\.\w+\.", name)]
    libraries = {name.split(".")[2] for name in inside}
    assert libraries == {"vllm"}
    others = {name: tree for name, tree in trees.items() if name not in inside}
    named = re.compile(rf"(async_grpo\.rollout\.engine\.)?({'|'.join(libraries)})(\.\w|$)")
    assert {
        (name, target)
        for name, tree in others.items()
        for target in [*imports(tree), *(text for text in strings(tree) if "." in text)]
        if named.match(target)
    } == {("rollout.engine.choice", "async_grpo.rollout.engine.vllm.kind.VllmKind")}
    assert [
        f"{name}:{node.lineno}"
        for name, tree in others.items()
        if not name.startswith("config.")  # it checks them
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in libraries
    ] == []


def test_errors_are_not_swallowed(trees: dict[str, ast.Module]) -> None:
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


def test_package_files_are_empty() -> None:
    for path in modules().values():  # the root has the library's names
        if path.name == "__init__.py" and path.parent != PACKAGE:
            assert not path.read_text(encoding="utf-8"), f"{path} is not empty"
    for folder in {path.parent for path in modules().values()}:
        assert (folder / "__init__.py").exists(), f"{folder} is no package"


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("run.loop", "import ray", "run.loop imports ray"),
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
            "runtime.x (layer 1) imports replay (layer 3)",
        ),
        (
            "learner.x",
            "from async_grpo.rollout.producer import GroupProducer",
            "learner.x (layer 5) imports rollout (layer 5)",
        ),
        (
            "config.load",
            "if TYPE_CHECKING:\n    from async_grpo.run.trainer import Trainer",
            "config.load (layer 2) imports run (layer 7)",
        ),
        (
            "run.x",
            "def f():\n    from async_grpo.tools.status import run",
            "run.x (layer 7) imports tools (layer 9)",
        ),
        ("run.x", "PART = 'async_grpo.tools.status:run'", "run.x names async_grpo.tools.status"),
        ("wire.x", "from . import codec", "wire.x has a relative import"),
        ("helpers", "", "helpers is in no layer"),
    ],
)
def test_a_bad_import_is_found(name: str, source: str, fault: str) -> None:
    [found] = check_imports(name, ast.parse(source))
    assert found.startswith(fault)


def test_libraries_for_types_alone_are_free() -> None:
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
    ],
)
def test_bad_code_is_found(source: str, fault: str) -> None:
    [found] = check_code("x", ast.parse(source))
    assert found.startswith(fault)
    assert check_code("x", ast.parse("try:\n    f()\nexcept ValueError:\n    pass")) == []


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
