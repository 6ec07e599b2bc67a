"""Parts of the package that the core does without: agents, tools and contrib, found by name.

Runs in: any process. Hides whether a part is there: the core trains, resumes and evaluates without
these folders. Invariant: outside of this table, of the tasks' (`tasks.registry`) and of the command
line's (`cli`) nothing in the core names a module of theirs.
"""

from __future__ import annotations

import importlib
from typing import Any

from async_grpo.errors import SetupError

PARTS = {
    "forecast": "async_grpo.tools.predict.forecast:Forecast",  # what a run is expected to come to
    "report": "async_grpo.tools.report.launch:report_on",  # written at the end of a run
    "hub": "async_grpo.tools.hub",  # pushes the final model
    "peers": "async_grpo.tools.migrate.peers:of_another",  # says what a peer's file becomes here
    "peer_names": "async_grpo.tools.migrate.answers",  # our settings by the names that peers give
    "peer_answer": "async_grpo.tools.migrate.answers:answer",  # what to do about a peer's key
    "warm_start": "async_grpo.contrib.warm_start.cache",  # makes the model of `model.warm_start`
    "small_model": "async_grpo.contrib.warm_start.model",
}
"""Name -> `module` or `module:name`."""


def part(name: str) -> Any | None:
    """Import a part of this name from `PARTS`; None where its folder is not installed."""
    module, _, attribute = PARTS[name].partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # it is there, and lacks a library
        return None
    return getattr(found, attribute) if attribute else found


def needed(name: str, setting: str) -> Any:
    """Import a part without which `setting` cannot be. Raises SetupError where it is missing."""
    found = part(name)
    if found is None:
        module = PARTS[name].partition(":")[0]
        raise SetupError(f"{setting} needs {module}, which is not installed here")
    return found
