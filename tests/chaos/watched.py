"""The processes of a run, as the product has them, that also write down what they do: a record
outside the queue, for what kills them.

Runs in: rollout actors, learner ranks and the driver of a run that `tests.chaos.entry` started.
Every process has a file of its own in `<run.dir>-side`; a line is [seconds on the machine's
monotonic clock, what, values...] and is written before the call returns.

    actor, id        a rollout actor begins                    offer / ack, group, attempt   a put
        before and after its acknowledgement
    begin / end      one group is being generated              rank, number, key             a
        learner rank begins, in the start with this key
    fetch, step, ids a rank takes its groups into training     trained, step, ids            ... and
        has trained them
    gate / open      a rank waits before it trains, and goes on   state, what, step, digest,
        random   what a checkpoint must hold, bit for bit
    staged, label, digest, bits                                weights that are published, or come
        out of a step that is repeated
    received, label, bits, host                                an engine serves them; bits: of the
        segment that it has read on its host
    access, step, event, path                                  a file of the checkpoint of this step
        is touched (where CHAOS_ACCESS is set)
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.cluster import learner_group, remote_engine
from async_grpo.config.schema import Config
from async_grpo.runtime import storage
from async_grpo.weights.shared_memory import written
from async_grpo.weights.transport import Announcement, Receipt, TornTransfer
from async_grpo.wire.codec import Buffer, peek_ticket

DRIVER, ACCESS = "CHAOS_DRIVER", "CHAOS_ACCESS"
GATE_S = 40.0
"""A gate that nobody opens lets the learner go on after this."""


def side_folder(run_dir: str | Path) -> Path:
    """Where the record of a run is, and the files with which a test asks for something: `gate`,
    `hang`, `full`.
    """
    return Path(f"{run_dir}-side")


class Record:
    """This process's file."""

    def __init__(self, run_dir: str, role: str) -> None:
        folder = side_folder(run_dir)
        folder.mkdir(exist_ok=True)
        self._file = open(folder / f"{role}-{os.getpid()}.log", "a", buffering=1)  # noqa: SIM115 - lives as long as the process

    def write(self, what: str, *values: Any) -> None:
        self._file.write(json.dumps([time.monotonic(), what, *values]) + "\n")


