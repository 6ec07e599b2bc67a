"""Episodes as work for somebody else's service: leased, kept alive and answered over HTTP.

Runs in: rollout actors, on their event loop. Hides who plays an episode, and whether they live:

    POST /v1/work/lease      key of workers   {"wait_s"}  -> an episode: keys, address, problem
    POST /v1/work/heartbeat  key of the lease             -> 200, or 401 once it has ended
    POST /v1/work/result     key of the lease  rewards, correct, or {"failure": why}

An episode has two keys: the agent's, which opens the policy alone, and the lease's, which says what
it was worth, and which the agent need not know. The key of workers and the address stand in
RUN_DIR/workers/ACTOR.json, which only this user can read. Invariants: an episode is leased once;
while its worker says nothing for `lease_s` and has no request open, it fails; what it was worth is
said once, and checked before the worker hears "ok".
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.agents.endpoint.messages import RequestError
from async_grpo.agents.external import DIRECTORY, External
from async_grpo.agents.served import result_of, told
from async_grpo.config.environment import EnvironmentConfig
from async_grpo.environments.base import Observation, check_observation
from async_grpo.environments.pool import EnvironmentFailed

LONGEST_WAIT_S = 60.0
"""A request for work is answered after this, with or without some."""


@dataclass(eq=False)
class _Offer:
    """An episode: what a worker is told, how its result is read, and what is heard of it."""

    what: dict[str, Any]
    weights: dict[str, float]
    leased: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Future[Observation] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    heard: float = 0.0


class Work:
    """The episodes of an actor that are offered to workers, and those that they have."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._offers: deque[_Offer] = deque()
        self._offered = asyncio.Condition()
        self._open: dict[str, _Offer] = {}
        """By the agent's key."""
        self._leases: dict[str, _Offer] = {}
        """By the key of the lease."""

    @asynccontextmanager
    async def offered(
        self, key: str, what: dict[str, Any], weights: dict[str, float]
    ) -> AsyncIterator[_Offer]:
        """Offer an episode inside. key: its own. weights: of the rewards that it may name."""
        lease = secrets.token_urlsafe(24)
        self._open[key] = self._leases[lease] = offer = _Offer(what | {"work_key": lease}, weights)
        try:
            async with self._offered:
                self._offers.append(offer)
                self._offered.notify()
            yield offer
        finally:
            del self._open[key], self._leases[lease]
            if offer in self._offers:
                self._offers.remove(offer)

    async def lease(self, wait_s: float) -> dict[str, Any] | None:
        """Return the oldest episode that nobody plays, or None if there is none in time."""
        try:
            async with asyncio.timeout(min(wait_s, LONGEST_WAIT_S)), self._offered:
                await self._offered.wait_for(lambda: bool(self._offers))
                offer = self._offers.popleft()
        except TimeoutError:
            return None
        offer.heard = time.monotonic()
        offer.leased.set()
        return offer.what

    def heard(self, key: str) -> None:
        """Note a request of the agent with this key: its worker lives."""
        if key in self._open:
            self._open[key].heard = time.monotonic()

    def beat(self, key: str) -> _Offer:
        """Note that the worker with this lease lives. Raises RequestError."""
        offer = self._leases.get(key)
        if offer is None:
            raise RequestError(
                401, "this key belongs to no lease, or its episode has ended", code="key"
            )
        offer.heard = time.monotonic()
        return offer

    def finish(self, key: str, body: bytes) -> None:
        """Take what an episode was worth, or why it failed. Raises RequestError."""
        offer = self.beat(key)
        if offer.answer.done():
            raise RequestError(409, "this episode has its result already", code="result")
        try:
            found = json.loads(body)
            if isinstance(found, dict) and isinstance(found.get("failure"), str):
                error = EnvironmentFailed("exception", f"its worker says: {found['failure']}"[:500])
                offer.answer.set_exception(error)
                return
            said = body.decode(errors="replace")
            answer = check_observation(result_of(found, said), offer.weights)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(400, f"the result {error}", code="result") from error
        offer.answer.set_result(answer)


class WorkHost:
    """Has the episodes of one task played by workers."""

    def __init__(self, work: Work, task: External, settings: EnvironmentConfig) -> None:
        self._work, self._weights = work, task.weights
        self._options, self._timeout_s = task.options, settings.step_timeout_s
        self.open_episodes = 0

    async def run(
        self, reference: dict[str, Any], seed: int, *, url: str, key: str, busy: Callable[[], bool]
    ) -> Observation:
        """Have an episode played. busy: whether a request of it is open. Raises EnvironmentFailed:
        "no_worker", "lease", "timeout", or "exception" with what the worker says.
        """
        options = self._options
        what = {
            "base_url": url,
            "api_key": key,
            "lease_s": options.lease_s,
            "problem": told(reference, seed),
        }
        try:
            json.dumps(what)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed("not_sendable", f"the problem is no JSON: {error}") from error
        async with self._work.offered(key, what, self._weights) as offer:
            try:
                async with asyncio.timeout(options.wait_s):
                    await offer.leased.wait()
            except TimeoutError as error:
                raise EnvironmentFailed(
                    "no_worker",
                    f"no worker asked for work within task.options.wait_s = {options.wait_s:g}",
                ) from error
            self.open_episodes += 1
            try:
                return await self._answer(offer, busy)
            finally:
                self.open_episodes -= 1

    async def _answer(self, offer: _Offer, busy: Callable[[], bool]) -> Observation:
        """Wait for the result, as long as its worker lives."""
        begun, lease_s = time.monotonic(), self._options.lease_s
        while not offer.answer.done():
            now = time.monotonic()
            if busy():
                offer.heard = now
            if now >= begun + self._timeout_s:
                raise EnvironmentFailed(
                    "timeout", f"longer than environment.step_timeout_s = {self._timeout_s:g} s"
                )
            if now >= offer.heard + lease_s:
                raise EnvironmentFailed(
                    "lease", f"its worker said nothing for task.options.lease_s = {lease_s:g} s"
                )
            until = min(begun + self._timeout_s, offer.heard + lease_s)
            await asyncio.wait({offer.answer}, timeout=until - now)
        return offer.answer.result()


def announce(run_dir: Path, actor_id: str, *, url: str, key: str) -> Path:
    """Write where workers find an actor, for this user alone; the file."""
    directory = run_dir / DIRECTORY
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{actor_id}.json"
    slot, dot, _ = actor_id.rpartition(".")
    for dead in directory.glob(f"{slot}.*.json") if dot else ():  # what had the slot before
        dead.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"url": url, "key": key}, file)
    return path
