"""What limits a run, in closed form: the most groups per second that each part would let through.

Runs in: the driver, and the planner's command. With R groups per step of T_s seconds and p seconds
that the learner waits for each publication (every `s` steps), N engines with S places and C(n)
tokens per second while n responses run, v verifiers per engine, G responses of a group with m
tokens in all, K = max_staleness, and T_M the seconds of the longest response of a batch:

    learner     R / (T_s + p / s)
    engines     N C(S) / m, less what they stand still for publications
    verifiers   N v / (G x seconds of a response)
    tail        (K + 1) R / (T_M + T_s): a group that takes T_M is waited for, and K + 1 batches
                share that wait. Not with `mask` and `expire`, which wait for nothing
    slots       L / (T_M' + T_s), L groups that may be outstanding, T_M' the seconds of the longest
                response of a group on average   (Little)

The slowest of them bounds a run from above; how far the others get into its way is what `rehearsal`
follows. At K = 0 nothing overlaps, and the learner waits for T_g / (T_g + T_s) of the time.

Sources: Little, "A proof for the queuing formula L = lambda W" (1961); the tail by the recurrence
end(s) = max(end(s - 1), end(s - 1 - K) + T_M) + T_s.
"""

from __future__ import annotations

import math

from async_grpo.tools.predict.workload import Workload, mean


def limits(work: Workload) -> dict[str, float]:
    """Compute the most groups per second by what limits them; infinite where something does not."""
    step_s = work.learner_s * (work.crowd * work.contention if work.max_staleness else 1.0)
    step_s += work.exposed_s / work.every_steps
    running = min(work.places, work.capacity * work.responses / work.actors)
    paused = min(work.pause_s / (work.every_steps * step_s), 0.9)
    crowd = work.slow(work.actors, learning=work.max_staleness > 0)
    engines = work.actors * work.speed.total(running) * (1 - paused) / work.group_tokens / crowd
    verifying = work.responses * work.verify_s
    each = work.speed.each(running) / crowd
    longest_s, group_s = (mean(found) / each for found in (_longest(work), map(max, work.lengths)))
    outstanding = min(work.outstanding or work.capacity, work.capacity)
    return {
        "learner": work.batch / step_s,
        "engines": engines,
        "verifiers": work.actors * work.verifiers / verifying if verifying else math.inf,
        "tail": (work.max_staleness + 1) * work.batch / (longest_s + step_s)
        if work.on_stale == "wait"
        else math.inf,
        "slots": outstanding / (group_s + step_s),
    }


def _longest(work: Workload) -> list[int]:
    """Longest responses of batches made of the measured groups, one after the other."""
    longest = list(map(max, work.lengths))
    starts = range(0, len(longest), max(work.batch, 1))
    return [max(longest[start : start + work.batch]) for start in starts]
