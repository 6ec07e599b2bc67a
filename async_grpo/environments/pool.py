"""Environments in child processes: an episode that hangs or fails harms itself alone.

Runs in: rollout actors, on one event loop. Hides the children, which child an episode lives in, and
their replacement:

    open(reference, seed) -> OpenEpisode -> step(action) ... -> close
                                 |
          child 0: episodes 0, 3, 4 ...     child 1: episodes 1, 2, 5 ...

Invariants: every call gets one answer, an observation or an EnvironmentFailed, within its deadline;
a child whose call does not return, or that ran out of memory, gets no new episodes and is ended
when its last one has ended; a child that says nothing while it owes answers is killed, and all of
its episodes fail: nobody knows whose fault it was.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from async_grpo.config import schema
from async_grpo.config.environment import EnvironmentConfig
from async_grpo.environments.base import STUCK, Action, Observation, from_wire
from async_grpo.tasks import pipe
from async_grpo.tasks.children import Child, ChildError, ChildKind

SILENCE_S = 5.0
"""A child answers this much later than its longest deadline, or is not able to."""
CLOSE_S = 10.0
END_S = 3.0
"""How long a child that is ended may take to close what is open in it."""


class EnvironmentFailed(ChildError):
    """A call of an environment failed. `reason` is one of `EnvironmentPool.REASONS`."""


_KIND = ChildKind(
    "environment",
    "async_grpo.environments.child",
    "environment.step_timeout_s",
    EnvironmentFailed,
    variables=("TMPDIR", "SSL_CERT_FILE"),  # which programs have from it
    has_children=True,
)


@dataclass(eq=False)
class _Host:
    """A child, its open episodes and the calls that it owes answers to."""

    child: Child
    episodes: set[int] = field(default_factory=set)
    calls: dict[int, asyncio.Future[list[Any]]] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    leaving: bool = False
    """A call did not return in it: it gets no new episodes."""
    reader: asyncio.Task[None] | None = None


class EnvironmentPool:
    """Children that host the episodes of one task. All methods belong to one event loop."""

    REASONS = (
        "timeout",
        "crash",
        "memory",
        "exception",
        "wrong_type",
        "not_sendable",
        "start",
        "closed",
        "replay",
        "silent",
    )

    def __init__(
        self,
        task: schema.TaskConfig,
        settings: EnvironmentConfig,
        *,
        weights: dict[str, float],
        seed: int,
        cpu: set[int] | None = None,
    ) -> None:
        """weights: of the task's reward components. cpu: cores of the children, None for any."""
        self.errors: Counter[str] = Counter()
        """Calls that failed, by reason."""
        self.seconds = dict.fromkeys(("reset", "step", "close"), 0.0)
        """Time in calls, by name."""
        self._settings, self._weights = settings, weights
        self._timeouts = {
            "reset": settings.reset_timeout_s,
            "step": settings.step_timeout_s,
            "close": CLOSE_S,
        }
        self._setup = pipe.pack(
            {
                "settings": task.model_dump(),
                "seed": seed,
                "cpu": sorted(cpu) if cpu else None,
                "memory_mb": settings.memory_mb,
                "tools": settings.tools,
                "timeouts": self._timeouts,
            }
        )
        self._hosts: list[_Host] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._closed = False

    @property
    def open_episodes(self) -> int:
        """Count the episodes that have an environment."""
        return sum(len(host.episodes) for host in self._hosts)

    async def start(self) -> None:
        """Start all children and wait until they are ready. Raises EnvironmentFailed("start")."""
        async with self._starting:
            await self._fill()

    async def open(self, reference: Any, seed: int) -> tuple[OpenEpisode, Observation]:
        """Begin an episode in a new environment. Raises EnvironmentFailed."""
        host = await self._freest()
        episode = OpenEpisode(self, host, next(self._numbers))
        host.episodes.add(episode.number)
        try:
            argument = {"reference": reference, "seed": seed}
            return episode, await self._observe(host, episode.number, "reset", argument)
        except BaseException:
            await asyncio.shield(episode.close())  # also when it is cancelled once more
            raise

    async def close(self) -> None:
        """End all children, with what their environments hold; calls in progress end in
        EnvironmentFailed("closed"). Idempotent.
        """
        self._closed = True
        await asyncio.gather(*[self._end(host, "closed") for host in list(self._hosts)])

    async def _fill(self) -> None:
        missing = self._settings.workers - sum(not host.leaving for host in self._hosts)
        for child in await asyncio.gather(
            *[Child.spawn(_KIND, self._setup) for _ in range(missing)]
        ):
            host = _Host(child)
            host.reader = asyncio.create_task(self._read(host))
            self._hosts.append(host)
        if self._closed:
            await self.close()

    async def _freest(self) -> _Host:
        async with self._starting:
            if self._closed:
                raise EnvironmentFailed("closed", "the environments have been closed")
            await self._fill()
            free = [host for host in self._hosts if not host.leaving]
        return min(free, key=lambda host: len(host.episodes))

    async def _observe(self, host: _Host, episode: int, name: str, argument: Any) -> Observation:
        try:
            try:
                value = await self._call(host, episode, name, argument)
                return from_wire(value, self._weights)
            except (TypeError, ValueError) as error:
                raise EnvironmentFailed("wrong_type", str(error)) from error
        except EnvironmentFailed as error:
            self.errors[error.reason] += 1
            raise

    async def _call(self, host: _Host, episode: int, name: str, argument: Any) -> Any:
        number, began = next(self._numbers), time.monotonic()
        try:
            body = pipe.pack([number, episode, name, argument])
            if host not in self._hosts:
                raise EnvironmentFailed("crash", "the environment's process has ended")
            if not host.calls:
                host.heard = began
            host.calls[number] = asyncio.get_running_loop().create_future()
            await host.child.send(body, self._timeouts[name])
            status, detail = await self._answer(host, host.calls[number])
        except (TypeError, OverflowError, pipe.MessageTooLarge) as error:
            raise EnvironmentFailed("not_sendable", str(error)) from error
        finally:
            host.calls.pop(number, None)
            self.seconds[name] += time.monotonic() - began
        if status != "ok":
            reason = "timeout" if status == STUCK else status
            raise EnvironmentFailed(
                reason if reason in self.REASONS else "crash", str(detail)[:1000]
            )
        return detail

    async def _answer(self, host: _Host, future: asyncio.Future[list[Any]]) -> tuple[str, Any]:
        """Wait for the reply, as long as the child says something now and then."""
        patience = max(self._timeouts.values()) + SILENCE_S
        while not future.done():
            left = host.heard + patience - time.monotonic()
            if left <= 0:
                await self._end(host, "crash", f"the child said nothing for {patience:g} s")
                break
            await asyncio.wait({future}, timeout=left)
        reply = await future
        if len(reply) != 2 or not isinstance(reply[0], str):
            raise EnvironmentFailed("crash", f"the environment child answered {reply!r:.80}")
        return reply[0], reply[1]

    async def _read(self, host: _Host) -> None:
        """Deliver replies until the child ends."""
        while True:
            try:
                number, *reply = await host.child.receive(None)
            except ChildError as error:
                await self._end(host, error.reason, str(error))
                return
            host.heard = time.monotonic()
            if reply[0] in (STUCK, "memory"):  # also where nobody waits for it any more
                host.leaving = True
            future = host.calls.get(number) if isinstance(number, int) else None
            if future is not None and not future.done():
                future.set_result(reply)

    async def _end(self, host: _Host, reason: str, detail: str = "") -> None:
        """Kill a child; the calls that it owes answers to fail."""
        if host not in self._hosts:
            return
        self._hosts.remove(host)
        for future in host.calls.values():
            if not future.done():
                future.set_result([reason, detail or "the environment's process was ended"])
        holds = bool(host.episodes) and reason == "closed"
        host.episodes.clear()
        if host.reader is not None and host.reader is not asyncio.current_task():
            host.reader.cancel()
        if holds:
            await host.child.end(END_S)
        else:
            await host.child.kill()

    async def _left(self, host: _Host, episode: int) -> None:
        """Take an episode out of its child."""
        if episode not in host.episodes:
            return
        try:
            if not self._closed:
                await self._call(host, episode, "close", None)
        except EnvironmentFailed as error:
            self.errors[error.reason] += 1
        finally:
            host.episodes.discard(episode)
            if host.leaving and not host.episodes:
                await self._end(host, "closed")


class OpenEpisode:
    """One episode's environment."""

    def __init__(self, pool: EnvironmentPool, host: _Host, number: int) -> None:
        self._pool, self._host = pool, host
        self.number = number

    async def step(self, action: Action) -> Observation:
        """Ask the environment. Raises EnvironmentFailed."""
        return await self._pool._observe(self._host, self.number, "step", asdict(action))

    async def close(self) -> None:
        """Close the environment; its errors are counted."""
        await self._pool._left(self._host, self.number)
