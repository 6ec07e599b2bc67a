"""Stages with models of a real size and random weights: how fast they train, and how much memory
they take beside the estimate.

The task rewards a bit of a response's checksum, so a random model has a loss.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.run.preflight.memory import Shape, engine_memory, learner_memory, shape_of
from async_grpo.weights.transport import resolve_backend
from benchmarks.gpu_check import models
from benchmarks.gpu_check.check import Check, CheckFailed, LeftOut
from benchmarks.gpu_check.machine import Memory, gpus
from benchmarks.harness import ROOT

ONE_GPU, EIGHT_GPUS = "configs/gsm8k_1gpu.yaml", "configs/gsm8k_8gpu.yaml"
ROUNDING = {"cuda": 0.05, "cpu": 1e-3}
"""By how much a figure of a learner step may differ with another order of operations, in bfloat16
and in float32; of its size, where that is above 1.
"""
COMPARED = ("train/loss", "train/grad_norm", "train/entropy")
TAKEN = 0.95
"""Share of a GPU that an estimate may need."""


def one_gpu(check: Check) -> dict[str, Any]:
    """Train `gsm8k_1gpu` for a few steps: a random model of its shape where none is given."""
    model = check.model or _written(check, "Qwen2.5-0.5B")
    settings = _random(check, steps=6 if check.device == "cuda" else 3)
    return _measured(check, "one_gpu", ONE_GPU, settings, model)


def seven_b(check: Check) -> dict[str, Any]:
    """Train a few steps of a 7B model: all of it where GPUs and disk hold that, else adapters."""
    size, why = "Qwen2.5-7B", ""
    short = ["rollout.rollout_batch_size=16", "learner.ppo_mini_batch_size=16"]
    short += ["rollout.group_size=8", "rollout.response_length=512"]
    ways = [("adapters", ONE_GPU, ["model.lora={}", "learner.lr=1e-5"])]
    half = len(gpus()) // 2
    if half and check.device == "cuda":
        ranks = 2 ** (half.bit_length() - 1)  # by which a batch can be divided
        full = [f"learner.ranks={ranks}", "cluster.rollout_actors={min: 1, max: null}"]
        full.append("algorithm.overlong_buffer.enable=false")
        ways.insert(0, ("all weights", EIGHT_GPUS, full))
    for trained, recipe, own in ways:
        settings = [*own, *_random(check, *short, steps=4)]
        if why := _lacking(check, recipe, settings, size):
            continue
        model = _written(check, size)
        try:
            return {"trained": trained} | _measured(check, "seven_b", recipe, settings, model)
        finally:  # tens of gigabytes
            shutil.rmtree(check.run_dir("seven_b") / "checkpoints", ignore_errors=True)
            if check.device == "cuda":
                shutil.rmtree(model, ignore_errors=True)
    raise LeftOut(why)


def compiled(check: Check) -> dict[str, Any]:
    """Train the batches of `one_gpu` again, the learner alone, without and with compilation."""
    if not check.lines("one_gpu"):
        one_gpu(check)
    off, without = _retrained(check, "compile-off", "one_gpu", "learner.compile=false")
    on, lines = _retrained(check, "compile-on", "one_gpu", "learner.compile=true")
    largest = max(
        abs(one[name] - other[name]) / max(1.0, abs(other[name]))
        for one, other in zip(lines, without, strict=True)
        for name in COMPARED
    )
    if largest > ROUNDING[check.device]:
        raise CheckFailed(
            f"loss, gradient norm or entropy differ by {largest:.3g} from those without "
            f"compilation, more than rounding ({ROUNDING[check.device]:g})"
        )
    return on | {f"{name} off": value for name, value in off.items()} | {"difference": largest}


def long_rows(check: Check) -> dict[str, Any]:
    """Train responses of 16,000 tokens; then train them again, the learner alone, for its memory
    and its speed.
    """
    length = 15_872 if check.device == "cuda" else 480
    model = _written(check, "Qwen2.5-0.5B")
    few = ["rollout.rollout_batch_size=4", "learner.ppo_mini_batch_size=4", "rollout.group_size=4"]
    settings = [*_random(check, *few, steps=3), f"rollout.response_length={length}"]
    settings += ["learner.tokens_per_micro_batch=auto", f"model.path={model}"]
    longest = check.train("long_rows", ONE_GPU, *settings)["metrics"]["rollout/response_length"]
    if longest < length / 2:
        raise CheckFailed(f"responses have {longest:.0f} tokens, of {length} that they may have")
    alone, _ = _retrained(check, "long_rows-alone", "long_rows")
    return {"response_tokens": round(longest)} | alone


def _random(check: Check, *size: str, steps: int) -> list[str]:
    """Settings for a random model, and a task on which it is right half of the time. size: of a
    step, on GPUs.
    """
    settings = [
        f"run.total_steps={steps}",
        "task.name=tests.support.mixed_task:Mixed",
        "task.train=null",
        "task.eval=null",
        "replay.filter_groups={enable: false}",
        "evaluation.every_steps=0",
        "evaluation.before=false",
        "checkpoint.every_steps=0",
    ]
    if check.device == "cuda":
        return [*settings, *size]
    return [
        *settings,
        "weight_sync.backend=auto",
        "cluster.layout=auto",
        "cluster.engine.kv_cache_gb=0.25",
        "rollout.rollout_batch_size=4",
        "rollout.prompt_length=16",
        "rollout.response_length=16",
        "learner.ppo_mini_batch_size=2",
    ]


def _written(check: Check, shape: str) -> str:
    """Write a random model of a shape, a tiny one on CPU, unless it is there; its directory."""
    shape = shape if check.device == "cuda" else models.TINY
    directory = check.directory / "models" / shape
    if not (directory / "config.json").is_file():
        options = [shape, str(directory), "--device", check.device]
        check.python("model", "benchmarks.gpu_check.models", *options)
    return str(directory)


def _lacking(check: Check, recipe: str, settings: Sequence[str], size: str) -> str:
    """Say what a run of a model of this shape has too little of here; "" for nothing."""
    here = [gpu.total_mib for gpu in gpus() if gpu.total_mib]
    if check.device == "cpu" or not here:
        return ""
    config = load_config(ROOT / recipe, [*settings, "model.path=model"])
    shape = shape_of(config, models.shape(size))
    need = _estimated_mib(config, shape, check.device)
    if need > TAKEN * min(here):
        return f"needs about {need:,.0f} MiB on a GPU, there are {min(here):,.0f}"
    # the model, the one in the checkpoint, and the states of what is trained
    nbytes = 4 * shape.parameters + 12 * shape.trained
    free = shutil.disk_usage(check.directory.parent).free
    return (
        "" if nbytes < free else f"needs {nbytes / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free"
    )


def _estimated_mib(config: Config, shape: Shape, device: str, *, engine: bool = True) -> float:
    """Estimate the memory of a learner rank's GPU, with the engine that shares it; on CPU of both
    processes. engine: whether there are any.
    """
    colocated = config.cluster.layout == "colocated"
    backend = resolve_backend(config, device=device, colocated=colocated) if engine else ""
    stage = config.learner.zero_stage
    need = learner_memory(config, shape, device=device, stage=stage, backend=backend).total
    if engine and (colocated or device == "cpu"):
        gib = ENGINE.kv_cache_gb(config, device=device, backend=backend)
        other = engine_memory(config, shape, device=device, kv_cache_gb=gib)
        need += other.weights + (other.kv_cache or 0) + other.rest
    return need / 2**20


def _measured(
    check: Check, name: str, recipe: str, settings: Sequence[str], model: str
) -> dict[str, Any]:
    """Train a recipe with this model: its last rates, and its memory beside the estimate."""
    with Memory() as memory:
        figures = check.train(name, recipe, *settings, f"model.path={model}")
    metrics = figures.pop("metrics")
    config = load_config(check.run_dir(name) / "config.yaml")
    shape = shape_of(config, model)
    # the metric is the mean of an update, and the step's tokens are divided among its updates
    updates = config.rollout.rollout_batch_size // config.mini_batch_groups
    update_s = max(metrics["time/learner_update"], 1e-9)
    trained = metrics["rollout/response_tokens"] / updates / update_s
    nbytes = shape.parameters * (2 if check.device == "cuda" else 4)
    figures |= {
        "parameters": shape.parameters,
        "learner_tokens_per_s": round(trained),
        "run_tokens_per_s": round(metrics["train/tokens_per_s"]),
        "engine_tokens_per_s": round(check.per_second(name, "goodput/generated")),
        "publication_gb_per_s": round(nbytes / 1e9 / max(metrics["weights/until_live_s"], 1e-9), 2),
        "memory_estimate_mib": round(_estimated_mib(config, shape, check.device)),
    }
    if any(memory.peaks):
        figures["memory_peak_mib"] = " / ".join(f"{peak:.0f}" for peak in memory.peaks)
    here = gpus()
    if here and here[0].peak_flops:
        peak = here[0].peak_flops * config.learner.ranks
        figures["learner_mfu"] = round(6 * shape.parameters * trained / peak, 3)
    return figures


def _retrained(
    check: Check, name: str, source: str, *settings: str
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Train the batches of another stage's run again, the learner alone: figures, and the metrics
    of each step.
    """
    arguments = ["retrain", str(check.run_dir(source)), f"run.dir={check.run_dir(name)}", *settings]
    with Memory() as memory:
        check.python(name, "async_grpo", *arguments)
    lines = [line for line in check.lines(name) if "train/loss" in line]
    if len(lines) < 2:
        raise CheckFailed(f"{len(lines)} steps were trained again")
    tokens, seconds = (
        sum(line[metric] for line in lines[1:])
        for metric in ("rollout/response_tokens", "time/train")
    )
    config = load_config(check.run_dir(name) / "config.yaml")
    shape = shape_of(config, str(config.model.path))
    estimate = _estimated_mib(config, shape, check.device, engine=False)
    figures = {
        "first_step_s": round(lines[0]["time/train"], 2),
        "tokens_per_s": round(tokens / max(seconds, 1e-9)),
        "memory_estimate_mib": round(estimate),
    }
    if any(memory.peaks):
        figures["memory_peak_mib"] = round(max(memory.peaks))
    return figures, lines
