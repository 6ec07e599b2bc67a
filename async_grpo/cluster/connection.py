"""Starts Ray and imports torch side by side, since either takes seconds.

Runs in: the driver's main thread, where Ray installs signal handlers; torch is imported in the
thread of the event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from async_grpo.cluster.placement import room_for
from async_grpo.config.schema import Config

if TYPE_CHECKING:
    from async_grpo.cluster.session import Session
    from async_grpo.cluster.system import System


def connect(config: Config, event_loop: asyncio.AbstractEventLoop) -> tuple[type[System], Session]:
    """Join or start Ray, while `event_loop`, which runs in another thread, imports the system.
    Raises SetupError.
    """
    from async_grpo.cluster.session import Session

    importing = asyncio.run_coroutine_threadsafe(_import_system(), event_loop)
    session = Session.open(processes=room_for(config))
    return importing.result(), session


async def _import_system() -> type[System]:
    from async_grpo.cluster.system import System

    return System
