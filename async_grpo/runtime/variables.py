"""Values that come from the environment of whoever starts a run: keys, tokens, proxies.

    driver: variables --arguments--> rollout actor: take --environment--> children: take

Runs in: any process. Hides where they come from. Invariants: what has been read here is in no text
that `hide` has been given; this process's own environment stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from async_grpo.errors import SetupError

_SHORTEST = 4
"""Characters of a value that can be a secret."""
_TAKEN: dict[str, str] = {}
_SECRETS: set[str] = set()


def variables(names: Collection[str], setting: str) -> dict[str, str]:
    """Return the values of these variables. Raises SetupError, which names the setting, for one
    that is not set.
    """
    for name in names:
        if not os.environ.get(name):
            raise SetupError(
                f"{setting} is {name}, which is not set where the run starts: export it (with "
                "`ray job submit`: --runtime-env-json)"
            )
    found = {name: os.environ[name] for name in names}
    keep_secret(found.values())
    return found


def take(values: Mapping[str, str]) -> None:
    """Have these variables from another process."""
    _TAKEN.update(values)
    keep_secret(values.values())


def known(names: Collection[str]) -> dict[str, str]:
    """Return those of the variables that are there, taken or of this process's environment."""
    found = {name: _TAKEN.get(name, os.environ.get(name)) for name in names}
    values = {name: value for name, value in found.items() if value}
    keep_secret(values.values())
    return values


def keep_secret(values: Collection[str]) -> None:
    """Let `hide` take these values out, also where an error shows them as Python does."""
    forms = {form for value in values for form in (value, value.strip(), repr(value)[1:-1])}
    _SECRETS.update(form for form in forms if len(form) >= _SHORTEST)


def hide(text: str) -> str:
    """Return a text without the values that this process knows."""
    for secret in sorted(_SECRETS, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
