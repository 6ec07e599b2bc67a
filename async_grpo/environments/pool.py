"""Environments in child processes: an episode that hangs or fails harms itself alone.

Runs in: rollout actors, on one event loop. Hides which child an episode lives in, and the calls of
many episodes over one pipe:

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
from dataclasses import asdict
from typing import Any

from async_grpo.config import schema
from async_grpo.config.environment import EnvironmentConfig
from async_grpo.environments.base import Action, Observation, from_wire
from async_grpo.tasks import pipe
from async_grpo.tasks.children import SILENCE_S, ChildError, ChildPool, ManyCalls

CLOSE_S = 10.0
END_S = 3.0
"""How long a child that is ended may take to close what is open in it."""


class EnvironmentFailed(ChildError):
    """A call of an environment failed. `reason` is one of `EnvironmentPool.REASONS`."""


class _Host(ManyCalls):
    """A child and its open episodes."""

    name, module = "environment", "async_grpo.environments.child"
    setting, error = "environment.step_timeout_s", EnvironmentFailed
    variables = ("TMPDIR", "SSL_CERT_FILE")  # which programs have from it
    has_children = True

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.episodes: set[int] = set()

    def _grace_s(self, reason: str) -> float:
        """Let it close what is open when all ends."""
        holds = bool(self.episodes) and reason == "closed"
        self.episodes.clear()
        return END_S if holds else 0.0


class EnvironmentPool(ChildPool[_Host]):
    """Children that host the episodes of one task."""

    REASONS = (*ChildPool.REASONS, "replay", "silent")

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
        self._timeouts = {
            "reset": settings.reset_timeout_s,
            "step": settings.step_timeout_s,
            "close": CLOSE_S,
        }
        more = {"tools": settings.tools, "timeouts": self._timeouts}
        super().__init__(_Host, task, settings, seed=seed, cpu=cpu, more=more)
        self.seconds = dict.fromkeys(self._timeouts, 0.0)
        """Time in calls, by name."""
        self._weights, self._numbers = weights, itertools.count()

    @property
    def open_episodes(self) -> int:
        """Count the episodes that have an environment."""
        return sum(len(host.episodes) for host in self.children)

    async def open(self, reference: Any, seed: int) -> tuple[OpenEpisode, Observation]:
        """Begin an episode in a new environment. Raises EnvironmentFailed."""
        host = min(await self.present(), key=lambda host: (host.leaving, len(host.episodes)))
        episode = OpenEpisode(self, host, next(self._numbers))
        host.episodes.add(episode.number)
        try:
            argument = {"reference": reference, "seed": seed}
            return episode, await self._observe(host, episode.number, "reset", argument)
        except BaseException:
            await asyncio.shield(episode.close())  # also when it is cancelled once more
            raise

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
        began, patience_s = time.monotonic(), max(self._timeouts.values()) + SILENCE_S
        try:
            request = pipe.pack([episode, name, argument])
            reply = await host.ask(
                request, self._timeouts[name], patience_s=patience_s, in_turn=True
            )
        except (TypeError, OverflowError, pipe.MessageTooLarge) as error:
            raise EnvironmentFailed("not_sendable", str(error)) from error
        finally:
            self.seconds[name] += time.monotonic() - began
        if len(reply) != 2 or not isinstance(reply[0], str):
            raise EnvironmentFailed("crash", f"the environment child answered {reply!r:.80}")
        status, detail = reply
        if status != "ok":
            reason = "timeout" if status == pipe.STUCK else status
            raise EnvironmentFailed(
                reason if reason in self.REASONS else "crash", str(detail)[:1000]
            )
        return detail

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
                await host.end()


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
