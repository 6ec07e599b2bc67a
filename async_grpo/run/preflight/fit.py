"""What fits the memory there is: the micro-batches of a learner and the KV cache beside it, chosen
where they are `auto`, and what would help a run that cannot fit.

Runs in: the driver, before the processes of a run start. Invariant: the same settings on the same
machines give the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from async_grpo.cluster.placement import Placement
from async_grpo.config.schema import MICRO_BATCH_TOKENS, Config, Lora
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.run.preflight.memory import (
    ENGINE_CODE,
    LEARNER_CODE,
    OTHER_CODE,
    STAGED,
    EngineMemory,
    Shape,
    engine_memory,
    frozen_memory,
    learner_memory,
    size_text,
)

FULL_TOKENS = 4096
"""Tokens of a forward pass from which on a GPU gets no faster with more."""
SHARES_CORES = 30_000_000
"""Parameters of a model from which on shared cores gain: two models were measured, 14 million (0.91
times the speed) and 135 million (1.16).
"""
_ADAPTERS = 100
"""Adapters have about this fraction of a model's parameters."""
_TAKEN = 0.95
"""Share of the memory that a choice takes at most: the estimate is none of every allocation."""


def fitted(
    config: Config,
    shape: Shape,
    placement: Placement,
    *,
    backend: str,
    gpu_bytes: Mapping[str, int | None],
    host_bytes: int | None,
) -> tuple[Config, str]:
    """Give what is `auto` values that fit. Return the settings, and one line that says what was
    chosen and why; "" where nothing was. host_bytes: of the learner's machine, for CPU.
    """
    there = host_bytes if placement.device == "cpu" else _smallest(placement, gpu_bytes)
    given, turns = config.cluster.engine.sleep, ""
    if given is True and not placement.colocated:
        config = _engine_with(config, sleep=False)
    found, learner = _micro_batches(config, shape, placement, backend=backend, there=there)
    may = placement.colocated and given == "auto" and config.replay.max_staleness <= 1
    apart = needed_bytes(found, shape, placement, backend)
    if may and there is not None and apart > _TAKEN * there:
        config, turns = _engine_with(config, sleep=True), "learner and engine take turns on the GPU"
        found, learner = _micro_batches(config, shape, placement, backend=backend, there=there)
    found, engine = _cache(found, shape, placement, backend=backend, there=there)
    found = _cores(found, shape, placement)
    if found.cluster.engine.sleep is True:  # groups wait while the learner computes
        longest = found.rollout.longest_group_s + found.watchdog.step_timeout_s
        found = _changed(found, "rollout", group_timeout_s=longest)
    return found, "; ".join(filter(None, [learner, engine, turns]))


def _cores(config: Config, shape: Shape, placement: Placement) -> Config:
    """Choose whether learner and engines lend each other cores, on CPU."""
    if config.cluster.cores != "auto" or placement.device != "cpu":
        return config
    cores = "shared" if shape.parameters >= SHARES_CORES else "apart"
    return _changed(config, "cluster", cores=cores)


