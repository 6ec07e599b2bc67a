"""The first hour on a machine with GPUs, as one command: `python -m benchmarks.gpu_check [STAGE
...] [--device cpu] [--dir DIRECTORY] [--model PATH]`.

Stages run one after the other, each in processes of its own, with a deadline of ten minutes, and
when the memory of the one before is free; one that fails does not keep the others from running. At
the end comes one table, and one file, `gpu-check.json`, with the table, the machine, and the last
lines of every stage that failed. Nothing here needs MLflow, Ray's dashboard or the hub; with
`--model` the stage one_gpu takes a real model.

    tests            the tests marked `gpu`
    ipc              the quickstart, engine and learner on one GPU        float32, and in bfloat16
    one_gpu          configs/gsm8k_1gpu.yaml: tokens per second, MFU, memory, publications
    nccl             the quickstart, engine and learner on two GPUs
    senders          the same with two learner ranks that both send, and a gigabyte of theirs,
                     compared bit by bit                                  (four GPUs)
    kill             an engine is killed: the run goes on
    resume           a run is stopped by a signal and continued
    tensor_parallel  an engine of two GPUs answers the problems of `ipc`
    zero3            the quickstart on two learner ranks with ZeRO-3

`--device cpu` runs the same commands, smaller, on a machine without a GPU: it tests this script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.machine import Memory, gpus, smi, until_free, used_mib
from benchmarks.harness import ROOT, machine

LIMIT_S = 600.0
TAIL = 60
_SELF_CHECK = re.compile(r"by at most ([\d.e+-]+) \(the test moved them by ([\d.]+)\)")


class CheckFailed(Exception):
    """What a stage found wrong, in a sentence."""


@dataclass(frozen=True)
class Done:
    """A command that has ended: exit code (124: the deadline), seconds, output."""

    code: int
    seconds: float
    output: str


@dataclass
class Result:
    """A stage: `passed`, `failed` or `left out`; what it measured or why it did not."""

    stage: str
    outcome: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tail: list[str] = field(default_factory=list)


class Running:
    """A command in a process group of its own, which is killed at its deadline."""

    def __init__(self, command: Sequence[str], log: Path, *, limit_s: float = LIMIT_S) -> None:
        self._log, self._started, self._limit_s = log, time.monotonic(), limit_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> Done:
        """Wait for the end, or the deadline."""
        left = self._limit_s - (time.monotonic() - self._started)
        try:
            code = self.process.wait(max(0.1, left))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            code = 124
        seconds = time.monotonic() - self._started
        return Done(code, seconds, self._log.read_text(encoding="utf-8", errors="replace"))


class Check:
    """What stages share: the device, where they write, and the commands that they run."""

    def __init__(self, *, device: str, directory: Path, model: str | None = None) -> None:
        self.device, self.directory, self.model = device, directory, model
        self.start: Callable[..., Running] = Running
        self.steps = 30 if device == "cuda" else 4
        self.used_mib = used_mib()

    def command(self, name: str, command: Sequence[str]) -> Done:
        """Run a command; its output is kept in `NAME.log`."""
        return self.start(command, self.directory / f"{name}.log").wait()

    def train(self, name: str, config: str, *settings: str) -> dict[str, Any]:
        """Run a configuration to its end; what it printed and measured."""
        done = self.command(name, self.run_command(name, config, *settings))
        require(done)
        return self.measured(name, done)

    def run_command(self, name: str, config: str, *settings: str) -> list[str]:
        """Write the command of a run, without what a bare machine may lack."""
        common = [
            f"run.dir={self.run_dir(name)}",
            f"cluster.device={self.device}",
            "tracking.mlflow=false",
            "evaluation.max_samples=100",
            f"model.warm_start.cache_dir={self.directory / 'warm_start'}",
        ]
        if self.model_of(settings):
            common.pop()
        return [sys.executable, "-m", "async_grpo.run", config, *common, *settings]

    @staticmethod
    def model_of(settings: Sequence[str]) -> bool:
        """Whether the settings name a model, so that there is no warm start."""
        return any(one.startswith("model.path=") for one in settings)

    def run_dir(self, name: str) -> Path:
        """The run directory of a stage."""
        return self.directory / "runs" / name

    def measured(self, name: str, done: Done) -> dict[str, Any]:
        """Figures of a run: its self-check, and the last metrics of each name."""
        figures: dict[str, Any] = {"seconds": round(done.seconds, 1)}
        if found := _SELF_CHECK.search(done.output):
            figures["self_check_error"] = float(found[1])
            figures["self_check_moved"] = float(found[2])
        figures["metrics"] = self.metrics(name)
        return figures

    def lines(self, name: str) -> list[dict[str, float]]:
        """What a run has logged so far."""
        path = self.run_dir(name) / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def metrics(self, name: str) -> dict[str, float]:
        """The last value of every metric of a run."""
        latest: dict[str, float] = {}
        for line in self.lines(name):
            latest |= line
        return latest

    def per_second(self, name: str, counter: str) -> float:
        """How fast a counter rose between the first and the last line of steps that have it."""
        seen = [line for line in self.lines(name) if counter in line and "train/loss" in line]
        if len(seen) < 2:
            return 0.0
        first, last = seen[0], seen[-1]
        return (last[counter] - first[counter]) / max(1e-9, last["time"] - first["time"])

    def until_step(self, name: str, running: Running, step: int) -> None:
        """Wait until a run has trained `step`. Raises CheckFailed when it ends before."""
        deadline = time.monotonic() + LIMIT_S / 2
        while self.metrics(name).get("replay/steps", 0) < step:
            if running.process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"the run did not reach step {step}")
            time.sleep(0.5)


def require(done: Done, *, code: int = 0) -> None:
    """Raise CheckFailed for another exit code."""
    if done.code != code:
        last = next((line for line in reversed(done.output.splitlines()) if line.strip()), "")
        what = "did not end in time" if done.code == 124 else f"ended with exit code {done.code}"
        raise CheckFailed(f"the command {what}: {last.strip()[:200]}")


QUICKSTART = "configs/quickstart.yaml"


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
    shared = ["cluster.layout=colocated", "weight_sync.backend=ipc"]
    figures: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        found = check.train(
            f"ipc-{dtype}",
            QUICKSTART,
            f"run.total_steps={check.steps}",
            f"model.dtype={dtype}",
            *(shared if check.device == "cuda" else []),
        )
        figures |= {f"{dtype} {name}": value for name, value in learned(found).items()}
    return figures


def nccl(check: Check) -> dict[str, Any]:
    """Train the quickstart with engine and learner on GPUs of their own."""
    apart = ["cluster.layout=split", "weight_sync.backend=nccl"]
    return learned(
        check.train("nccl", QUICKSTART, f"run.total_steps={check.steps}", *for_gpus(check, apart))
    )


def senders(check: Check) -> dict[str, Any]:
    """Train with two learner ranks that both send, and two engines; then let two ranks send more,
    and unverified.
    """
    apart = ["cluster.layout=split", "weight_sync.backend={name: nccl, senders: every_rank}"]
    figures = learned(
        check.train(
            "senders",
            QUICKSTART,
            f"run.total_steps={check.steps}",
            "learner.ranks=2",
            "model.dtype=bfloat16" if check.device == "cuda" else "model.dtype=float32",
            *for_gpus(check, apart),
        )
    )
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


def last_json(done: Done) -> dict[str, Any]:
    """The last line of a command's output that is JSON; nothing where there is none."""
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def for_gpus(check: Check, settings: list[str]) -> list[str]:
    """The settings on GPUs, none on CPU."""
    return settings if check.device == "cuda" else []


