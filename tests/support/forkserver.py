"""Child processes of tests that begin with everything imported: torch, DeepSpeed and vLLM take ten
seconds of CPU time every time.

All modules of a test run share one fork server, and whoever starts the first child fixes what it
imports; so the list is here. A child has the environment that the test has at that moment, not the
one in which the server was started.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOADED = ["tests.support.rank_imports", "tests.support.learners"]
"""None of them starts a thread of Python's or of torch's, which a fork would lose."""
ENGINES = ["async_grpo.rollout.engine.vllm.worker", "tests.support.nccl_over_gloo"]


def import_engines() -> None:
    """Let children begin with vLLM, too. For modules whose children receive weights, when they are
    imported.
    """
    PRELOADED.extend(name for name in ENGINES if name not in PRELOADED)


def context() -> ForkServerContext:
    """Starts processes, and makes pipes for them."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


class InThisEnvironment:
    """A main function that finds the environment of the test that built this."""

    def __init__(self, main: Callable[..., Any]) -> None:
        self._main, self._environment = main, dict(os.environ)

    def __call__(self, *arguments: Any) -> Any:
        os.environ.clear()
        os.environ.update(self._environment)
        return self._main(*arguments)
