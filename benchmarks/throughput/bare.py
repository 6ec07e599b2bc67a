"""Bare vLLM on the requests that a run would make, with as many of them under way as a rollout
actor has.

Runs in: a process of its own, which `benchmarks.throughput` starts; vLLM's EngineCore is its child,
on the core that an engine has in a run. Counted is what is completed in a window in which there are
always more requests: the rate of an engine that never waits.
"""

from __future__ import annotations

import asyncio
import os
import time

from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import stop_tokens
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.rollout.host import hash63
from async_grpo.tasks.chat import prompt_ids
from async_grpo.tasks.registry import load_task, problem_index
from benchmarks.throughput.run import Row


async def bare_generation(config: Config, model: str, groups: int) -> Row:
    """Tokens and samples per second of an engine alone, over about so many groups."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rollout, everywhere = config.rollout, os.sched_getaffinity(0)
    tokenizer, task = AutoTokenizer.from_pretrained(model), load_task(config.task, config.seed)
    ends = stop_tokens(model, tokenizer.eos_token_id)
    os.sched_setaffinity(0, {min(everywhere)})
    engine = await VllmEngine.start(
        config,
        model_dir=model,
        device="cpu",
        backend="shared_memory",
        stop_token_ids=ends,
        label="v0.0",
        seed=1,
    )
    os.sched_setaffinity(0, everywhere)
    under_way = -(-engine.max_num_seqs // rollout.group_size) + 1
    done: list[tuple[float, int, list[list[int]]]] = []
    ids = iter(range(10**9))

    async def one() -> None:
        while True:
            group_id = next(ids)
            problem = task.train(problem_index(config.seed, task.fingerprint, group_id, len(task)))
            params = SamplingParams(
                n=rollout.group_size,
                max_tokens=rollout.response_length,
                temperature=rollout.temperature,
                seed=hash63(config.seed, group_id) if config.seeded else None,
                stop_token_ids=ends,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": prompt_ids(tokenizer, problem.prompt)}
            async for output in engine._llm.generate(prompt, params, f"b{group_id}"):
                lengths = [len(answer.token_ids) for answer in output.outputs]
                done.append((time.perf_counter(), sum(lengths), lengths))

    workers = [asyncio.create_task(one()) for _ in range(under_way)]
    try:
        while len(done) < under_way + groups:
            await asyncio.sleep(0.02)
            for worker in workers:
                if worker.done():
                    worker.result()  # raises why
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        engine.close()
    counted = done[under_way:]  # what comes first is shorter than the rest
    seconds, tokens = counted[-1][0] - done[under_way - 1][0], sum(count for _, count, _ in counted)
    lengths = [group for _, _, group in done]
    return {
        "seconds": seconds,
        "tokens": tokens,
        "samples": len(counted) * rollout.group_size,
        "under_way": under_way,
        "lengths": lengths,
        "response_length": tokens / len(counted) / rollout.group_size,
        "longest": max(map(max, lengths)),
    }