def one_gpu(check: Check) -> dict[str, Any]:
    """Train `gsm8k_1gpu` for a few steps: a random model of its shape, and arithmetic, where no
    model is given.
    """
    name, steps = "one_gpu", 6 if check.device == "cuda" else 3
    model = check.model or str(write_random_model(check))
    settings = [
        f"run.total_steps={steps}",
        f"model.path={model}",
        "task.name=arithmetic",
        "task.train=null",
        "task.eval=null",
        "replay.filter_groups.enable=false",
        "evaluation.every_steps=0",
        "evaluation.before=false",
        "checkpoint.every_steps=0",
    ]
    if check.device == "cpu":
        settings += [
            "weight_sync.backend=auto",
            "cluster.layout=auto",
            "cluster.engine.kv_cache_gb=0.25",
            "rollout.rollout_batch_size=4",
            "rollout.prompt_length=16",
            "rollout.response_length=16",
            "learner.ppo_mini_batch_size=2",
        ]
    with Memory() as memory:
        figures = check.train(name, "configs/gsm8k_1gpu.yaml", *settings)
    return figures | throughput(check, figures.pop("metrics"), model, memory.peak)


def throughput(
    check: Check, metrics: dict[str, float], model: str, peak_mib: float
) -> dict[str, Any]:
    """Say what the run of `one_gpu` came to: its last rates, and its memory beside the estimate."""
    from async_grpo.config.load import load_config
    from async_grpo.rollout.engine.choice import ENGINE
    from async_grpo.run.preflight.memory import engine_memory, learner_memory, shape_of

    config = load_config(check.run_dir("one_gpu") / "config.yaml")
    shape = shape_of(config, model)
    backend = "ipc" if check.device == "cuda" else "shared_memory"
    rank = learner_memory(config, shape, device=check.device, stage=1, backend=backend).total
    gib = ENGINE.kv_cache_gb(config, device=check.device, backend=backend)
    engine = engine_memory(config, shape, device=check.device, kv_cache_gb=gib)
    estimate = rank + engine.weights + (engine.kv_cache or 0) + engine.rest
    # the metric is the mean of an update, and the step's tokens are divided among its updates
    updates = config.rollout.rollout_batch_size // config.mini_batch_groups
    update_s = max(metrics["time/learner_update"], 1e-9)
    trained = metrics["rollout/response_tokens"] / updates / update_s
    nbytes = shape.parameters * (2 if check.device == "cuda" else 4)
    figures = {
        "parameters": shape.parameters,
        "learner_tokens_per_s": round(trained),
        "run_tokens_per_s": round(metrics["train/tokens_per_s"]),
        "engine_tokens_per_s": round(check.per_second("one_gpu", "goodput/generated")),
        "publication_gb_per_s": round(nbytes / 1e9 / max(metrics["weights/until_live_s"], 1e-9), 2),
        "memory_estimate_mib": round(estimate / 2**20),
    }
    if peak_mib:
        figures["memory_peak_mib"] = round(peak_mib)
    here = gpus()
    if here and here[0].peak_flops:
        figures["learner_mfu"] = round(6 * shape.parameters * trained / here[0].peak_flops, 3)
    return figures