def _micro_batches(
    config: Config, shape: Shape, placement: Placement, *, backend: str, there: int | None
) -> tuple[Config, str]:
    """Choose the first micro-batches and checkpointing that fit, of:

        16,384 tokens, 8,192, 4,096     without checkpointing
        16,384 tokens, 8,192, ...       with it, down to one sequence of full length

    A GPU is as fast with 4,096 tokens at a time as with more, so those cost nothing. Checkpointing
    costs a third more compute, which is less than smaller micro-batches do: their kernels do not
    fill a GPU, and ZeRO-3 gathers all weights for each. A CPU is as fast with one sequence at a
    time, so checkpointing comes last there.
    """
    learner, longest = config.learner, config.longest_share
    if "auto" not in (learner.tokens_per_micro_batch, learner.gradient_checkpointing):
        return config, ""
    sizes = [config.rank_tokens]
    if learner.tokens_per_micro_batch == "auto":
        halves = [MICRO_BATCH_TOKENS >> times for times in range(MICRO_BATCH_TOKENS.bit_length())]
        sizes = list(dict.fromkeys([*sizes, *(size for size in halves if size > longest), longest]))
    least = 0 if placement.device == "cpu" else FULL_TOKENS
    ways = [(size, False) for size in sizes if size >= least] or [(sizes[0], False)]
    ways += [(size, again) for again in (True, False) for size in sizes]
    if learner.gradient_checkpointing != "auto" or learner.activation_offload:
        ways = [way for way in ways if way[1] == learner.recomputes]
    elif not shape.can_recompute:
        ways = [way for way in ways if not way[1]]
    needs = {way: needed_bytes(_with(config, *way), shape, placement, backend) for way in ways}
    fits = [way for way in ways if there is None or needs[way] <= _TAKEN * there]
    tokens, again = way = fits[0] if fits else min(needs, key=needs.__getitem__)
    what = f"{tokens:,} tokens per micro-batch {'with' if again else 'without'} gradient "
    what += "checkpointing, "
    need = f"about {size_text(needs[way])} needed"
    if there is None:
        of = "machine" if placement.device == "cpu" else "GPUs"
        what += f"since the memory of the {of} is not known"
    elif fits:
        what += f"chosen to fit {there / 2**30:.3g} GiB ({need})"
    else:
        what += f"the least there is ({need}, {there / 2**30:.3g} GiB available)"
    return _with(config, tokens, again), f"learner: {what}"


def _cache(
    config: Config, shape: Shape, placement: Placement, *, backend: str, there: int | None
) -> tuple[Config, str]:
    """Give an engine that shares its GPU the KV cache that the learner leaves, up to what all
    responses under way can fill at full length.
    """
    settings = config.cluster.engine
    if not placement.colocated or settings.kv_cache_gb != "auto" or there is None:
        return config, ""
    engine, one = _engine(config, shape, backend)
    least, rows = engine.kv_cache or 0, config.max_outstanding * config.rollout.group_size
    rows = min(rows, ENGINE.max_num_seqs(config, device="cuda") or rows)
    most = settings.gpu_memory_utilization * there - one
    spare = min(_TAKEN * there - _turns(config, shape, backend)[1], most)
    useful = math.ceil(10 * rows * engine.kv_token * engine.longest / 2**30)
    gib = min(math.floor(10 * (least + spare) / 2**30), useful) / 10
    if gib * 2**30 <= least:
        return config, ""
    return _engine_with(config, kv_cache_gb=gib), f"engine: KV cache of {gib:g} GiB"


def needed_bytes(config: Config, shape: Shape, placement: Placement, backend: str) -> int:
    """Of the GPU of a learner rank, with the engine that shares it: what the larger of their turns
    needs; without GPUs, of the learner's machine.
    """
    stage, device = config.learner.zero_stage, placement.device
    if device == "cuda" and placement.colocated:
        return max(_turns(config, shape, backend))
    rank = learner_memory(config, shape, device=device, stage=stage, backend=backend).total
    if device == "cuda":
        return rank
    cache = ENGINE.kv_cache_gb(config, device=device, backend=backend)
    engine = engine_memory(config, shape, device=device, kv_cache_gb=cache)
    home = placement.learners[0].node_id
    engines = sum(slot.node_id == home for slot in placement.engines)
    one = engine.weights + (engine.kv_cache or 0) + ENGINE_CODE
    frozen = frozen_memory(config, device=device, backend=backend).values()
    beside = sum(each.weights + (each.kv_cache or 0) + ENGINE_CODE for each in frozen)
    ranks = len(placement.learners) * (rank + LEARNER_CODE)
    staged = STAGED * engine.weights
    return int(ranks + staged + engines * one + beside + OTHER_CODE)


