"""What a run would be: `python -m async_grpo.run CONFIG --dry-run`.

Runs in: the driver. Starts nothing and leaves nothing behind: no process, no run directory. What it
finds wrong is what a run would refuse; what it warns of, a run would begin with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from async_grpo.cluster.placement import (
    Placement,
    PlacementError,
    describe,
    place,
    refuse,
    room_for,
)
from async_grpo.cluster.session import Survey, survey
from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.learner.drafts import available_bytes
from async_grpo.observe.console.console import Console
from async_grpo.preflight.memory import (
    ENGINE_CODE,
    LEARNER_CODE,
    EngineMemory,
    Shape,
    element_bytes,
    engine_memory,
    learner_memory,
    shape_of,
)
from async_grpo.preflight.model import known_model
from async_grpo.rollout.engine import kv_cache_gb
from async_grpo.runtime.text import counted
from async_grpo.tasks.registry import load_task
from async_grpo.weights.transport import resolve_backend

if TYPE_CHECKING:
    from async_grpo.trainer import Trainer

Line = tuple[str, str]


def dry_run(trainer: Trainer, console: Console) -> None:
    """Print configuration, budget, estimates, placement, warnings. Raises SetupError like a run."""
    config = trainer.config
    trainer.check()
    found = survey(processes=room_for(config))
    try:
        placement = place(config, found.nodes)
    except PlacementError as error:
        raise SetupError(str(error)) from error
    backend = resolve_backend(config, device=placement.device, colocated=placement.colocated)
    refuse(config, device=placement.device, backend=backend)
    try:
        shape = shape_of(config, known_model(config, load_task(config.task, config.seed)))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"the model's configuration cannot be read: {' '.join(str(error).split())}"
        ) from error
    engine = engine_memory(
        config,
        shape,
        device=placement.device,
        kv_cache_gb=kv_cache_gb(config, device=placement.device, backend=backend),
    )
    console.info("# resolved configuration", dump(config).rstrip(), "")
    console.summary("run", list(_budget(config, trainer.total_steps)))
    console.summary("memory", list(_memory(config, shape, engine, placement)))
    console.summary("placement", list(_placement(found, placement, backend, shape, config)))
    warnings = [*(trainer.model_notes or []), *_warnings(config, shape, engine, placement, found)]
    console.info(
        *[f"warning: {line.removeprefix('note: ')}" for line in warnings] or ["no warnings"]
    )


def _budget(config: Config, total_steps: int) -> Iterator[Line]:
    rollout, replay = config.rollout, config.replay
    batch, staleness = rollout.rollout_batch_size, replay.max_staleness
    responses = batch * rollout.group_size
    yield (
        "learner steps",
        f"{total_steps} of {batch} groups x {rollout.group_size} responses = {responses} "
        "responses each",
    )
    yield (
        "updates per step",
        f"{counted(config.learner.ppo_epochs, 'epoch')} x {batch} / "
        f"{config.mini_batch_groups} groups = {config.updates_per_step}, each of "
        f"{config.mini_batch_groups * rollout.group_size} responses over "
        f"{counted(config.learner.ranks, 'rank')}",
    )
    yield (
        "in flight at most",
        f"(max_staleness + 1) x rollout_batch_size = ({staleness} + 1) x {batch} = "
        f"{config.max_outstanding} groups, "
        f"{config.max_outstanding * rollout.group_size} responses",
    )
    yield (
        "worst lag",
        f"max_staleness = {counted(staleness, 'learner step')}, (max_staleness + 1) x "
        f"updates per step - 1 = {counted(config.max_lag_updates, 'optimizer update')}"
        + ("; older tokens get weight 0" if replay.on_stale == "mask" else ""),
    )
    every = config.weight_sync.every_steps
    yield (
        "publications",
        f"every {every} learner steps" if every > 1 else "after every learner step",
    )


def _memory(
    config: Config, shape: Shape, engine: EngineMemory, placement: Placement
) -> Iterator[Line]:
    yield (
        "model",
        f"{shape.parameters:,} parameters, {shape.trained:,} trained; {shape.layers} "
        f"layers, vocabulary {shape.vocabulary:,}",
    )
    for stage in range(4):
        need = learner_memory(config, shape, device=placement.device, stage=stage)
        chosen = "  <- learner.zero_stage" if stage == config.learner.zero_stage else ""
        reference = f", reference {_size(need.reference)}" if need.reference else ""
        yield (
            f"learner rank, ZeRO-{stage}",
            (
                f"{_size(need.total)}: weights {_size(need.weights)}, gradients "
                f"{_size(need.gradients)}, optimizer {_size(need.optimizer)}, "
                f"buckets {_size(need.buckets)}, activations about "
                f"{_size(need.activations)}{reference}{chosen}"
            ),
        )
    yield (
        "engine",
        f"weights {_size(engine.weights)}, KV cache {_size(engine.kv_token)} a token, "
        + (
            f"{_size(engine.kv_cache)} in all: room for {engine.rows(engine.kv_cache)} "
            f"responses of {engine.longest} tokens"
            if engine.kv_cache is not None
            else "sized by vLLM: what gpu_memory_utilization "
            f"{config.cluster.engine.gpu_memory_utilization:g} of a GPU leaves"
        ),
    )
    yield (
        "publication",
        f"{_size(shape.parameters * element_bytes(config, placement.device))} to every engine",
    )


def _placement(
    found: Survey, placement: Placement, backend: str, shape: Shape, config: Config
) -> Iterator[Line]:
    addresses = {node.node_id: node.address for node in found.nodes}
    yield (
        "machines",
        f"{describe(found.nodes)}"
        + (f" (Ray cluster {found.cluster})" if found.cluster else " (Ray would be started here)"),
    )
    yield (
        "device",
        f"{placement.device}, "
        + ("learner and engines share GPUs" if placement.colocated else "learner and engines apart")
        + f"; weights by {backend}",
    )
    for label, slots in (("learner rank", placement.learners), ("engine", placement.engines)):
        for index, slot in enumerate(slots):
            cores = f", cores {', '.join(map(str, slot.cores))}" if slot.cores else ""
            yield (
                f"{label} {index}",
                f"{addresses[slot.node_id]}: {counted(slot.cpus, 'CPU')}, "
                f"{counted(slot.gpus, 'GPU')}{cores}",
            )


def _warnings(
    config: Config, shape: Shape, engine: EngineMemory, placement: Placement, found: Survey
) -> Iterator[str]:
    rollout, engines = config.rollout, len(placement.engines)
    seats = engines * config.cluster.engine.max_num_seqs
    most = config.max_outstanding * rollout.group_size
    if seats > most:
        yield (
            f"{counted(engines, 'engine')} can generate {seats} responses at a time, and at most "
            f"{most} are in flight: raise replay.max_staleness or rollout.rollout_batch_size, or "
            f"lower cluster.engine.max_num_seqs to {max(1, most // engines)}"
        )
    if config.mini_batch_groups * rollout.group_size % config.learner.ranks:
        yield (
            f"{config.mini_batch_groups * rollout.group_size} responses of an update do not "
            f"divide by learner.ranks {config.learner.ranks}: some ranks get one more"
        )
    if engine.kv_cache is not None and engine.rows(engine.kv_cache) < min(
        config.cluster.engine.max_num_seqs, most
    ):
        yield (
            f"the KV cache holds {engine.rows(engine.kv_cache)} responses of full length, fewer "
            f"than cluster.engine.max_num_seqs {config.cluster.engine.max_num_seqs}: longer ones "
            "wait for each other; raise cluster.engine.kv_cache_gb"
        )
    if placement.device == "cpu" and found.cluster is None:
        yield from _short_of_memory(config, shape, engine, placement)


def _short_of_memory(
    config: Config, shape: Shape, engine: EngineMemory, placement: Placement
) -> Iterator[str]:
    rank = learner_memory(config, shape, device="cpu", stage=config.learner.zero_stage).total
    one = engine.weights + (engine.kv_cache or 0) + ENGINE_CODE
    ranks, engines = len(placement.learners), len(placement.engines)
    need = int(ranks * (rank + LEARNER_CODE) + engines * one)
    free = available_bytes()
    if need > free:
        yield (
            f"learner and engines need about {_size(need)} and this machine has {_size(free)} "
            "free: fewer engines, a smaller batch, or another machine"
        )


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.{0 if count >= 100 or unit == 'bytes' else 1}f} {unit}"
        count /= 1024
    raise AssertionError
