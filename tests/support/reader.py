"""A reader who tries what a page shows, from its first block to its last: code is run, in a module
of the page or in the file that it names, settings are loaded, rows are read. What would start a run
is a double (`tests.support.signature_doubles`).
"""

from __future__ import annotations

import builtins
import difflib
import dis
import importlib
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray

import async_grpo
from async_grpo.config import plugins, schema, yaml12
from async_grpo.config.load import load_config
from async_grpo.environments.base import Action, HasEnvironment, check_observation
from async_grpo.environments.tools import with_tools
from async_grpo.tasks.base import Task, check_score
from async_grpo.tasks.data import RowTask
from async_grpo.tasks.registry import load_task
from tests.support.registers import registers_put_back
from tests.support.signature_doubles import ClassDouble, called, value
from tests.support.snippets import Snippet

STARTING = {"async_grpo.run.trainer": "Trainer", "ray.tune": "Tuner"}
"""Module -> the class whose objects start something."""
OF_RAY = ("init", "shutdown", "cluster_resources", "available_resources", "nodes")
"""Functions of Ray that start a cluster, or need one."""
BASE: dict[str, Any] = {
    "run": {"total_steps": 100, "dir": "runs/base"},
    "model": {"path": "an-organisation/a-model"},
    "task": {"name": "arithmetic"},
}
"""What the settings of a fragment are merged into."""


class Reader:
    """Blocks of a page are tried one after the other, in the current directory."""

    def __init__(self, page: str, on_hand: Mapping[str, Any]) -> None:
        """on_hand: what the page takes as given, by name."""
        self.main = types.ModuleType("snippets_of_" + "".join(filter(str.isalnum, page)))
        vars(self.main).update(on_hand)
        self._stack = ExitStack()
        self._doubles: list[ClassDouble] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Modules can be imported from here, and nothing starts; afterwards all is as before."""
        before = set(sys.modules)
        with (
            registers_put_back(),
            self._stack,
            mock.patch.object(sys, "path", [str(Path.cwd()), *sys.path]),
            mock.patch.object(plugins, "_ask", _asked_here),
            mock.patch.multiple("ray", **{name: _promised(name) for name in OF_RAY}),
        ):
            sys.modules[self.main.__name__] = self.main
            try:
                yield
            finally:
                for name in set(sys.modules) - before:
                    if self._is_ours(sys.modules[name]):
                        _forget(name)

    def _is_ours(self, module: types.ModuleType) -> bool:
        """Whether the module is of the page, or has taken one of the doubles for the real thing."""
        file = getattr(module, "__file__", None) or ""
        held = {id(one) for one in vars(module).values()} & set(map(id, self._doubles))
        return module is self.main or file.startswith(str(Path.cwd())) or bool(held)

    def _double(self, code: str) -> None:
        """Put doubles in the places of what this code may start."""
        for home, name in STARTING.items():
            if home.startswith("async_grpo") or re.search(rf"\b{home.split('.')[-1]}\b", code):
                module = importlib.import_module(home)
                if not isinstance(getattr(module, name), ClassDouble):
                    stub = ClassDouble(getattr(module, name))
                    self._doubles.append(stub)
                    self._stack.enter_context(mock.patch.object(module, name, stub))

    def read(self, block: Snippet) -> None:
        """Try one block; the error says what is wrong with it."""
        if block.language == "python":
            self._python(block)
        elif block.language == "yaml":
            settings(block.code)
        elif block.language == "json":
            for row in block.code.splitlines():
                json.loads(row)

    def _python(self, block: Snippet) -> None:
        self._double(block.code)
        # errors name the lines of the page
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec", dont_inherit=True)
        if block.module is None:
            module = self.main
            exec(code, vars(module))
        else:
            Path(f"{block.module}.py").write_text(block.code, encoding="utf-8")
            importlib.invalidate_caches()
            module = importlib.import_module(block.module)
        known = {*vars(module), *vars(self.main), *vars(builtins)}
        if missing := sorted(_globals(code) - known):
            raise NameError(f"nobody knows {', '.join(missing)}")
        for made in [one for one in vars(module).values() if inspect.isclass(one)]:
            if made.__module__ == module.__name__:
                _check_overrides(made)
                poses = hasattr(made, "train") and hasattr(made, "evaluation")
                if poses and not issubclass(made, RowTask):  # that needs rows
                    name = f"{module.__name__}:{made.__name__}"
                    played(load_task(schema.TaskConfig(name=name), 0))


def _asked_here(request: str, path: tuple[str, ...], stamps: tuple[int, ...]) -> str:
    """The plugins' check in this process, which has torch already."""
    reply = plugins._answer(json.loads(request))
    reply["imports"] = [one for one in reply["imports"] if "imports torch" not in one[1]]
    return json.dumps(reply)


