"""What a run would be: the page of `async-grpo check`.

Runs in: a process of its own. Starts nothing and leaves nothing behind: no process, no run
directory. What it finds wrong is what a run would refuse, and comes last; what it warns of, a run
would begin with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.cluster.placement import (
    Node,
    Placement,
    PlacementError,
    crowded,
    describe,
    place,
    refuse,
    room_for,
)
from async_grpo.cluster.session import Survey, survey
from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.environments.base import HasEnvironment
from async_grpo.environments.tools import with_tools
from async_grpo.errors import SetupError
from async_grpo.learner.adapters import UntrainableError
from async_grpo.learner.drafts import available_bytes, host_bytes
from async_grpo.observe.console.console import Console
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.run.preflight.deadlines import too_short
from async_grpo.run.preflight.fit import fitted, needed_bytes, too_large
from async_grpo.run.preflight.memory import (
    CPU_BFLOAT16,
    EngineMemory,
    Shape,
    cpu_bfloat16,
    element_bytes,
    engine_memory,
    frozen_memory,
    learner_memory,
    shape_of,
    size_text,
)
from async_grpo.run.preflight.model import known_model, rendered
from async_grpo.runtime.text import counted, shortened
from async_grpo.tasks.base import RowsRefused, Task, TaskError
from async_grpo.tasks.data import RowTask
from async_grpo.tasks.mixture import load_tasks, parts_of
from async_grpo.tasks.registry import held_out
from async_grpo.tasks.sources import quiet_hub
from async_grpo.tools.check.known_models import known_config, names
from async_grpo.tools.predict.advice import one_change, said
from async_grpo.tools.predict.forecast import describe as describe_speed
from async_grpo.tools.predict.forecast import measured_beside
from async_grpo.tools.predict.rehearsal import predict
from async_grpo.tools.predict.workload import Measured, Workload
from async_grpo.weights.transport import resolve_backend

if TYPE_CHECKING:
    from async_grpo.run.trainer import Trainer

Line = tuple[str, str]
MOST_NODES = 4096
BFLOAT16_PAYS = 10_000_000
"""Parameters from which on it was seen to pay, where the processor has it."""


def assumed_nodes(text: str) -> list[Node]:
    """Read `--assume nodes=2,gpus=8,memory=80`: a cluster that is not here, memory in GiB a GPU,
    `cpus` a node (64 if not said). Raises SetupError.
    """
    values = {"nodes": 1.0, "gpus": 0.0, "memory": 0.0, "cpus": 64.0}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        whole = name != "memory"
        if name not in values or not re.fullmatch(r"\d+" if whole else r"\d+(\.\d+)?", value):
            raise SetupError(
                f"--assume {text}: {part.strip() or 'nothing'!r} is not understood; write for "
                "example nodes=2,gpus=8,memory=80 (memory: GiB of each GPU; cpus: of each node)"
            )
        values[name] = float(value)
    if not 1 <= values["nodes"] <= MOST_NODES or values["cpus"] < 1:
        raise SetupError(
            f"--assume {text}: a cluster has 1 to {MOST_NODES} nodes with a CPU or more"
        )
    return [
        Node(
            f"node {number}",
            f"node {number}",
            cpus=values["cpus"],
            gpus=values["gpus"],
            gpu_bytes=int(values["memory"] * 2**30) or None,
        )
        for number in range(1, int(values["nodes"]) + 1)
    ]


def dry_run(trainer: Trainer, console: Console, *, assumed: list[Node] | None = None) -> None:
    """Print configuration, budget, estimates, placement and warnings, each as far as it is known,
    and then raise SetupError for what a run would be refused for. assumed: nodes in place of those
    that are here; what this machine lacks is then a warning.
    """
    refused: list[str] = []
    here = refused if assumed is None else list[str]()
    checked = _refusal(trainer.check, here, rows=refused)
    config = trainer.config
    warnings = [line.removeprefix("note: ") for line in trainer.model_notes or []]
    if assumed is not None:
        warnings += [f"on this machine the run would be refused: {why}" for why in here]
    found, placement = _found_and_placed(config, assumed, refused)
    device, backend = _device(config, placement)
    _refusal(lambda: refuse(config, device=device, backend=backend), refused)
    shape, why = _shape(config, unread=not checked)
    chosen, memory = "", {node.node_id: node.gpu_bytes for node in found.nodes}
    if shape is not None and placement is not None:
        host = host_bytes() if assumed is None else None
        config, chosen = fitted(
            config, shape, placement, backend=backend, gpu_bytes=memory, host_bytes=host
        )
    console.info("# resolved configuration", dump(config).rstrip(), "")
    steps = trainer.total_steps if checked else config.run.total_steps
    if data := list(_data(config, noted=checked)):
        console.summary("data", data)
    console.summary("run", list(_budget(config, steps)))
    if placement is not None:
        speed = list(_speed(config, placement, device, assumed is not None))
        if device == "cpu" and found.cluster is None and assumed is None:
            speed += _number_format(config, shape, warnings)
        console.summary("speed", speed)
    if shape is None:
        console.summary("memory", [("model", why)])
    else:
        engine = engine_memory(
            config,
            shape,
            device=device,
            kv_cache_gb=ENGINE.kv_cache_gb(config, device=device, backend=backend),
        )
        console.summary("memory", list(_memory(config, shape, engine, device, backend)))
        console.info(*[chosen] if chosen else [])
        if why:
            warnings.append(why)
        if placement is not None:
            warnings += _cache_warnings(config, engine, device)
            if device == "cuda":
                warnings += too_short(config, shape)
            refused += too_large(config, shape, placement, backend=backend, gpu_bytes=memory)
            if device == "cpu" and found.cluster is None and assumed is None:
                warnings += _short_of_memory(needed_bytes(config, shape, placement, backend))
    places = _placement(found, placement, backend, assumed is not None, list(config.frozen_here))
    console.summary("placement", list(places))
    if placement is not None:
        warnings += _warnings(config, placement)
    if checked:
        tasks = parts_of(config, load_tasks(config))
        warnings += dict.fromkeys(line for part in tasks for line in _episode_warnings(*part))
    console.info(*[f"warning: {line}" for line in warnings] or ["no warnings"])
    refused = list(dict.fromkeys(refused))
    console.info(*[f"refused: {line}" for line in refused[:-1]])
    if refused:
        raise SetupError(refused[-1])


def _refusal(
    check: Callable[[], object], refused: list[str], *, rows: list[str] | None = None
) -> bool:
    """Run a check and note what it refuses, bad rows among `rows`; whether it passed."""
    try:
        check()
    except (SetupError, ValueError) as error:  # as a run catches them before it starts
        bad = rows is not None and isinstance(error.__cause__, RowsRefused)
        (rows if rows is not None and bad else refused).append(str(error))
        return False
    return True


def _data(config: Config, *, noted: bool) -> Iterator[Line]:
    """Say what is trained and evaluated; nothing of a task that was refused. noted: what is left
    out is among the warnings.
    """
    with suppress(TaskError), quiet_hub():
        task = load_tasks(config)
        evaluated = held_out(config, task)
        yield "training problems", f"{len(task):,}"
        yield "held-out problems", f"{evaluated:,}" if evaluated else "none: no evaluation"
        with suppress(SetupError):  # said elsewhere
            shown, lengths = rendered(config, task)
            for number, (text, tokens) in enumerate(shown, start=1):
                yield f"prompt {number}", f"{tokens} tokens: {shortened(repr(text), 300)}"
            if lengths:
                half, most = lengths[len(lengths) // 2], config.rollout.prompt_length
                yield (
                    "prompt tokens",
                    f"{lengths[0]:,} to {lengths[-1]:,}, median {half:,}; {most:,} at most "
                    "(rollout.prompt_length)",
                )
        if isinstance(task, RowTask) and not noted:
            yield from (("note", note.removeprefix("note: ")) for note in task.notes)


def _found_and_placed(
    config: Config, assumed: list[Node] | None, refused: list[str]
) -> tuple[Survey, Placement | None]:
    found, placement = Survey(assumed or [], None), None
    try:
        if assumed is None:
            found = survey(processes=room_for(config))
        placement = place(config, found.nodes)
    except (SetupError, PlacementError) as error:
        refused.append(str(error))
    return found, placement


def _device(config: Config, placement: Placement | None) -> tuple[str, str]:
    """Return the device and the weight transport; without a placement those that were asked for."""
    if placement is not None:
        device, colocated = placement.device, placement.colocated
    else:
        device = "cpu" if config.cluster.device == "cpu" else "cuda"
        colocated = config.cluster.layout == "colocated"
    return device, resolve_backend(config, device=device, colocated=colocated)


def _shape(config: Config, *, unread: bool) -> tuple[Shape | None, str]:
    """Find the model's shape on disk or the hub, or else among the well-known ones; None, or where
    the shape is from, in words. unread: the hub or the disk did not have all when it was asked.
    """
    path = config.model.path
    known = known_config(path) if path is not None and not Path(path).is_dir() else None
    try:
        if unread and known is not None:
            why = f"the model's size is that of {path} in a table of well-known models, not read"
            return shape_of(config, known), why
        with quiet_hub():
            task = load_tasks(config) if path is None else None
            model = None if task is not None else str(Path(path or "").expanduser())
            return shape_of(config, known_model(config, task) if task is not None else model), ""
    except UntrainableError as error:
        return None, f"no estimate: {error}"
    except (OSError, ValueError, TaskError, SetupError) as error:
        return None, (
            f"its shape is not known ({' '.join(str(error).split())}), so there is no "
            "estimate; give model.path a directory with a config.json, or one of "
            f"{', '.join(names())}"
        )


def _budget(config: Config, total_steps: int | None) -> Iterator[Line]:
    rollout, replay = config.rollout, config.replay
    batch, staleness = rollout.rollout_batch_size, replay.max_staleness
    responses = batch * rollout.group_size
    count = f"run.epochs {config.run.epochs:g}, steps" if total_steps is None else total_steps
    yield (
        "learner steps",
        f"{count} of {batch} groups x {rollout.group_size} responses = {responses} responses each",
    )
    yield (
        "updates per step",
        f"{counted(config.learner.ppo_epochs, 'epoch')} x {batch} / "
        f"{config.mini_batch_groups} groups = {config.updates_per_step}, each of "
        f"{config.mini_batch_groups * rollout.group_size} responses over "
        f"{counted(config.learner.ranks, 'rank')}{_together(config)}",
    )
    yield (
        "in flight at most",
        (
            f"(max_staleness + 1) x rollout_batch_size = ({staleness} + 1) x {batch} = "
            if replay.outstanding == "auto"
            else "replay.outstanding = "
        )
        + f"{config.max_outstanding} groups, "
        f"{config.max_outstanding * rollout.group_size} responses"
        + ("; fewer if the learner needs fewer" if replay.outstanding == "auto" else ""),
    )
    yield (
        "most stale",
        f"max_staleness = {counted(staleness, 'learner step')}, (max_staleness + 1) x "
        f"updates per step - 1 = {counted(config.max_lag_updates, 'optimizer update')}"
        + ("; older tokens get weight 0" if replay.on_stale == "mask" else ""),
    )
    if most := rollout.most_kept:
        yield (
            "a sampled token",
            f"8 bytes, 2 more, and 4 for each that it is sampled from: at most {10 + 4 * most}",
        )
    every = config.weight_sync.every_steps
    yield (
        "weight sync",
        f"every {every} learner steps" if every > 1 else "after every learner step",
    )


def _speed(config: Config, placement: Placement, device: str, assumed: bool) -> Iterator[Line]:
    """Say what a run beside this one leads to expect of it."""
    beside = next(measured_beside(config, Path(config.run.dir)), None)
    if beside is None or assumed:
        yield (
            "expected",
            "not known: no run of this model and task was measured here; after 30 steps of one, "
            "use async-grpo predict CONFIG --from RUN_DIR",
        )
        return
    record = json.loads(beside.read_text(encoding="utf-8"))
    work = Workload.of(
        config,
        Measured.of(record["measured"]),
        max_num_seqs=ENGINE.max_num_seqs(config, device=device) or int(record["places"]),
        actors=len(placement.engines),
        cores=record.get("cores"),
    )
    now = predict(work)
    change = one_change(work, now)
    yield ("expected", f"{describe_speed(now)}; measured in {beside.parent}")
    yield ("to change", "nothing" if change is None else said(change, now))


def _number_format(config: Config, shape: Shape | None, warnings: list[str]) -> Iterator[Line]:
    """Say where bfloat16 is faster on this processor, and warn where it is far slower."""
    fast = cpu_bfloat16()
    if config.model.dtype == "bfloat16" and fast is None:
        warnings.append(
            f"this processor does not multiply bfloat16 (it has no {' or '.join(CPU_BFLOAT16)}), "
            "which makes it many times as slow as float32: set model.dtype: float32"
        )
    elif config.model.dtype != "bfloat16" and fast and shape and shape.trained >= BFLOAT16_PAYS:
        yield (
            "number format",
            f"float32; this processor multiplies bfloat16 ({fast}): with model.dtype=bfloat16 a "
            "model of 135 million parameters was 1.7 times as fast",
        )


def _memory(
    config: Config, shape: Shape, engine: EngineMemory, device: str, backend: str
) -> Iterator[Line]:
    yield (
        "model",
        f"{shape.parameters:,} parameters, "
        + (f"{shape.active:,} of them for a token, " if shape.active else "")
        + f"{shape.trained:,} trained; {shape.layers} layers, vocabulary {shape.vocabulary:,}",
    )
    if config.learner.routing_replay == "r3":
        yield (
            "a token's experts",
            f"{shape.layers} layers x {shape.experts} = {shape.layers * shape.experts} bytes on "
            "the way to the learner, twice as many where a layer has more than 255",
        )
    for stage in range(0 if element_bytes(config, device) == 4 else 1, 4):
        need = learner_memory(config, shape, device=device, stage=stage, backend=backend)
        chosen = "  <- learner.zero_stage" if stage == config.learner.zero_stage else ""
        more = [
            (need.reference, "reference"),
            (need.publication, "weight sync"),
            (need.context, "CUDA and NCCL about"),
        ]
        rest = "".join(f", {what} {size_text(count)}" for count, what in more if count)
        yield (
            f"learner rank, ZeRO-{stage}",
            (
                f"{size_text(need.total)}: weights {size_text(need.weights)}, gradients "
                f"{size_text(need.gradients)}, optimizer {size_text(need.optimizer)}, "
                f"buckets {size_text(need.buckets)}, activations about "
                f"{size_text(need.activations)}{rest}{chosen}"
            ),
        )
    yield (
        "engine",
        f"weights {size_text(engine.weights)}, "
        + (f"{size_text(engine.adapters)} of them adapters, " if engine.adapters else "")
        + (f"CUDA, graphs and activations about {size_text(engine.rest)}, " if engine.rest else "")
        + f"KV cache {size_text(engine.kv_token)} a token, "
        + (
            f"{size_text(engine.kv_cache)} in all: room for {engine.rows(engine.kv_cache)} "
            f"responses of {engine.longest} tokens"
            if engine.kv_cache is not None
            else f"sized by {ENGINE.name}: what gpu_memory_utilization "
            f"{config.cluster.engine.gpu_memory_utilization:g} of a GPU leaves"
        ),
    )
    for name, frozen in frozen_memory(config, device=device, backend=backend).items():
        cache = f", KV cache {size_text(frozen.kv_cache)}" if frozen.kv_cache else ""
        yield (f"frozen model {name}", f"weights {size_text(frozen.weights)}{cache}")
    sent = shape.trained if engine.adapters else shape.parameters
    yield ("weight sync", f"{size_text(sent * element_bytes(config, device))} to every engine")


def _placement(
    found: Survey, placement: Placement | None, backend: str, assumed: bool, models: list[str]
) -> Iterator[Line]:
    """Say where the processes go. models: names of the frozen ones."""
    where = f"Ray cluster {found.cluster}" if found.cluster else "Ray would be started here"
    yield ("machines", f"{describe(found.nodes)} ({'assumed' if assumed else where})")
    if placement is None:
        yield ("device", "none: see the refusal below")
        return
    yield (
        "device",
        f"{placement.device}, "
        + ("learner and engines share GPUs" if placement.colocated else "learner and engines apart")
        + f"; weights by {backend}",
    )
    addresses = {node.node_id: node.address for node in found.nodes}
    for label, slots, each in (
        ("learner rank", placement.learners, range(len(placement.learners))),
        ("engine", placement.engines, range(len(placement.engines))),
        ("frozen model", placement.frozen, models),
    ):
        for name, slot in zip(each, slots, strict=True):
            cores = f", cores {', '.join(map(str, slot.cores))}" if slot.cores else ""
            yield (
                f"{label} {name}",
                f"{addresses[slot.node_id]}: {counted(slot.cpus, 'CPU')}, "
                f"{counted(slot.gpus, 'GPU')}{cores}",
            )


def _episode_warnings(config: Config, task: Task) -> Iterator[str]:
    played = with_tools(task, config.environment.tools)
    if not isinstance(played, HasEnvironment) or config.replay.on_stale == "mask":
        return
    steps = counted(config.replay.max_staleness + 1, "learner step")
    late = {
        "wait": "makes the learner wait for it",
        "expire": "is thrown away and begun again, and is never trained if all are so long",
    }[config.replay.on_stale]
    yield (
        f"an episode that takes longer than {steps} {late} (replay.on_stale: "
        f"{config.replay.on_stale}); if yours may, set replay.on_stale: mask"
    )


def _warnings(config: Config, placement: Placement) -> Iterator[str]:
    rollout, engines = config.rollout, len(placement.engines)
    seats = engines * (ENGINE.max_num_seqs(config, device=placement.device) or 0)
    most = config.max_outstanding * rollout.group_size
    if seats > most and config.cluster.engine.max_num_seqs is not None:
        yield (
            f"{counted(engines, 'engine')} can generate {seats} responses at a time, and at most "
            f"{most} are in flight: raise replay.max_staleness or rollout.rollout_batch_size, or "
            f"lower cluster.engine.max_num_seqs to {max(1, most // engines)}"
        )
    if why := crowded(placement):
        yield why
    if config.mini_batch_groups * rollout.group_size % config.learner.teams:
        yield (
            f"{config.mini_batch_groups * rollout.group_size} responses of an update do not "
            f"divide by learner.ranks {config.learner.ranks}{_together(config)}: some ranks get "
            "one more"
        )


def _together(config: Config) -> str:
    """Say how many ranks share a sequence; "" where none do."""
    size = config.learner.sequence_parallel
    return f", {size} for each sequence" if size > 1 else ""


def _cache_warnings(config: Config, engine: EngineMemory, device: str) -> Iterator[str]:
    most = config.max_outstanding * config.rollout.group_size
    most = min(most, ENGINE.max_num_seqs(config, device=device) or most)
    if engine.kv_cache is None:
        return
    if (rows := engine.rows(engine.kv_cache)) < most:
        need = 1.06 * engine.kv_token * engine.longest * most / 2**30  # it is rounded
        yield (
            f"the KV cache holds {rows} of the {most} responses that may be under way, at full "
            f"length: longer ones wait for each other; cluster.engine.kv_cache_gb={need:.2g} holds "
            "them all"
        )


def _short_of_memory(need: int) -> Iterator[str]:
    free = available_bytes()
    if need > free:
        yield (
            f"learner and engines need about {size_text(need)} and this machine has "
            f"{size_text(free)} free: fewer engines, a smaller batch, or another machine"
        )
