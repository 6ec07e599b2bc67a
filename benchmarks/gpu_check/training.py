"""Stages that train the quickstart to its end, each over another path of engine, learner and
weights; and the tests.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from benchmarks.gpu_check.check import Check, CheckFailed, LeftOut, last_json, processes, require
from benchmarks.gpu_check.machine import gpus

QUICKSTART = "configs/quickstart.yaml"
SHARED = ("cluster.layout=colocated", "weight_sync.backend=ipc")
APART = ("cluster.layout=split", "weight_sync.backend=nccl")


def quickstart(check: Check, name: str, *settings: str) -> dict[str, Any]:
    """Train the quickstart for the steps of a stage."""
    return learned(check.train(name, QUICKSTART, f"run.total_steps={check.steps}", *settings))


def learned(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a quickstart that go into the table."""
    metrics = figures.pop("metrics")
    names = {
        "accuracy": "eval/accuracy_greedy",
        "steps": "replay/steps",
        "tokens_per_s": "train/tokens_per_s",
        "sampler_error": "weights/sampler_error",
        "publication_s": "weights/until_live_s",
    }
    return figures | {name: metrics[key] for name, key in names.items() if key in metrics}


def gpu_tests(check: Check) -> dict[str, Any]:
    """Run the tests marked `gpu`; without a GPU, a few that have a half on either device."""
    chosen = ["-m", "gpu"] if check.device == "cuda" else ["-k", "cpu", "-m", "not gpu"]
    paths = ["tests/learner", "tests/weights", "tests/test_install.py"]
    if check.device == "cpu":
        paths = ["tests/learner/test_attention.py"]
    done = check.command("tests", [sys.executable, "-m", "pytest", "-q", *paths, *chosen])
    counts = {
        word: int(count)
        for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.output)
    }
    if done.code or not counts.get("passed"):
        require(done)
        raise CheckFailed(f"no test ran: {counts}")
    return counts


def ipc(check: Check) -> dict[str, Any]:
    """Train the quickstart with engine and learner on one GPU, in float32 and bfloat16."""
    figures: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        found = check.train(
            f"ipc-{dtype}",
            QUICKSTART,
            f"run.total_steps={check.steps}",
            f"model.dtype={dtype}",
            *check.on_gpus(*SHARED),
        )
        figures |= {f"{dtype} {name}": value for name, value in learned(found).items()}
    return figures


def nccl(check: Check) -> dict[str, Any]:
    """Train the quickstart with engine and learner on GPUs of their own."""
    return quickstart(check, "nccl", *check.on_gpus(*APART))


def changes(check: Check) -> dict[str, Any]:
    """Train the quickstart over NCCL, which sends what changed."""
    device = check.on_gpus(*APART, "model.dtype=bfloat16", "weight_sync.delta=always")
    return quickstart(check, "changes", *device)


def senders(check: Check) -> dict[str, Any]:
    """Train with two learner ranks that both send, and two engines; then let two ranks send more,
    and unverified.
    """
    backend = "weight_sync.backend={name: nccl, senders: every_rank}"
    apart = ["cluster.layout=split", backend, "model.dtype=bfloat16"]
    figures = quickstart(check, "senders", "learner.ranks=2", *check.on_gpus(*apart))
    size = "1" if check.device == "cuda" else "0.001"
    command = [sys.executable, "-m", "benchmarks.gpu_check.senders", "--device", check.device]
    done = check.command("senders-bits", [*command, "--gigabytes", size])
    found = last_json(done)
    if found.get("wrong_pieces") or found.get("failed"):
        raise CheckFailed(
            f"{found['wrong_pieces']} pieces arrived with other bits than were sent; "
            f"{found['failed'] or 'no transfer failed'}"
        )
    require(done)
    return figures | {name: found[name] for name in ("gb", "gb_per_s", "wrong_pieces")}


