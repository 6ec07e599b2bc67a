"""Makes the callbacks that a configuration names, and checks those that a script gives.

Runs in: the driver. Hides the table of built-in callbacks, and the import of a user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from async_grpo.errors import SetupError
from async_grpo.run.callbacks.base import Callback
from async_grpo.runtime.text import first_line

BUILT_IN = {
    "early_stopping": "async_grpo.run.callbacks.early_stopping:EarlyStopping",
    "webhook": "async_grpo.run.callbacks.webhook:Webhook",
}
GONE = {"metric_stream": "metrics.jsonl has every line, and a custom callback can send them"}
"""Callbacks of earlier versions -> what does their work now."""


def make_callbacks(wanted: Mapping[str, Mapping[str, Any]]) -> list[Callback]:
    """Make callbacks from names and the arguments of their constructors. Raises SetupError."""
    return [_make(name, arguments) for name, arguments in wanted.items()]


def given_callbacks(given: Any) -> list[Callback]:
    """Take the callbacks that a script gives its trainer. Raises SetupError for what is none."""
    if isinstance(given, Callback) or not isinstance(given, Iterable):
        raise SetupError(
            f"`callbacks` is a list of callbacks: write callbacks=[...], not {given!r}"
        )
    callbacks = list(given)
    for one in callbacks:
        if isinstance(one, type):
            raise SetupError(
                f"`callbacks` has the class {one.__name__}; give an object: {one.__name__}(...)"
            )
        if not isinstance(one, Callback):
            raise SetupError(f"`callbacks` has {one!r}, which is no async_grpo.Callback")
    return callbacks


def _make(name: str, arguments: Mapping[str, Any]) -> Callback:
    module_name, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if name in GONE:
        raise SetupError(f"`run.callbacks`: {name} was removed: {GONE[name]}; leave it out")
    if not (module_name and colon and class_name):
        raise SetupError(
            f"`run.callbacks`: there is no callback {name}; use {' or '.join(BUILT_IN)}, or a "
            "custom one as package.module:Class"
        )
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
        made = kind(**arguments)
    except (Exception, SystemExit) as error:  # a module that is a script may exit
        why = f"{type(error).__name__}: {first_line(error)}"
        raise SetupError(f"`run.callbacks`: {name} cannot be made: {why}") from error
    if not isinstance(made, Callback):
        raise SetupError(f"`run.callbacks`: {name} is no subclass of async_grpo.Callback")
    return made
