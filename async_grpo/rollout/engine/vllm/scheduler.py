"""vLLM's scheduler, which tells the front end of several tokens of a response at a time.

Runs in: EngineCore's process. The front end decodes, files and counts every output, whether it
carries one token or sixteen; at one token each, that is what bounds the engine of a small model.
Hides what is held back:

    a step: one token of each response -> held; every sixteenth goes, with those before it
    a first token, a last one, and what carries more than tokens -> goes at once
    a response of at most sixteen tokens -> goes as a whole, at its end
    the most probable tokens in place of each one, if asked for -> goes as the set that it is from

Invariants: tokens and log-probs arrive in order, and all of one output have one label, since a
pause, between whose beginning and end labels change, lets go of everything that is held. What the
front end knows of a running response is less than `HELD` steps old. The first token after a pause
goes at once, too, unless the response is that short. Every step says how many tokens it has
sampled.
"""

from __future__ import annotations

import logging
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerIterationDetails
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from async_grpo.wire.groups import SHORT

if TYPE_CHECKING:
    from vllm.v1.request import Request

HELD = SHORT
"""Steps whose tokens go together."""
LOST = 1e-3
"""Probability that a set may lack: rounding, and what is as improbable as its last tokens."""
_JOINED = {"request_id", "new_token_ids", "new_logprobs", "num_nans_in_logits", "trace_headers"}
_BEGUN = ("events", "prefill_stats")
"""What a response's first output carries."""
_more = attrgetter(
    *(one for one in EngineCoreOutput.__struct_fields__ if one not in _JOINED | {*_BEGUN})
)
_begun = attrgetter(*_BEGUN)

# it warns of every scheduler that is not vLLM's own
logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)


class HeldOutputs(Scheduler):
    """The scheduler that vLLM would choose, but for the times at which outputs go."""

    def __new__(cls, vllm_config: Any, **_: Any) -> HeldOutputs:
        """Make one whose steps overlap, where vLLM has chosen that."""
        overlaps = vllm_config.scheduler_config.async_scheduling
        return object.__new__(_HeldAsyncOutputs if overlaps else cls)

    def __init__(self, vllm_config: Any, **given: Any) -> None:
        super().__init__(vllm_config=vllm_config, **given)
        # of responses whose first token, or first one since a pause, has gone, and of short ones
        self._held: dict[str, list[EngineCoreOutput]] = {}

    def update_from_output(self, *of_step: Any) -> dict[int, EngineCoreOutputs]:
        """Take the tokens of a step; return what goes."""
        told: dict[int, EngineCoreOutputs] = super().update_from_output(*of_step)
        step = told.setdefault(0, EngineCoreOutputs())  # for client 0: the one front end
        tokens = sum(len(one.new_token_ids) for one in step.outputs)
        step.outputs = [goes for one in step.outputs if (goes := self._pass(one)) is not None]
        if self.pause_state is PauseState.PAUSED_ALL:
            step.outputs += [_joined(held) for held in self._held.values() if held]
            self._held.clear()
        if step.scheduler_stats is not None:
            # of its fields, only this one is read
            step.scheduler_stats.iteration_details = SchedulerIterationDetails(
                0, 0, 0, 0, num_generation_tokens=tokens, elapsed_ms=0.0
            )
        return told

    def has_requests(self) -> bool:
        """Whether to make a step: when paused, also an empty one, with which goes what is held."""
        paused = self.pause_state is PauseState.PAUSED_ALL
        return (paused and any(self._held.values())) or super().has_requests()

    def finish_requests(self, *given: Any) -> list[Request]:
        """End requests that the front end has forgotten."""
        ended: list[Request] = super().finish_requests(*given)
        for request in ended:
            self._held.pop(request.request_id, None)
        return ended

    def _pass(self, new: EngineCoreOutput) -> EngineCoreOutput | None:
        """Hold an output back, or return it with those that were."""
        name, held = new.request_id, self._held.get(new.request_id)
        if held is None:
            held = []
            goes = new.finish_reason is not None or self.requests[name].max_tokens > SHORT
        else:
            goes = len(held) + 1 == HELD or _any(_begun(new))
        held.append(new)
        if not (goes or _any(_more(new))):
            self._held[name] = held
            return None
        if new.finish_reason is None:
            self._held[name] = []
        else:
            self._held.pop(name, None)
        return _joined(held)


class _HeldAsyncOutputs(HeldOutputs, AsyncScheduler):
    pass


def _any(values: tuple[Any, ...]) -> bool:
    return any(map(is_not, values, repeat(None)))


def _joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Make one output of those of a response, in order; all but the first and the last carry tokens
    only.
    """
    first, last = outputs[0], outputs[-1]
    if len(outputs) > 1:
        last.events = [*(first.events or ()), *(last.events or ())] or None
        last.prefill_stats = last.prefill_stats or first.prefill_stats
        last.new_token_ids = [token for one in outputs for token in one.new_token_ids]
    found = [one.new_logprobs[:3] for one in outputs if one.new_logprobs is not None]
    if found:
        width = min(ids.shape[1] for ids, _, _ in found)  # of what others asked for, there is more
        cut = [(ids[:, :width], values[:, :width], ranks) for ids, values, ranks in found]
        ids, values, ranks = map(np.concatenate, zip(*cut, strict=True))
        last.new_logprobs = LogprobsLists(ids[:, :1], values[:, :1], ranks)
        if width > 1:
            last.new_sampling_mask = _sampled_from(ids, values)
    return last


def _sampled_from(ids: np.ndarray, logprobs: np.ndarray) -> SamplingMaskLists:
    """Return the tokens that each token was sampled from: those with a probability, of itself and
    the most probable ones [tokens, 1 + k]. None of them where there are more, which have LOST
    together, or are the sampled one.
    """
    most, values = ids[:, 1:], logprobs[:, 1:]
    inside = np.isfinite(values)
    whole = np.abs(np.exp(values).sum(1, dtype=np.float64) - 1) <= LOST
    whole &= ((most == ids[:, :1]) & inside).any(1)
    inside &= whole[:, None]
    return SamplingMaskLists(most[inside], np.concatenate([[0], inside.sum(1).cumsum()]))