def _turns(config: Config, shape: Shape, backend: str) -> tuple[int, int]:
    """Bytes of a shared GPU while the learner computes, and while the engine does, at the start
    beside the self-check's copy of the weights.
    """
    stage, settings = config.learner.zero_stage, config.weight_sync
    learner = learner_memory(config, shape, device="cuda", stage=stage, backend=backend)
    engine, most = _engine(config, shape, backend)
    copy = learner.publication if settings.self_check else 0
    if config.cluster.engine.sleep is True:  # what its process takes stays
        return learner.total + engine.rest, learner.lent + copy + most
    both = learner.total + most
    return both, both + max(0, copy - learner.activations)  # nothing is trained then


def too_large(
    config: Config,
    shape: Shape,
    placement: Placement,
    *,
    backend: str,
    gpu_bytes: Mapping[str, int | None],
) -> Iterator[str]:
    """Compare the estimates with the memory of the GPUs, by node, where it is known: sentences with
    the arithmetic for what cannot fit.
    """
    learner, engines = _smallest(placement, gpu_bytes), _smallest(placement, gpu_bytes, engine=True)
    if placement.device != "cuda" or learner is None or engines is None:
        return
    need = needed_bytes(config, shape, placement, backend)
    if need > learner:
        both = "and an engine that share a GPU need" if placement.colocated else "needs"
        yield (
            f"a learner rank {both} about {size_text(need)} and a GPU has {size_text(learner)}: "
            f"{what_helps(config, shape, placement, backend, most=learner)}"
        )
    engine, needs = _engine(config, shape, backend)
    share = config.cluster.engine.gpu_memory_utilization
    if not placement.colocated and needs > share * engines:
        yield (
            f"an engine needs at least {size_text(needs)} a GPU (weights "
            f"{size_text(engine.weights)}, CUDA {size_text(engine.rest)}, the cache of one "
            f"response {size_text(engine.kv_token * engine.longest)}) and has "
            f"{size_text(share * engines)} (cluster.engine.gpu_memory_utilization {share:g} of a "
            "GPU): raise cluster.engine.tensor_parallel_size"
        )
    known = {node: size for node, size in gpu_bytes.items() if size is not None}
    frozen = frozen_memory(config, device="cuda", backend=backend)
    for slot, (name, one) in zip(placement.frozen, frozen.items(), strict=True):
        least = one.weights + max(one.kv_token * one.longest, one.kv_cache or 0) + one.rest
        most = config.frozen[name].engine.gpu_memory_utilization * known.get(slot.node_id, math.inf)
        if least > most:
            yield (
                f"frozen model {name} needs at least {size_text(least)} a GPU and has "
                f"{size_text(most)}: raise frozen.{name}.engine.tensor_parallel_size"
            )


def what_helps(
    config: Config, shape: Shape, placement: Placement, backend: str, *, most: int
) -> str:
    """Name settings with which a learner rank needs less. most: bytes that are enough."""
    need = needed_bytes(config, shape, placement, backend)
    remedies = _remedies(config, shape, placement, backend)
    helps = [(what, other) for what, other in remedies if need - other >= (need - most) / 10]
    helps.sort(key=lambda one: one[1] > most)  # what is enough comes first
    less = [f"{what} ({size_text(need - other)} less)" for what, other in helps]
    if all(other > most for _, other in helps):
        less.append("a smaller model")
    return f"use {', or '.join(less)}; `async-grpo check` shows the parts"


