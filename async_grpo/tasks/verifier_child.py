"""Scores responses for a verifier pool: `python -m async_grpo.tasks.verifier_child <parent pid>`.

Runs in: a verifier child, one fresh interpreter per child, started by `VerifierPool`. Hides the far
end of the pipe. Invariants: it dies with its parent; its memory, and its CPU time per response, are
bounded by the kernel; whatever the task's code prints goes to stderr and never into the protocol;
an exception of the task is an answer, not a crash. This contains accidents; it is no sandbox
against hostile task code.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from typing import Any, BinaryIO

from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.tasks import pipe

_SPARE_CPU_S = 2


def main() -> None:
    """Serve until the parent closes the pipe."""
    die_with_parent(int(sys.argv[1]))  # end of file on the pipe ends it only when it is idle
    requests, replies = take_protocol()
    stacks.register_child("verifier")
    setup = receive(requests)
    if setup is None:
        return
    try:
        task = prepare(setup)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it with this text
        send(replies, ["failed", f"{type(error).__name__}: {error}"])
        return
    components = sorted(task.weights)
    weights = setup["settings"]["rewards"] or task.weights
    counted = [name for name in components if weights.get(name)]
    send(replies, ["ready", components])
    while (batch := receive(requests)) is not None:
        for response, reference in batch:
            _limit_cpu(setup["settings"]["verifier"]["timeout_s"])
            reply = _score(task, components, counted, response, reference)
            send(replies, reply)
            if reply[0] == "memory":
                return  # what is left of this process is not to be trusted


def take_protocol() -> tuple[BinaryIO, BinaryIO]:
    """Take private copies of stdin and stdout; task code reads nothing, and prints to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, replies


def prepare(setup: dict[str, Any]) -> Any:
    """Bound this process, and construct its task."""
    if setup["cpu"]:
        os.sched_setaffinity(0, setup["cpu"])
    _limit_memory(setup["memory_mb"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from async_grpo.config import schema
    from async_grpo.tasks.base import WarmsUp
    from async_grpo.tasks.registry import create_task

    task = create_task(schema.TaskConfig.model_validate(setup["settings"]), setup["seed"])
    if isinstance(task, WarmsUp):
        task.warm_up()
    return task


def _limit_memory(megabytes: int) -> None:
    """Bound what this process, and each one that it starts, may write to and shares with none.
    Addresses that are only reserved do not count: JavaScript, Go and Java reserve gigabytes.
    """
    limit = megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _limit_cpu(timeout_s: float) -> None:
    """Let the kernel end this process should the parent not (or several threads burn more)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + _SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _score(
    task: Any, components: list[str], counted: list[str], response: str, reference: Any
) -> list[Any]:
    """["ok", rewards, verdict], or [reason, detail]."""
    from async_grpo.tasks.base import check_score

    try:
        raw = task.score(response, reference)
    except MemoryError:
        return ["memory", "the verifier ran out of task.verifier.memory_mb"]
    except Exception as error:  # noqa: BLE001 - an exception of the task is an answer
        return ["exception", f"{type(error).__name__[:100]}: {str(error)[:500]}"]
    try:
        score = check_score(raw, components, counted)
    except (TypeError, OverflowError) as error:
        return ["wrong_type", str(error)[:500]]
    except ValueError as error:
        return ["non_finite", str(error)[:500]]
    return ["ok", score.rewards, score.verdict]


def receive(requests: BinaryIO) -> Any:
    """Return the next message; None when the parent has closed the pipe."""
    head = requests.read(pipe.LENGTH.size)
    if len(head) < pipe.LENGTH.size:
        return None
    length = pipe.checked_length(pipe.LENGTH.unpack(head)[0])
    body = requests.read(length)
    return pipe.unpack(body) if len(body) == length else None


def send(replies: BinaryIO, message: list[Any]) -> None:
    """Send a message to the parent."""
    replies.write(pipe.frame(pipe.pack(message)))


if __name__ == "__main__":
    main()