class WatchedQueue:
    """The queue as a rollout actor sees it."""

    def __init__(self, queue: Any, record: Record) -> None:
        self._queue, self._record = queue, record

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Any]:
        for frame in frames:
            self._record.write("offer", *peek_ticket(frame))
        verdicts = await self._queue.put(actor_id, frames)
        for verdict in verdicts:
            if verdict.status in (
                "accepted",
                "duplicate",
            ):  # a duplicate is an acknowledgement that was lost
                self._record.write("ack", verdict.group_id, verdict.attempt)
        return verdicts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class WatchedRollout(remote_engine.RolloutProcess):
    """A rollout actor."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._record = Record(config.run.dir, "actor")
        self._record.write("actor", self.actor_id)
        self._queue = WatchedQueue(self._queue, self._record)

    async def receive(self, announcement: Announcement) -> Receipt:
        receipt = await super().receive(announcement)
        if not receipt.failure:
            found = announcement.label, bits_of(announcement), socket.gethostname()
            self._record.write("received", *found)
        return receipt

    async def _generate(self, *arguments: Any, **named: Any) -> Any:
        self._record.write("begin")
        try:
            return await super()._generate(*arguments, **named)
        finally:
            self._record.write("end")

    async def _play(self, *arguments: Any, **named: Any) -> Any:
        self._record.write("begin")
        try:
            return await super()._play(*arguments, **named)
        finally:
            self._record.write("end")


class WatchedLearner(learner_group.LearnerProcess):
    """A learner rank."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._record, self._folder = Record(config.run.dir, "rank"), side_folder(config.run.dir)
        self._step, self._ids = 0, []
        self._accesses = Accesses(config.run.dir, "rank", self._record)
        if (self._folder / "pretend").exists():
            pretend_full(self._folder / "full")

    def setup(self, *, key: str, checkpoint: str | None, **arguments: Any) -> Any:
        self._record.write("rank", self._rank, key)
        state = super().setup(key=key, checkpoint=checkpoint, **arguments)
        if state is not None:
            self._record.write(
                "state", "loaded", state["step"], *state_digests(self._parts.learner)
            )
        return state

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "train":
            self._wait_at_gate()
        result = super().call(name, *args, **kwargs)
        if name == "train":
            self._record.write("trained", self._step, self._ids)
        return result

    def stage(self, label: str, **arguments: Any) -> Any:
        staged = super().stage(label, **arguments)
        news = staged.announcement
        self._record.write("staged", label, news.digest, bits_of(news))
        return staged

    def write_checkpoint(self, directory: str, state: dict[str, Any]) -> Any:
        self._accesses.step = state["step"]
        self._record.write("state", "saved", state["step"], *state_digests(self._parts.learner))
        return super().write_checkpoint(directory, state)

    def _fetch(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        self._step, self._ids = step, list(group_ids)
        self._record.write("fetch", step, self._ids)
        return super()._fetch(step, group_ids)

    def _wait_at_gate(self) -> None:
        gate, deadline = self._folder / "gate", time.monotonic() + GATE_S
        if gate.exists():
            self._record.write("gate", self._step)
            while gate.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            self._record.write("open", self._step)


class Accesses:
    """Accesses to the files of one checkpoint, in this process: written down, or the one at which
    the driver is killed.

    CHAOS_ACCESS is `note`, or `<role> <step> <number>`: the driver dies at access <number>, from 0,
    to the checkpoint of that step in that role.
    """

    _WATCHED = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"})

    def __init__(self, run_dir: str, role: str, record: Record) -> None:
        self._root, self._role, self._record = str(Path(run_dir) / "checkpoints"), role, record
        self.step: int | None = None
        self._counted: dict[int, int] = {}
        self._inside = False
        wanted = os.environ.get(ACCESS)
        if wanted is not None:
            self._deadly = tuple(wanted.split()) if wanted != "note" else None
            sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple) -> None:
        if (
            event not in self._WATCHED
            or self._inside
            or not arguments
            or not isinstance(arguments[0], str | os.PathLike)
        ):
            return
        path = os.fspath(arguments[0])
        if not isinstance(path, str) or not (
            path.startswith(self._root) or path.endswith("-checkpoint") or "-checkpoint/" in path
        ):
            return
        if self._role == "driver" and event == "os.mkdir" and ".tmp" in path:
            self.step = int(path.partition("step_")[2].partition(".")[0])
        if self.step is None:
            return
        number = self._counted[self.step] = self._counted.get(self.step, -1) + 1
        if self._deadly is None:
            self._inside = True
            self._record.write("access", self.step, event, path)
            self._inside = False
        elif self._deadly == (self._role, str(self.step), str(number)):
            os.kill(int(os.environ[DRIVER]), signal.SIGKILL)


def pretend_full(sign: Path) -> None:
    """Let the disk be full for checkpoints while this file is there, on machines that cannot mount
    a small one.
    """
    move = storage.move

    def full(source: Path, target: Path) -> storage.FileSum:
        if sign.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return move(source, target)

    storage.move = full


def bits_of(announcement: Announcement) -> str:
    """A digest of the segment on this host that an announcement names; "" where it names none, or
    one that is another's by now.
    """
    payload = announcement.payload
    if "path" not in payload:
        return ""
    try:
        with written((payload["path"], payload["sequence"]), announcement.nbytes) as data:
            return hashlib.sha256(data).hexdigest()[:16]
    except (TornTransfer, FileNotFoundError):
        return ""


def state_digests(learner: Any) -> tuple[str, str]:
    """Of all that decides how a learner goes on: of weights, optimizer and position in the
    schedule; and of the random state.
    """
    import torch

    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(
                f"{value.dtype}{tuple(value.shape)}".encode()
                + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])

    optimizer = learner.policy.engine.optimizer
    add(dict(learner.policy.module.state_dict()))
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    assert states, "the optimizer's averages are not where this looks"
    add({index: state for index, state in enumerate(states)})
    digest.update(str(learner.updates).encode())
    return digest.hexdigest(), hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
