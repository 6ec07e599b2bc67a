"""The beginning and the end of a start: Ray, and what the run's processes leave on this machine.

Runs in: the driver's main thread, where Ray installs signal handlers. Ray and what needs torch come
up beside each other, since either takes seconds: torch is imported in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Callable, Collection
from types import ModuleType

from async_grpo.cluster.placement import room_for
from async_grpo.config.schema import Config
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import descendants, remove_abandoned

ENDING_TIMEOUT_S = 10.0
"""For killed processes to be gone: their memory is given back first."""


def uses_cluster() -> bool:
    """Whether a run would use a Ray that is there: initialised in this process, or RAY_ADDRESS."""
    ray = sys.modules.get("ray")  # importing it takes seconds
    return (ray is not None and ray.is_initialized()) or bool(os.environ.get("RAY_ADDRESS"))


class Connection:
    """A start's connection to Ray, made at once, until `close`. `key` names its memory segments."""

    def __init__(
        self,
        config: Config,
        event_loop: asyncio.AbstractEventLoop,
        *,
        check: Callable[[], None],
        learner_only: bool = False,
    ) -> None:
        """Join or start Ray while `event_loop`, in another thread, imports. check: called while
        Ray's node is waited for; what it raises ends the start. Raises SetupError.
        """
        from async_grpo.cluster.session import RaySession

        self._config, self.key = config, uuid.uuid4().hex[:8]
        self._stacks = stacks.home(config.run.dir)
        importing = asyncio.run_coroutine_threadsafe(_import_system(), event_loop)
        processes = config.learner.ranks + 1 if learner_only else room_for(config)
        self.session = RaySession.open(processes=processes, check=check)
        try:
            importing.result()
        except BaseException:
            self.session.close()  # nobody else has it
            raise
        stacks.end(self._stacks)  # of a start that was killed
        stacks.register("driver", self._stacks)
        self.left = self.remove_leftovers()

    def remove_leftovers(self, *, ending: Collection[int] = ()) -> str:
        """Remove what this start or killed ones left; say what stays. ending: killed just now."""
        from async_grpo.learner.drafts import remove_drafts
        from async_grpo.weights.files import remove_files
        from async_grpo.weights.shared_memory import remove_segments
        from async_grpo.weights.transport import fallback_directory

        remove_segments(self.key, fallback_directory(self._config))
        remove_drafts(self.key)
        # what engines left that were killed, not closed
        remove_abandoned("engine", ending=ending, wait_s=ENDING_TIMEOUT_S)
        return remove_files(fallback_directory(self._config), wait_s=ENDING_TIMEOUT_S)

    def close(self) -> None:
        """Leave Ray as it was, or end the cluster that was started here."""
        ending = descendants()
        try:
            self.session.close()
        finally:
            stacks.end(self._stacks)
            self.remove_leftovers(ending=ending)


async def _import_system() -> ModuleType:
    from async_grpo.run import system

    return system