def tensor_parallel(check: Check) -> dict[str, Any]:
    """Let an engine of two GPUs answer the problems of the quickstart of `ipc`."""
    source = check.run_dir("ipc-float32")
    if not (source / "checkpoints").is_dir():
        raise CheckFailed("the stage ipc left no checkpoint: run it before")
    size = 2 if check.device == "cuda" else 1
    done = check.command(
        "tensor_parallel",
        [
            *(sys.executable, "-m", "async_grpo", "eval", str(source), "--json"),
            f"cluster.engine.tensor_parallel_size={size}",
            f"cluster.device={check.device}",
        ],
    )
    require(done)
    found = last_json(done)
    accuracy = check.metrics("ipc-float32").get("eval/accuracy_greedy")
    return {"accuracy": found["eval/accuracy_greedy"], "accuracy of the run": accuracy}


def zero3(check: Check) -> dict[str, Any]:
    """Train the quickstart on two learner ranks that hold the model together."""
    on_gpus = check.on_gpus("model.dtype=bfloat16", "cluster.layout=colocated")
    return quickstart(check, "zero3", "learner.ranks=2", "learner.zero_stage=3", *on_gpus)


def lora(check: Check) -> dict[str, Any]:
    """Train adapters of the quickstart's model, whose merged weights go to the engine."""
    return quickstart(check, "lora", "model.lora={}", "learner.lr=1e-3", *check.on_gpus(*SHARED))


def adapters(check: Check) -> dict[str, Any]:
    """Train adapters of the quickstart's model, of which the engine holds one per version."""
    alone = ("model.lora={}", "weight_sync.lora=adapter", "learner.lr=1e-3")
    return quickstart(check, "adapters", *alone, *check.on_gpus(*SHARED))


def offload(check: Check) -> dict[str, Any]:
    """Train the quickstart with the optimizer's states in host memory."""
    moved = "learner.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"
    return quickstart(check, "offload", moved, "learner.zero_stage=2", *check.on_gpus(*SHARED))


def fp8(check: Check) -> dict[str, Any]:
    """Train the quickstart with an engine that computes in fp8."""
    return quickstart(
        check,
        "fp8",
        *SHARED,
        "cluster.engine.vllm={quantization: fp8}",
        "algorithm.anchor=recomputed",
        "algorithm.importance={level: token, mode: truncate, upper: 2.0}",
    )


def evaluation(check: Check) -> dict[str, Any]:
    """Evaluate during the training of the quickstart."""
    figures = quickstart(check, "evaluation", "evaluation.every_steps=2", *check.on_gpus(*SHARED))
    lines = [line for line in check.lines("evaluation") if "eval/seconds" in line]
    if len(lines) < 3:  # before and after are two
        raise CheckFailed(f"{len(lines)} evaluations: there was none during training")
    return figures | {
        "evaluations": len(lines),
        "evaluation_s": max(line["eval/seconds"] for line in lines[1:-1]),
        "learner_waited_s": max(line["eval/learner_waited_s"] for line in lines[1:-1]),
    }


def two_nodes(check: Check) -> dict[str, Any]:
    """Train the quickstart on a Ray cluster of two nodes, with as many learner ranks as this one
    has GPUs: the learner fills a node, and the engines have the other.
    """
    if check.address is None:
        raise LeftOut("needs --address ADDRESS of a Ray cluster of two nodes")
    name, ranks = "two_nodes", max(1, len(gpus()))
    command = check.run_command(
        name,
        QUICKSTART,
        f"run.total_steps={check.steps}",
        f"learner.ranks={ranks}",
        *(check.on_gpus(*APART) or ["cluster.rollout_actors={min: 2, max: 2}"]),
    )
    command = ["env", f"RAY_ADDRESS={check.address}", *command]
    running = check.start(command, check.directory / f"{name}.log")
    check.until_step(name, running, 1)
    here = [part for part in ("EngineCore", "LearnerProcess") if any(processes(part))]
    done = running.wait()
    require(done)
    if check.device == "cuda" and len(here) != 1:
        raise CheckFailed(f"of engines and learner this node had {' and '.join(here) or 'neither'}")
    return learned(check.measured(name, done))
