"""Which errors of a remote call mean that a process is gone, and how a death is told.

Runs in: every process that calls another one. An actor that cannot be reached counts as dead, since
its call may have been made; where a call may be made twice it is repeated: those of the queue by
Ray (`_queue_process`), evaluations, and probes, groups and weights of an engine (`RemoteEngine`).

Invariant: what a living process raises is no death, though a `RayTaskError` has the class of its
cause as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray import exceptions

DEATHS = (
    exceptions.RayActorError,
    exceptions.OutOfMemoryError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.WorkerCrashedError,
    exceptions.ActorUnschedulableError,
)
_MEMORY = re.compile(r"IP: ([^,)]+).*? was ([^(\n]+?) \(")


CallFailed = exceptions.RayError
"""A call of another process failed: it raised, or it is gone."""


def cannot_be_reached(error: BaseException) -> bool:
    """Whether the process that was called may live, and the way to it is broken."""
    return isinstance(error, exceptions.ActorUnavailableError)


def is_death(error: BaseException | None) -> bool:
    """Whether the process that was called is gone, or cannot be reached."""
    return isinstance(error, DEATHS) and not isinstance(error, exceptions.RayTaskError)


def told(error: BaseException) -> str:
    """Say in a line what somebody died of; memory by name, where it was that."""
    said = str(error).partition("\nThe actor never ran")[0].strip()  # behind the cause
    line = said.splitlines()[-1] if said else type(error).__name__
    if isinstance(error, exceptions.OutOfMemoryError):
        seen = _MEMORY.search(str(error))
        line = "its machine was short of memory" + (f" ({seen[1]}: {seen[2]})" if seen else "")
        line += ", and Ray's memory monitor killed it; use fewer or smaller processes there"
    elif "OOM killer" in line:  # Ray's guesses, a paragraph of them
        line = line.partition(". Worker exit type")[0]
        line += ", killed from outside or by a crash; `dmesg` shows whether memory was short"
    return f"{type(error).__name__}: {line}"


@contextmanager
def death_as(meaning: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Raise meaning(error) where a call in the block fails because its process is gone."""
    try:
        yield
    except exceptions.RayError as error:
        if not is_death(error):
            raise
        raise meaning(error) from error
