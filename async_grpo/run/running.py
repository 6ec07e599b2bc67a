"""What runs while a trainer is between its calls: Ray, the processes of the run, an event loop.

Runs in: the driver. Hides the thread of the event loop, which keeps rollout actors, publications
and health probes going, and in which order things come up and go:

    connect: thread, Ray -> find_room: places, memory -> start: models, processes
    end: processes -> disconnect: Ray as it was before -> close: thread

Invariant: after `end` and `disconnect` no process and no shared-memory segment is left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from async_grpo.cluster.placement import crowded
from async_grpo.config.schema import Config
from async_grpo.errors import RunError
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.checkpoint.saver import Saver
from async_grpo.run.connection import Connection
from async_grpo.run.preflight.devices import look_at_memory
from async_grpo.run.preflight.run_check import Checked
from async_grpo.runtime.listener import RunListener
from async_grpo.runtime.stopping import Stop

if TYPE_CHECKING:  # torch and Ray take seconds to import
    from async_grpo.run.rerun import Rerun
    from async_grpo.run.system import Places, System


class RunningSystem:
    """Ray, and the system of a run or the learner of a replay on it; each is None before it starts
    and after it ends.
    """

    def __init__(self, stop: Stop) -> None:
        """stop: cuts short what is stoppable."""
        self._stop = stop
        self.connection: Connection | None = None
        self.system: System | None = None
        self.rerun: Rerun | None = None
        self._places: Places | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="async_grpo-loop", daemon=True
        )

    @property
    def on(self) -> bool:
        """Whether coroutines can be run."""
        return self._thread.is_alive()

    @property
    def _connected(self) -> Connection:
        assert self.connection is not None, "connect() comes first"
        return self.connection

    @property
    def step_under_way(self) -> int | None:
        """The learner step that is being trained, or comes next; None while nothing runs."""
        running = self.system or self.rerun
        return None if running is None or running.loop is None else running.loop.steps_done + 1

    def refuse_second(self) -> None:
        """Raise RunError once `connect` was called: a thread begins once."""
        if self._thread.ident is not None:
            raise RunError(
                "this trainer has run, or its start failed: call its stop, and build another one"
            )

    def connect(
        self, config: Config, *, note: Callable[[str], None], learner_only: bool = False
    ) -> Connection:
        """Join or start Ray; from the main thread. Raises SetupError."""
        self._thread.start()
        connection = self.connection = Connection(
            config, self._loop, check=self._stop.check, learner_only=learner_only
        )
        if (warning := connection.session.exposed_token()) is not None:
            note(warning)
        if connection.left:
            note(connection.left)
        return connection

    def find_room(self, config: Config, model_dir: str, *, note: Callable[[str], None]) -> Config:
        """Reserve the places of all processes, and return the settings with what fits the memory
        there in place of `auto`. Raises SetupError.
        """
        from async_grpo.run.system import reserve

        session = self._connected.session

        async def find() -> Config:
            places = self._places = await reserve(config, session)
            if why := crowded(places.placement):
                note(f"warning: {why}")
            gpus = places.placement.device == "cuda"
            memory = await asyncio.to_thread(session.gpu_memory) if gpus else {}
            settled, lines = look_at_memory(config, model_dir, places, memory)
            for line in lines:
                note(line)
            return settled

        found: Config = self.run(find(), stoppable=True)
        return found

    def start(
        self,
        config: Config,
        checked: Checked,
        *,
        model_dir: str,
        origin: Origin,
        saver: Saver,
        listener: RunListener,
    ) -> None:
        """Start engines and learner, which loads its weights."""
        from async_grpo.cluster.downloads import download_everywhere
        from async_grpo.run.system import StartFacts, System

        places = self._places
        assert places is not None, "find_room() comes first"
        facts = StartFacts(
            total_steps=checked.total_steps,
            weights=checked.weights,
            order=checked.order,
            fingerprint=checked.fingerprint,
            model_dir=model_dir,
            origin=origin,
            key=self._connected.key,
            pass_rates=checked.pass_rates,
        )

        async def start() -> None:
            nodes = {slot.node_id for slot in places.slots}
            frozen = [one.path for one in config.frozen_here.values()]
            models = (model_dir, config.model.reference, *frozen)
            await download_everywhere(models, nodes, note=listener.note)
            self.system = System(config, facts, places=places, listener=listener, saver=saver)
            await self.system.start()

        self.run(start(), stoppable=True)

    def run(self, work: Coroutine[Any, Any, Any], *, stoppable: bool = False) -> Any:
        """Wait for a coroutine in the event loop; its result. Raises RunError in its own thread,
        StopRequested where it was cut short.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RunError("a coroutine of the run cannot wait for a call of its trainer")
        return self._stop.run(work, self._loop, stoppable=stoppable)

    def fail(self, error: BaseException) -> None:
        """End the run with this error; from any thread."""
        if (system := self.system) is not None:
            self._loop.call_soon_threadsafe(system.fail, error)

    def abandon(self) -> None:
        """Remove what would outlive this process (for the last act of a signal handler)."""
        if self.connection is not None:
            self.connection.remove_leftovers()

    def end(self, *, orderly: bool) -> None:
        """Stop all processes. A second call does nothing."""
        running = self.system or self.rerun
        self.system = self.rerun = None
        if running is not None:
            self.run(running.stop(orderly=orderly))

    def disconnect(self) -> None:
        """Leave Ray as it was before `connect`. A second call does nothing."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the event loop, if it runs."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            if not self._thread.is_alive():
                self._loop.close()