def write_random_model(check: Check) -> Path:
    """Write a model of Qwen2.5-0.5B's shape, with random weights and a tokenizer for
    arithmetic.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from async_grpo.contrib.warm_start.model import build_tokenizer
    from async_grpo.tools.check.known_models import known_config

    directory = check.directory / "random_model"
    if (directory / "config.json").is_file():
        return directory
    config = known_config("Qwen/Qwen2.5-0.5B")
    if check.device == "cpu":
        config = Qwen2Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    assert config is not None
    tokenizer = build_tokenizer()
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    dtype = torch.bfloat16 if check.device == "cuda" else torch.float32
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


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
    settings = ["learner.ranks=2", "learner.zero_stage=3", f"run.total_steps={check.steps}"]
    if check.device == "cuda":
        settings += ["model.dtype=bfloat16", "cluster.layout=colocated"]
    return learned(check.train("zero3", QUICKSTART, *settings))


def kill(check: Check) -> dict[str, Any]:
    """Kill the process of an engine while a run trains; the run must go on to its end."""
    command = check.run_command("kill", QUICKSTART, f"run.total_steps={10 * check.steps}")
    running = check.start(command, check.directory / "kill.log")
    check.until_step("kill", running, 2)
    os.kill(engine_process(running.process.pid), signal.SIGKILL)
    done = running.wait()
    require(done)
    metrics = check.metrics("kill")
    if not metrics.get("cluster/restarts"):
        raise CheckFailed("no engine was started again: the run did not notice")
    return {"restarts": metrics["cluster/restarts"], "steps": metrics["replay/steps"]}


def engine_process(pid: int) -> int:
    """Find the process of an engine below a run. Raises CheckFailed where there is none."""
    import psutil

    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        text = " ".join([process.info["name"] or "", *(process.info["cmdline"] or [])])
        if "EngineCore" in text and pid in [parent.pid for parent in process.parents()]:
            return int(process.info["pid"])
    raise CheckFailed("the run has no process that is called EngineCore")


def resume(check: Check) -> dict[str, Any]:
    """Stop a run by a signal, and continue it."""
    steps = 10 * check.steps
    command = check.run_command("resume", QUICKSTART, f"run.total_steps={steps}")
    running = check.start(command, check.directory / "resume-first.log")
    check.until_step("resume", running, 2)
    running.process.send_signal(signal.SIGTERM)
    require(running.wait())
    stopped = check.metrics("resume")["replay/steps"]
    done = check.command("resume", command)
    require(done)
    if "resumed" not in done.output:
        raise CheckFailed("the second run did not resume the first")
    return {"stopped at": stopped, "ended at": check.metrics("resume")["replay/steps"]}


@dataclass(frozen=True)
class Stage:
    """A stage and the GPUs that it needs."""

    work: Callable[[Check], dict[str, Any]]
    gpus: int = 1


STAGES = {
    "tests": Stage(gpu_tests),
    "ipc": Stage(ipc),
    "one_gpu": Stage(one_gpu),
    "nccl": Stage(nccl, gpus=2),
    "senders": Stage(senders, gpus=4),
    "kill": Stage(kill),
    "resume": Stage(resume),
    "tensor_parallel": Stage(tensor_parallel, gpus=2),
    "zero3": Stage(zero3, gpus=2),
}


def run_stage(name: str, check: Check, found: int) -> Result:
    """Run a stage, whatever becomes of it. found: GPUs of this machine."""
    stage = STAGES[name]
    if check.device == "cuda" and found < stage.gpus:
        reason = f"needs {stage.gpus} GPU{'s' * (stage.gpus > 1)}, there {'is' * (found == 1)}"
        return Result(name, "left out", 0.0, reason=f"{reason}{'are' * (found != 1)} {found}")
    left = until_free(check.used_mib)
    started = time.monotonic()
    try:
        figures = stage.work(check)
        if left:
            figures["memory_left_by_others_mib"] = round(left)
    except Exception as error:  # noqa: BLE001 - the others go on
        text = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        return Result(
            name, "failed", time.monotonic() - started, reason=text, tail=tails(check, name)
        )
    return Result(name, "passed", time.monotonic() - started, figures)


def tails(check: Check, name: str) -> list[str]:
    """The last lines of what a stage printed."""
    lines: list[str] = []
    for log in sorted(check.directory.glob(f"{name}*.log")):
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
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.stages if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    here = gpus()
    if arguments.device == "cuda" and not here:
        parser.error("nvidia-smi shows no GPU on this machine; --device cpu tests the script")
    directory = arguments.dir / time.strftime("%Y%m%d-%H%M%S")
    check = Check(device=arguments.device, directory=directory.absolute(), model=arguments.model)
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
