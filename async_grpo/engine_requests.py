"""Requests to vLLM whose tokens are counted, twice: as vLLM sees them arrive, and request by request.

Runs in: rollout actors. Hides where vLLM keeps what there is of a request: it forgets it in the moment in which the request is aborted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats

Purpose = Literal["rollouts", "probes", "evaluated"]


class CountedRequests:
    """`sampled`: tokens so far: `total` by vLLM's own count, running requests included; and by purpose, of requests that ended.

    `cut_off`: tokens of aborted requests for rollouts, by name, for those who ask.
    """

    def __init__(self) -> None:
        self.sampled: Counter[str] = Counter()
        self.cut_off: dict[str, int] = {}

    def logger(self) -> type:
        """A logger for vLLM that only adds up tokens. With one of our own, vLLM notes the times of requests without its default loggers.

        It takes the place of the one for Prometheus, which would cost a twentieth of this process's time, and whose endpoint nobody serves.
        """
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        sampled = self.sampled

        class Total(PrometheusStatLogger):
            def __init__(self, vllm_config: object, engine_indexes: object = None) -> None: ...
            def log_engine_initialized(self) -> None: ...

            def record(self, scheduler_stats: object, iteration_stats: IterationStats | None, *args: object, **kwargs: object) -> None:
                if iteration_stats is not None:
                    sampled["total"] += iteration_stats.num_generation_tokens

        return Total

    async def final(self, llm: AsyncLLM, prompt: dict[str, Any], params: Any, name: str, purpose: Purpose) -> RequestOutput | None:
        """What a request came to; its tokens are counted, also when the call is cancelled, which aborts it."""

        async def last() -> RequestOutput | None:
            final = None
            async for output in llm.generate(prompt, params, name):
                final = output
            return final

        work = asyncio.ensure_future(last())  # a task of its own, so that there is something to look at before it is cancelled
        try:
            await asyncio.wait({work})
            final = work.result()
        except BaseException:
            processor = llm.output_processor
            states = [processor.request_states[request_id] for request_id in processor.external_req_ids.get(name, ())]
            parents = {id(state.parent_req): state.parent_req for state in states if state.parent_req is not None}
            ended = sum(len(one.token_ids) for parent in parents.values() for one in parent.output_aggregator if one is not None)
            work.cancel()
            await asyncio.wait({work})
            tokens = ended + sum(len(state.detokenizer.output_token_ids) for state in states)
            self.sampled[purpose] += tokens
            if purpose == "rollouts":
                self.cut_off[name] = tokens
            raise
        self.sampled[purpose] += sum(len(output.token_ids) for output in final.outputs) if final is not None else 0
        return final
