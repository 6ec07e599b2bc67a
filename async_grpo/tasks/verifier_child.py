"""Scores responses for a verifier pool: `python -m async_grpo.tasks.verifier_child <parent pid>`.

Runs in: a verifier child, one fresh interpreter per child. Plain `score`: a message has several
responses, which are scored one after the other. A coroutine: one in a message, and many under way.
Invariants: it dies with its parent; its CPU time per response is bounded by the kernel; every
response is answered by itself, so a deadline counts per response; an exception of the task is an
answer, not a crash.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import sys
from typing import Any

from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.runtime.variables import hide
from async_grpo.tasks import pipe
from async_grpo.tasks.child import LONGEST_DETAIL, Parent, said
from async_grpo.tasks.coroutines import Stuck, TooLong, within

_SPARE_CPU_S = 2


def main() -> None:
    """Serve until the parent closes the pipe."""
    from async_grpo.tasks.base import scores_later

    die_with_parent(int(sys.argv[1]))  # end of file on the pipe ends it only when it is idle
    parent = Parent("verifier")
    task, told = parent.task(lambda task, told: task)
    scorer = _Scorer(task, told["settings"])
    if scores_later(task):
        asyncio.run(parent.serve(scorer.score_later))
        os.kill(os.getpid(), signal.SIGKILL)  # a thread may still be in a call
    while (batch := parent.receive()) is not None:
        for response, reference in batch:
            reply = scorer.score(response, reference)
            parent.send(reply)
            if reply[0] == "memory":
                return  # what is left of this process is not to be trusted


class _Scorer:
    """Asks the task, and answers ["ok", rewards, correct] or [reason, detail]."""

    def __init__(self, task: Any, settings: dict[str, Any]) -> None:
        from async_grpo.tasks.base import is_judged

        self._task, self._under_way = task, 0
        self._timeout_s = settings["verifier"]["timeout_s"]
        self._components = sorted(task.weights)
        weights = settings["rewards"] or task.weights
        judged = is_judged(settings["rewards"], settings["judges"])
        self._counted = None if judged else [one for one in self._components if weights.get(one)]

    def score(self, response: str, reference: Any) -> list[Any]:
        """Score one response."""
        _limit_cpu(self._timeout_s)
        try:
            raw = self._task.score(response, reference)
        except Exception as error:  # noqa: BLE001 - an exception of the task is an answer
            return self._failed(error)
        return self._checked(raw)

    async def score_later(self, response: str, reference: Any) -> list[Any]:
        """Score one response, as long as it may take."""
        self._under_way += 1
        _limit_cpu(self._timeout_s * self._under_way)
        try:
            raw = await within(self._timeout_s, self._task.score(response, reference))
        except TooLong as error:
            reason = pipe.STUCK if isinstance(error, Stuck) else "timeout"
            limit = f"{self._timeout_s:g} s (task.verifier.timeout_s)"
            return [reason, f"no answer within {limit}"]
        except Exception as error:  # noqa: BLE001 - an exception of the task is an answer
            return self._failed(error)
        finally:
            self._under_way -= 1
        return self._checked(raw)

    def _failed(self, error: Exception) -> list[Any]:
        if isinstance(error, MemoryError):
            return ["memory", "the verifier ran out of task.verifier.memory_mb"]
        return ["exception", said(error)]

    def _checked(self, raw: Any) -> list[Any]:
        from async_grpo.tasks.base import check_score

        try:
            score = check_score(raw, self._components, self._counted)
        except (TypeError, OverflowError) as error:
            return ["wrong_type", hide(str(error))[:LONGEST_DETAIL]]
        except ValueError as error:
            return ["non_finite", hide(str(error))[:LONGEST_DETAIL]]
        return ["ok", score.rewards, score.correct]


def _limit_cpu(timeout_s: float) -> None:
    """Let the kernel end this process should the parent not (or several threads burn more)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + _SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