def _remedies(
    config: Config, shape: Shape, placement: Placement, backend: str
) -> Iterator[tuple[str, int]]:
    """Give settings that may need less on these machines, each with what it would need."""
    learner, rollout, longest = config.learner, config.rollout, config.longest_share
    tokens, again = config.rank_tokens, learner.recomputes

    def need(changed: Config, of: Shape = shape) -> int:
        return needed_bytes(changed, of, placement, backend)

    if shape.can_recompute:
        yield "learner.gradient_checkpointing=true", need(_with(config, tokens, True))
    yield f"learner.tokens_per_micro_batch={longest}", need(_with(config, longest, again))
    actors = max(1, config.cluster.rollout_actors.min)
    spare = 0 if placement.colocated else len(placement.engines) - actors
    more = max(0, spare) * config.cluster.engine.tensor_parallel_size
    if more := more // learner.sequence_parallel * learner.sequence_parallel:
        ranks = learner.ranks + more
        yield f"learner.ranks={ranks}", need(_changed(config, "learner", ranks=ranks))
    stage = 2 if learner.compile else 3
    if stage > learner.zero_stage:
        yield f"learner.zero_stage={stage}", need(_changed(config, "learner", zero_stage=stage))
    size = 2 * learner.sequence_parallel
    if tokens == longest and learner.ranks % size == 0 and size <= shape.heads:
        shared = _changed(config, "learner", sequence_parallel=size)
        least = shared.longest_share
        yield (
            f"learner.sequence_parallel={size} with learner.tokens_per_micro_batch={least}",
            need(_with(shared, least, again)),
        )
    if tokens == longest and rollout.context_length is None:  # shorter ones allow smaller ones
        half = -(-rollout.response_length // 2)
        shorter = _changed(config, "rollout", response_length=half)
        least = shorter.longest_share
        yield (
            f"rollout.response_length={half} with learner.tokens_per_micro_batch={least}",
            need(_with(shorter, least, again)),
        )
    cache = ENGINE.kv_cache_gb(config, device="cuda", backend=backend)
    if placement.colocated and cache is not None and cache > 1:
        yield "cluster.engine.kv_cache_gb=1", need(_engine_with(config, kv_cache_gb=1.0))
    if placement.colocated and config.cluster.engine.sleep == "auto":
        old = config.replay.max_staleness > 1
        turns = "replay.max_staleness=1" if old else "cluster.engine.sleep=true"
        yield turns, need(_engine_with(config, sleep=True))
    if config.model.lora is None:
        of = replace(shape, trained=shape.parameters // _ADAPTERS, frozen=shape.parameters)
        yield "model.lora={}", need(_changed(config, "model", lora=Lora()), of)
    zero = learner.deepspeed.get("zero_optimization", {})
    if learner.zero_stage and "offload_optimizer" not in zero:
        moved = {"zero_optimization": {**zero, "offload_optimizer": {"device": "cpu"}}}
        yield (
            "learner.deepspeed.zero_optimization.offload_optimizer.device=cpu",
            need(_changed(config, "learner", deepspeed=learner.deepspeed | moved)),
        )


def _engine(config: Config, shape: Shape, backend: str) -> tuple[EngineMemory, int]:
    """Return the parts of an engine's GPU, and the least of their sum."""
    cache = ENGINE.kv_cache_gb(config, device="cuda", backend=backend)
    engine = engine_memory(config, shape, device="cuda", kv_cache_gb=cache)
    row = engine.kv_token * engine.longest
    return engine, engine.weights + max(row, engine.kv_cache or 0) + engine.rest


def _smallest(
    placement: Placement, gpu_bytes: Mapping[str, int | None], *, engine: bool = False
) -> int | None:
    """Return the memory of the smallest GPU of learner ranks, or engines; None if none is known."""
    slots = placement.engines if engine else placement.learners
    sizes = [gpu_bytes.get(slot.node_id) for slot in slots]
    return min((size for size in sizes if size is not None), default=None)


def _engine_with(config: Config, **values: object) -> Config:
    engine = config.cluster.engine.unchecked_copy(update=values)
    return _changed(config, "cluster", engine=engine)


def _with(config: Config, tokens: int, again: bool) -> Config:
    return _changed(config, "learner", tokens_per_micro_batch=tokens, gradient_checkpointing=again)


def _changed(config: Config, section: str, **values: object) -> Config:
    changed = getattr(config, section).unchecked_copy(update=values)
    return config.unchecked_copy(update={section: changed})
