"""Processes that write down, outside the queue, what it told them: puts acknowledged, and groups
trained. For tests that kill the queue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.cluster import learner_group, remote_engine
from async_grpo.config.schema import Config


def folder(config: Config) -> Path:
    """Where the side logs of a run are."""
    path = Path(config.run.dir + "-side")
    path.mkdir(exist_ok=True)
    return path


def read(path: Path, kind: str) -> list[list[int]]:
    """All lines that processes of one kind wrote, each a list of numbers."""
    return [
        json.loads(line)
        for file in sorted(path.glob(f"{kind}-*"))
        for line in file.read_text().splitlines()
    ]


class _Log:
    def __init__(self, config: Config, kind: str) -> None:
        self._file = open(folder(config) / f"{kind}-{os.getpid()}", "a", buffering=1)  # noqa: SIM115 - lives as long as the process

    def write(self, *numbers: int) -> None:
        self._file.write(json.dumps(numbers) + "\n")


class LoggedQueue:
    """The queue as a rollout actor sees it; every acknowledged group is written down."""

    def __init__(self, queue: Any, log: _Log) -> None:
        self._queue, self._log = queue, log

    async def put(self, actor_id: str, frames: list[Any]) -> list[Any]:
        verdicts = await self._queue.put(actor_id, frames)
        for verdict in verdicts:
            if verdict.status in (
                "accepted",
                "duplicate",
            ):  # a duplicate is an acknowledgement that was lost
                self._log.write(verdict.group_id, verdict.attempt)
        return verdicts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class LoggedRolloutProcess(remote_engine.RolloutProcess):
    """A rollout actor that keeps a side log."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._queue = LoggedQueue(self._queue, _Log(config, "put"))


class LoggedLearnerProcess(learner_group.LearnerProcess):
    """A learner rank that keeps a side log of the groups that it fetched and trained."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._log, self._fetched = _Log(config, "trained"), (0, [])

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = super().call(name, *args, **kwargs)
        if name == "train":
            step, group_ids = self._fetched
            for group_id in group_ids:
                self._log.write(step, group_id)
        return result

    def _fetch(self, step: int, group_ids: Sequence[int]) -> Any:
        self._fetched = (step, list(group_ids))
        return super()._fetch(step, group_ids)
