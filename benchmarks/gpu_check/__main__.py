"""The first hour on a machine with GPUs, as one command: `python -m benchmarks.gpu_check [STAGE
...] [--device cpu] [--dir DIRECTORY] [--model PATH] [--address ADDRESS]`.

Stages run one after the other, those that tell most first, each in processes of its own, with a
deadline of ten minutes a command, and when the memory of the one before is free; one that fails
does not keep the others from running. At the end comes one table, and one file, `gpu-check.json`,
with the table, the machine, and the last lines of every stage that failed. Nothing here needs
MLflow, Ray's dashboard or the hub; with `--model` the stage one_gpu takes a real model.

`--device cpu` runs the same commands, smaller, on a machine without a GPU: it tests this script.
`two_nodes --address ADDRESS` joins a Ray cluster that runs; `--dir` must be storage of both nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import faults, sizes, training
from benchmarks.gpu_check.check import TAIL, Check, CheckFailed, LeftOut, Result
from benchmarks.gpu_check.machine import gpus, smi, until_free
from benchmarks.harness import ROOT, machine


@dataclass(frozen=True)
class Stage:
    """A stage, the GPUs that it needs, and why it cannot run on CPU."""

    work: Callable[[Check], dict[str, Any]]
    gpus: int = 1
    not_on_cpu: str = ""


STAGES = {
    "tests": Stage(training.gpu_tests),
    "ipc": Stage(training.ipc),
    "one_gpu": Stage(sizes.one_gpu),
    "nccl": Stage(training.nccl, gpus=2),
    "changes": Stage(training.changes, gpus=2),
    "seven_b": Stage(sizes.seven_b),
    "senders": Stage(training.senders, gpus=4),
    "kill": Stage(faults.kill),
    "resume": Stage(faults.resume),
    "tensor_parallel": Stage(training.tensor_parallel, gpus=2),
    "kill_publishing": Stage(faults.kill_publishing, gpus=3),
    "resume_ranks": Stage(faults.resume_ranks, gpus=2),
    "long_rows": Stage(sizes.long_rows),
    "compile": Stage(sizes.compiled),
    "lora": Stage(training.lora),
    "adapters": Stage(training.adapters),
    "zero3": Stage(training.zero3, gpus=2),
    "evaluation": Stage(training.evaluation),
    "offload": Stage(training.offload),
    "fp8": Stage(training.fp8, not_on_cpu="vLLM computes in fp8 on GPUs only"),
    "two_nodes": Stage(training.two_nodes),
}


def run_stage(name: str, check: Check, found: int) -> Result:
    """Run a stage, whatever becomes of it. found: GPUs of this machine."""
    stage = STAGES[name]
    if check.device == "cuda" and found < stage.gpus:
        reason = f"needs {stage.gpus} GPU{'s' * (stage.gpus > 1)}, there {'is' * (found == 1)}"
        return Result(name, "left out", 0.0, reason=f"{reason}{'are' * (found != 1)} {found}")
    if check.device == "cpu" and stage.not_on_cpu:
        return Result(name, "left out", 0.0, reason=stage.not_on_cpu)
    left = until_free(check.used_mib)
    started = time.monotonic()
    try:
        figures = stage.work(check)
        if left:
            figures["memory_left_by_others_mib"] = round(left)
    except LeftOut as error:
        return Result(name, "left out", 0.0, reason=str(error))
    except Exception as error:  # noqa: BLE001 - the others go on
        text = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        return Result(
            name, "failed", time.monotonic() - started, reason=text, tail=tails(check, name)
        )
    return Result(name, "passed", time.monotonic() - started, figures)


def tails(check: Check, name: str) -> list[str]:
    """The last lines of what a stage printed."""
    lines: list[str] = []
    own = check.directory / f"{name}.log"
    for log in sorted(filter(Path.is_file, [own, *check.directory.glob(f"{name}-*.log")])):
        text = log.read_text(encoding="utf-8", errors="replace")
        lines += [f"-- {log.name}", *text.splitlines()[-TAIL:]]
    return lines


def table(results: Sequence[Result]) -> list[str]:
    """The stages as a table."""
    lines = ["| stage | | seconds | figures |", "|---|---|---|---|"]
    for one in results:
        shown = one.reason or ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in one.figures.items()
        )
        lines.append(f"| {one.stage} | {one.outcome} | {one.seconds:.0f} | {shown} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a stage failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Check a machine with GPUs, in stages."
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "gpu-check")
    parser.add_argument("--model", help="of the stage one_gpu, in place of a random one")
    parser.add_argument("--address", help="of the Ray cluster of two nodes of the stage two_nodes")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.stages if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    here = gpus()
    if arguments.device == "cuda" and not here:
        parser.error("nvidia-smi shows no GPU on this machine; --device cpu tests the script")
    directory = arguments.dir / time.strftime("%Y%m%d-%H%M%S")
    check = Check(
        device=arguments.device,
        directory=directory.absolute(),
        model=arguments.model,
        address=arguments.address,
    )
    directory.mkdir(parents=True)
    about = f"{machine('torch', 'vllm', 'deepspeed', 'ray', 'transformers')}; " + (
        ", ".join(map(str, here)) or "no GPU"
    )
    print(about, flush=True)
    results = []
    for name in arguments.stages or STAGES:
        print(f"{name} ...", flush=True)
        results.append(run_stage(name, check, len(here)))
        print(f"{name}: {results[-1].outcome} {results[-1].reason}".rstrip(), flush=True)
        kept = {"machine": about, "gpus": smi("index,name,driver_version,memory.total")}
        text = json.dumps(kept | {"stages": [asdict(one) for one in results]}, indent=1)
        (directory / "gpu-check.json").write_text(text + "\n", encoding="utf-8")
    print("", *table(results), "", f"one file to send: {directory / 'gpu-check.json'}", sep="\n")
    return int(any(one.outcome == "failed" for one in results))


if __name__ == "__main__":
    sys.exit(main())
