"""Names of before: each answers for one release, and says the new one. Goes with version 0.3.

Runs in: any process. Hides the import system: `python -m async_grpo.status` and
`import async_grpo.tune` find no file, and this finder then does what was meant.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Self

COMMANDS = {
    "status": "status",
    "report": "report",
    "replay.__main__": "inspect",
    "export": "export",
    "evaluate": "eval",
    "migrate": "migrate",
    "plan": "predict",
    "serve": "serve",
}
"""Module that was run with `python -m` -> verb."""
MODULES = {
    "trainer": "run.trainer",
    "tune": "contrib.tune",
    "callbacks": "run.callbacks",
    "callbacks.base": "run.callbacks.base",
    "callbacks.early_stopping": "run.callbacks.early_stopping",
    "environments.adapters": "contrib.adapters",
}
"""Module that scripts and configurations name -> its name now."""
METRICS = {
    r"(train|replay|plan)/(lag_[\d+-]+/)?lag_(mean|max|min|span)": r"\1/\2staleness_\3",
    r"train/lag_([\d+-]+)/(.+)": r"train/staleness_\1/\2",
    r"train/(staleness_[\d+-]+/)?row_length": r"train/\1sequence_length",
    r"train/(staleness_[\d+-]+/)?rejected_rows": r"train/\1rejected_sequences",
    r"rollout/(masked|mixed_version)_rows": r"rollout/\1_responses",
    r"rollout/versions_per_row": "rollout/versions_per_response",
    r"replay/starved_s": "replay/learner_idle_s",
    r"time/learner/starved": "time/learner/idle",
    r"time/(learner/)?publish(ing)?": r"time/\1weight_sync",
    r"time/learner_anchor": "time/learner_proximal",
    r"weights/publications": "weights/syncs",
    r"plan/error_lag": "plan/error_staleness",
}
"""Name of a metric in a run of before, as a regular expression -> its name now."""
_PACKAGE = __name__.rpartition(".")[0]


@cache
def metric(name: str) -> str:
    """Return the present name of a metric, which may be one of before."""
    for before, now in METRICS.items():
        name = re.sub(f"^{before}$", now, name)
    return name


class WasVerdict:
    """A dataclass whose field `correct` was called `verdict`."""

    def __new__(cls, *values: object, **named: object) -> Self:
        """Raise TypeError for the name of before."""
        if "verdict" in named:
            raise TypeError(f"`verdict` of {cls.__name__} is called `correct` now: rename it")
        return super().__new__(cls)

    @property
    def verdict(self) -> None:
        """Raise AttributeError with the name of now."""
        raise AttributeError(f"`verdict` of {type(self).__name__} is called `correct` now")


class OldNames(MetaPathFinder, InspectLoader):
    """Finds the modules of both tables."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one; None for every other name."""
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or (name not in COMMANDS and name not in MODULES):
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in its place."""
        name = module.__name__.partition(".")[2]
        if name in MODULES:
            now = f"{_PACKAGE}.{MODULES[name]}"
            warnings.warn(f"{module.__name__} is {now} now", FutureWarning, stacklevel=2)
            sys.modules[module.__name__] = importlib.import_module(now)

    def get_code(self, fullname: str) -> CodeType:
        """Return what `python -m` runs."""
        name = fullname.partition(".")[2]
        old = f"python -m {fullname.removesuffix('.__main__')}"
        text = (
            f"import sys\nfrom {_PACKAGE}.cli import old_command\n"
            f"old_command({old!r}, {COMMANDS.get(name)!r}, sys.argv[1:])\n"
        )
        return compile(text, f"<{fullname}>", "exec")

    def get_source(self, fullname: str) -> None:
        """Return no source."""
