"""Which errors of a remote call mean that a process is gone, and how a death is told.

Runs in: every process that calls another one. The one home of this rule. Ray says by the class of
the error what a process died of: of itself or of its node (`ActorDiedError`, `NodeDiedError`,
`WorkerCrashedError`, `LocalRayletDiedError`, `ActorUnschedulableError`: its node went before it
began), or of the memory monitor (`OutOfMemoryError`, no `RayActorError`). An actor that cannot be
reached (`ActorUnavailableError`) counts as dead too, since its call may have been made or not.
Where a call may be made twice it is repeated instead: calls of the queue by Ray (`_queue_process`),
those of an evaluation by the evaluation.

Invariant: what a living process raises is no death, whatever the error carries: a `RayTaskError`
has the class of its cause as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray import exceptions

from async_grpo.runtime.text import last_line

DEATHS = (
    exceptions.RayActorError,
    exceptions.OutOfMemoryError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.WorkerCrashedError,
    exceptions.ActorUnschedulableError,
)
_MEMORY = re.compile(r"IP: ([^,)]+).*? was ([^(\n]+?) \(")


def is_death(error: BaseException | None) -> bool:
    """Whether the process that was called is gone, or cannot be reached."""
    return isinstance(error, DEATHS) and not isinstance(error, exceptions.RayTaskError)


def told(error: BaseException) -> str:
    """Say in a line what somebody died of; memory by name, where it was that."""
    line = last_line(error)
    if isinstance(error, exceptions.OutOfMemoryError):
        seen = _MEMORY.search(str(error))
        where = f" ({seen[1]}: {seen[2]})" if seen else ""
        line = (
            f"its machine was short of memory{where}, and Ray's memory monitor killed it; fewer or "
            "smaller processes there would fit (docs/failures.md)"
        )
    elif "OOM killer" in line:  # Ray's guesses, a paragraph of them
        line = (
            line.partition(". Worker exit type")[0]
            + ", killed from outside or by a crash; `dmesg` tells whether it was for want of memory"
        )
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
