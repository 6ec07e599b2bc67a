"""Makes the callbacks that a configuration names.

Runs in: the driver. Hides the table of built-in callbacks, and the import of a user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from async_grpo.callbacks.base import Callback
from async_grpo.errors import SetupError
from async_grpo.runtime.text import first_line

BUILT_IN = {
    "early_stopping": "async_grpo.callbacks.early_stopping:EarlyStopping",
    "metric_stream": "async_grpo.callbacks.metric_stream:MetricStream",
}


def make_callbacks(wanted: Mapping[str, Mapping[str, Any]]) -> list[Callback]:
    """Make callbacks from names and the arguments of their constructors. Raises SetupError."""
    return [_make(name, arguments) for name, arguments in wanted.items()]


def _make(name: str, arguments: Mapping[str, Any]) -> Callback:
    module_name, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if not (module_name and colon and class_name):
        raise SetupError(
            f"`run.callbacks`: there is no callback {name}; use {' or '.join(BUILT_IN)}, or your "
            "own as package.module:Class"
        )
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
        made = kind(**arguments)
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise SetupError(f"`run.callbacks`: {name} cannot be made: {why}") from error
    if not isinstance(made, Callback):
        raise SetupError(f"`run.callbacks`: {name} is no subclass of async_grpo.Callback")
    return made
