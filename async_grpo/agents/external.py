"""Episodes that somebody else's service plays: it asks rollout actors for work over HTTP.

Runs in: the driver and rollout actors. Hides nothing; `rollout.endpoint.work` has the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from async_grpo.agents.served import ServedOptions, ServedTask
from async_grpo.config import schema
from async_grpo.environments.base import Observation
from async_grpo.errors import SetupError
from async_grpo.tasks.base import parse_options

DIRECTORY = "workers"
"""Where rollout actors say how they are reached, in the run's directory."""


class ExternalOptions(ServedOptions):
    """Options of the task `external`."""

    lease_s: Annotated[float, Field(gt=0)] = 60.0
    """An episode fails, and its group is issued again, when its worker has said nothing for this
    many seconds: no heartbeat, and no request.
    """
    wait_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest that an episode waits for a worker; then its group fails. Less than
    `rollout.group_timeout_s`, which ends the group in any case.
    """


class External(ServedTask):
    """Problems of another task, for workers elsewhere; see `Task`."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        self.options = parse_options(ExternalOptions, settings)
        super().__init__(settings, self.options, seed)

    def notes(self, config: schema.Config) -> Iterator[str]:
        """Say where workers find the run. Raises SetupError."""
        wait_s, longest_s = self.options.wait_s, config.rollout.longest_group_s
        if wait_s >= longest_s:
            raise SetupError(
                f"task.options.wait_s is {wait_s:g} s, and a group ends after "
                f"rollout.group_timeout_s = {longest_s:g} s: raise that one, or wait less"
            )
        yield (
            "episodes are played by workers; rollout actors say where they are in "
            f"{Path(config.run.dir) / DIRECTORY} (docs/how-to/external-agents.md)"
        )

    def environment(self) -> Elsewhere:
        """Return what stands for a worker where environments are described."""
        return Elsewhere()


class Elsewhere:
    """An environment that is not here."""

    def reset(self, *_: object) -> Observation:
        """Raise RuntimeError."""
        raise RuntimeError("episodes of task `external` are played by workers")

    step = reset

    def close(self) -> None:
        """Do nothing."""