def _promised(name: str) -> Any:
    """A function of Ray that does nothing but check its arguments."""
    return partial(called, getattr(ray, name))


def _forget(module: str) -> None:
    del sys.modules[module]
    package, _, name = module.rpartition(".")
    if package in sys.modules and hasattr(sys.modules[package], name):
        delattr(sys.modules[package], name)


def settings(text: str) -> schema.Config:
    """Load a whole file, or a fragment as a part of a small one, with its task and its tools."""
    data, _ = yaml12.read(text)
    if not {"run", "model"} <= set(data):
        data = merged(BASE, data)
    Path("tried.yaml").write_text(yaml12.write(data), encoding="utf-8")
    config = load_config("tried.yaml")
    with_tools(load_task(schema.TaskConfig(name="arithmetic"), 0), config.environment.tools)
    return config


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, key by key; a task's with those of another name are gone."""
    result = dict(below)
    for key, over in above.items():
        inner = result.get(key)
        both = isinstance(inner, dict) and isinstance(over, dict) and "name" not in over
        result[key] = merged(inner, over) if both else over
    return result


def _globals(code: types.CodeType) -> set[str]:
    """Names that functions of this code look up outside themselves."""
    found = set()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _globals(inner)
            found |= {
                one.argval for one in dis.get_instructions(inner) if one.opname == "LOAD_GLOBAL"
            }
    return found


def _check_overrides(made: type) -> None:
    """Methods of a class that is made from one of ours are those that ours has, with the arguments
    that it gives; they are called with doubles of those, if the object is made without any.
    """
    for base in [one for one in made.__mro__[1:] if one.__module__.startswith("async_grpo")]:
        usual = {name: one for name, one in vars(base).items() if inspect.isfunction(one)}
        for name, method in vars(made).items():
            if name in usual:
                inspect.signature(method).bind(*inspect.signature(usual[name]).parameters)
            elif inspect.isfunction(method) and difflib.get_close_matches(name, usual):
                raise AttributeError(f"{base.__name__} has no {name}")
        if issubclass(made, async_grpo.Callback) and base is async_grpo.Callback:
            _tell_all(made(), [name for name in usual if name in vars(made)])


def _tell_all(callback: Any, events: list[str]) -> None:
    home = sys.modules[async_grpo.Callback.__module__]
    for name in events:
        notes = getattr(async_grpo.Callback, name).__annotations__
        told = [value(note, home) for argument, note in notes.items() if argument != "return"]
        getattr(callback, name)(*told)


def played(task: Task) -> None:
    """Pose a problem of each kind, and score an answer or play a turn."""
    assert len(task) and isinstance(task.fingerprint, str)
    for problem in (task.train(0), task.evaluation(1)[0]):
        if not isinstance(task, HasEnvironment):
            check_score(task.score("Four words are here.", problem.reference), task.weights)
            continue
        environment = task.environment()
        check_observation(environment.reset(problem.reference, 0), task.weights)
        check_observation(environment.step(Action("1")), task.weights)
        environment.close()
