"""Nodes with relays and without Ray: a learner's segments on one, and real `RelayProcess` objects
behind handles that answer, fail, hang, and are killed and started again as Ray's are.

Every relay has a directory of its own for segments, as every node has a /dev/shm of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from async_grpo.cluster import relays
from async_grpo.cluster.relays import RelayProcess, Relays
from async_grpo.config.schema import Config
from async_grpo.weights import files, shared_memory
from async_grpo.weights.fan_out import consume_exception
from async_grpo.weights.shared_memory import Segments, written
from async_grpo.weights.transport import SELF_CHECK, Announcement, TornTransfer
from tests.support.listener import RecordingListener

HOME = "home"
Claim = tuple[str, int, bytes]
"""Path and number of a segment's write, and the bytes of the version that it is said to have."""


class RelayDied(Exception):
    """Stands for Ray's error of a process that is gone."""


class RelayHandle:
    """A Ray handle of a relay. hangs: it answers nothing. before(method, arguments): called with
    what it is asked, which it may change.
    """

    def __init__(
        self, make: Callable[[], RelayProcess], before: Callable[[str, list[Any]], None]
    ) -> None:
        self._make, self._before = make, before
        self.process = make()
        self.hangs = False
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, method: str) -> Any:
        def remote(*given: Any) -> Any:
            answer = asyncio.ensure_future(self._answer(method, list(given)))
            answer.add_done_callback(consume_exception)
            count = getattr(getattr(RelayProcess, method), "__ray_num_returns__", 1)
            if count == 1:
                return answer
            items = [asyncio.ensure_future(_item(answer, index)) for index in range(count)]
            for item in items:
                item.add_done_callback(consume_exception)
            return items

        return SimpleNamespace(remote=remote)

    def start_again(self) -> None:
        """Lose what the process knows; its segments go as those of dead owners do."""
        self.process._copy.close()
        self.process = self._make()

    def kill(self) -> None:
        if not self._dead.done():
            self._dead.set_exception(RelayDied("killed"))
            self._dead.exception()

    async def _answer(self, method: str, given: list[Any]) -> Any:
        await asyncio.sleep(0)
        if self.hangs or self._dead.done():
            return await asyncio.shield(self._dead)
        given = [await one if isinstance(one, asyncio.Future) else one for one in given]
        self._before(method, given)
        return getattr(self.process, method)(*given)


async def _item(answer: asyncio.Future[Any], index: int) -> Any:
    return (await asyncio.shield(answer))[index]


@cache
def configured(run_dir: Path, **sync: Any) -> Config:
    """Settings with these of `weight_sync`."""
    return Config.model_validate(
        {
            "run": {"total_steps": 1, "dir": str(run_dir)},
            "model": {"path": "some/model"},
            "weight_sync": sync,
        }
    )


class RelayNodes:
    """A learner that publishes versions, and `relays` that bring them to nodes. before(node,
    method, arguments): called with what a relay is asked. calls: what they were asked.
    """

    def __init__(
        self,
        place: Path,
        *,
        nbytes: int,
        key: str = "start1",
        config: Config | None = None,
        **sync: Any,
    ) -> None:
        """place: of the run's directory and of segments. sync: `weight_sync`."""
        self._place, self.nbytes, self.key = place, nbytes, key
        self.config = config or configured(place / "run", **sync)
        self.listener = RecordingListener()
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str, list[Any]], None] = lambda node, method, given: None
        self.handles: dict[str, RelayHandle] = {}
        self._made = self._number = self._step = 0
        self.bytes: dict[tuple[str, int], bytes] = {}
        """Of every write of the learner's."""
        self.segments = self._new_segments()
        self.relays = self.new_relays()

    def new_relays(self) -> Relays:
        """Those of a driver that was just started."""
        return Relays(
            self.config,
            home=HOME,
            key=self.key,
            where=lambda node_id: {"node": node_id},
            listener=self.listener,
        )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let relays be started here instead of by Ray."""
        with (
            mock.patch.object(relays.ray, "remote", self._remote),
            mock.patch.object(relays.ray, "kill", lambda handle: handle.kill()),
            mock.patch.object(relays, "die_with_parent", lambda: None),
            mock.patch.object(relays.stacks, "register", lambda *_: None),
            mock.patch.object(shared_memory, "choose_directory", lambda *_: (self._folder(), "")),
            mock.patch.object(files, "_POLL_S", 0.001),
        ):
            yield

    # ---- the learner ----

    def restart_learner(self) -> None:
        """Other segment files, and numbers from the beginning."""
        self.segments.close()
        self.segments = self._new_segments()
        self._number = 0

    def stage(self, data: np.ndarray, *, apart: bool = False) -> Announcement:
        """Write what the weights are now, [nbytes] uint8."""
        self._number += 2
        self._step += not apart
        self.segments.begin(self._number, apart=apart).numpy()[:] = data
        path = str(self.segments.commit())
        self.bytes[path, self._number] = data.tobytes()
        payload = {"path": path, "sequence": self._number, "checksums": []}
        label = SELF_CHECK if apart else f"v0.{self._step}"
        return Announcement(label, "shared_memory", payload, "", self.nbytes)

    # ---- the nodes ----

    async def fetch(self, announcement: Announcement, node_id: str) -> Claim:
        """Where the engines of a node are told that the weights are."""
        local = await self.relays.local(announcement, node_id)
        source = announcement.payload["path"], announcement.payload["sequence"]
        return local.payload["path"], local.payload["sequence"], self.bytes[source]

    def holds(self, claim: Claim) -> bool:
        """Whether a segment still has what it was said to have; if so, it has to be that."""
        path, number, data = claim
        try:
            with written((path, number), self.nbytes) as found:
                assert found.tobytes() == data, f"{path} has other bytes as write {number}"
        except (TornTransfer, FileNotFoundError):
            return False
        return True

    def _new_segments(self) -> Segments:
        return Segments(self._folder(), self.key, self.nbytes)

    def _folder(self) -> Path:
        self._made += 1
        folder = self._place / f"memory-{self.key}-{self._made}"
        folder.mkdir()
        return folder

    def _remote(self, kind: type[RelayProcess]) -> Any:
        def options(*, node: str, **_: Any) -> Any:
            def before(method: str, given: list[Any]) -> None:
                self.calls.append((node, method))
                self.before(node, method, given)

            def remote(**given: Any) -> RelayHandle:
                self.handles[node] = RelayHandle(lambda: kind(**given), before)
                return self.handles[node]

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)
