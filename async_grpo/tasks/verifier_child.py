"""Scores responses for a verifier pool: `python -m async_grpo.tasks.verifier_child <parent pid>`.

Runs in: a verifier child, one fresh interpreter per child. Invariants: it dies with its parent; its
CPU time per response is bounded by the kernel; every response is answered by itself, so a deadline
counts per response; an exception of the task is an answer, not a crash.
"""

from __future__ import annotations

import math
import resource
import sys
from typing import Any

from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.tasks.child import Parent

_SPARE_CPU_S = 2


def main() -> None:
    """Serve until the parent closes the pipe."""
    from async_grpo.tasks.base import is_judged

    die_with_parent(int(sys.argv[1]))  # end of file on the pipe ends it only when it is idle
    parent = Parent("verifier")
    task, told = parent.task(lambda task, told: task)
    settings, components = told["settings"], sorted(task.weights)
    weights = settings["rewards"] or task.weights
    judged = is_judged(settings["rewards"], settings["judges"])
    counted = None if judged else [one for one in components if weights.get(one)]
    while (batch := parent.receive()) is not None:
        for response, reference in batch:
            _limit_cpu(settings["verifier"]["timeout_s"])
            reply = _score(task, components, counted, response, reference)
            parent.send(reply)
            if reply[0] == "memory":
                return  # what is left of this process is not to be trusted


def _limit_cpu(timeout_s: float) -> None:
    """Let the kernel end this process should the parent not (or several threads burn more)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + _SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _score(
    task: Any, components: list[str], counted: list[str] | None, response: str, reference: Any
) -> list[Any]:
    """["ok", rewards, correct], or [reason, detail]."""
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
    return ["ok", score.rewards, score.correct]


if __name__ == "__main__":
    main()
