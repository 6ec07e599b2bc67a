"""Asynchronous GRPO: many engines generate, one learner trains off-policy within a bound.

Runs in: any process. Hides where the names of the library live; importing the package imports none
of them, and neither torch, Ray nor vLLM:

    from async_grpo import Trainer, load_config

    with Trainer(load_config("quickstart", ["run.total_steps=60"])) as trainer:
        trainer.train()
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from async_grpo.old_names import OldNames

if TYPE_CHECKING:
    from async_grpo.algo.catalog import (
        register_estimator,
        register_group_filter,
        register_importance,
        register_policy_loss,
        register_reward_shaping,
    )
    from async_grpo.config.load import ConfigError, load_config
    from async_grpo.config.schema import Config
    from async_grpo.errors import RunError
    from async_grpo.run.callbacks.base import Callback
    from async_grpo.run.trainer import Trainer

__all__ = [
    "Callback",
    "Config",
    "ConfigError",
    "RunError",
    "Trainer",
    "load_config",
    "register_estimator",
    "register_group_filter",
    "register_importance",
    "register_policy_loss",
    "register_reward_shaping",
]
sys.meta_path.insert(0, OldNames())
_HOMES = {
    "algo.catalog": "register_estimator register_group_filter register_importance "
    "register_policy_loss register_reward_shaping",
    "run.callbacks.base": "Callback",
    "config.load": "ConfigError load_config",
    "config.schema": "Config",
    "errors": "RunError",
    "run.trainer": "Trainer",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name of the library when it is asked for. Raises AttributeError."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
