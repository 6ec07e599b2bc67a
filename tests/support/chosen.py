"""What a configuration chooses, by the names that settings and options have in the reference."""

from __future__ import annotations

from typing import Any

from async_grpo.config.docs import options, settings
from async_grpo.config.schema import Config
from async_grpo.config.unused import value_of


def chosen_value(config: Config, key: str) -> Any:
    """The value of a setting, the name alone of one that chooses; that of an option, None where its
    owner is not chosen.
    """
    if key in options():
        setting, name, option = key.rsplit(".", 2)
        found = value_of(config, setting)
        return found.get(option) if isinstance(found, dict) and found["name"] == name else None
    found = value_of(config, key)
    kind = settings()[key].kind if key in settings() else ""
    return found["name"] if kind and isinstance(found, dict) else found
