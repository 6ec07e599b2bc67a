"""The script of `make gpu-check`: its stages on doubles of the commands, so that it does not fail
on a machine with GPUs for a reason of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.config.load import dump, load_config
from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import check as gpu_commands
from benchmarks.gpu_check import machine as gpu_machine
from benchmarks.gpu_check import models, sizes, training
from benchmarks.gpu_check.__main__ import STAGES, run_stage
from benchmarks.gpu_check.check import Check, CheckFailed, Result, Running
from benchmarks.gpu_check.machine import Gpu, Memory, number, until_free, visible

PRINTED = (
    "weights arrive: after a test weight sync the engines' log-probs differ from the learner's by "
    "at most 1.1e-02 (the test moved them by 0.16)\nresumed the journal at step 7\n"
)
LINE = {
    "eval/seconds": 3.0,
    "eval/learner_waited_s": 0.0,
    "rollout/response_length": 12_000.0,
    "time/train": 4.0,
    "train/grad_norm": 0.3,
    "train/entropy": 6.0,
    "weights/dropped_engines": 1.0,
    "eval/accuracy_greedy": 0.5,
    "train/tokens_per_s": 900.0,
    "train/loss": 0.1,
    "weights/sampler_error": 0.01,
    "weights/until_live_s": 0.5,
    "rollout/response_tokens": 4000.0,
    "time/learner_update": 2.0,
    "cluster/restarts": 1.0,
}
SENT = {"failed": "", "gb": 1.0, "gb_per_s": 20.0}


class Commands:
    """Stands for the commands: notes them, checks that a configuration is one, and writes what a
    run would have left.
    """

    def __init__(self, *, code: int = 0, lines: list[dict[str, float]] | None = None) -> None:
        self.seen: list[list[str]] = []
        self.wrong_pieces = 0
        self._code = code
        self._lines = lines or [
            LINE | {"replay/steps": float(step), "goodput/generated": 100.0 * step, "time": step}
            for step in (1, 11, 21)
        ]
        self.compiled_loss = 0.1

    def __call__(self, command: Sequence[str], log: Path, **_: Any) -> Any:
        if command[0] == "env":
            self.environment, command = command[1], command[2:]
        self.seen.append(list(command))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(PRINTED, encoding="utf-8")
        output = PRINTED
        if "async_grpo.run" in command:
            settings = list(command[command.index("async_grpo.run") + 1 :])
            self._run(gpu_commands.ROOT / settings[0], settings[1:], self._lines)
        elif "retrain" in command:
            source, *settings = command[command.index("retrain") + 1 :]
            loss = self.compiled_loss if "learner.compile=true" in settings else 0.1
            lines = [line | {"train/loss": loss} for line in self._lines]
            self._run(Path(source) / "config.yaml", settings, lines)
        elif "benchmarks.gpu_check.models" in command:
            directory = Path(command[command.index("benchmarks.gpu_check.models") + 2])
            models.write("tiny", directory, device="cpu")
        elif "eval" in command:
            output = 'evaluating ...\n{"eval/accuracy_greedy": 0.5}\n'
        elif "benchmarks.gpu_check.senders" in command:
            output = f"Loading\n{json.dumps(SENT | {'wrong_pieces': self.wrong_pieces})}\n"
        elif "pytest" in command:
            output = "...\n12 passed, 3 deselected in 4.00s\n"
        return Ended(self._code, output)

    def _run(self, recipe: Path, settings: list[str], lines: list[dict[str, float]]) -> None:
        config = load_config(recipe, settings)
        directory = Path(config.run.dir)
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
        (directory / "config.yaml").write_text(dump(config), encoding="utf-8")


class Ended:
    """A command that has ended as soon as it began; its process takes signals."""

    def __init__(self, code: int, output: str) -> None:
        self._done = gpu_commands.Done(code, 1.5, output)
        self.process = self
        self.pid = os.getpid()
        self.signals: list[int] = []

    def wait(self) -> gpu_commands.Done:
        return self._done

    def poll(self) -> None: ...

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def check_of(tmp_path: Path, commands: Commands, *, device: str = "cuda") -> Check:
    check = Check(device=device, directory=tmp_path)
    check.start, check.pause = commands, lambda seconds: None
    return check


@pytest.fixture
def engine() -> Iterator[Callable[[], Any]]:
    """Start a process that is called like an engine's, below this one."""
    started = []

    def start() -> Any:
        code = "import time; time.sleep(600)"
        started.append(subprocess.Popen([sys.executable, "-c", code, "EngineCore"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`nvidia-smi` of a machine with so many GPUs of this memory."""

    def describe(count: int, mib: int) -> None:
        answers = {
            "name,memory.total": [f"NVIDIA H100 80GB HBM3, {mib}"] * count,
            "memory.used": ["70000", "1"][:count],
        }
        for module in (gpu_check, gpu_machine):
            monkeypatch.setattr(module, "smi", lambda fields: answers.get(fields, ["0, x"]))

    return describe


def settings_of(command: list[str]) -> dict[str, str]:
    return dict(one.split("=", 1) for one in command if "=" in one)


Machine = Callable[[int, int], None]
Engine = Callable[[], Any]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_stage_passes_where_its_commands_do(
    tmp_path: Path,
    device: str,
    engine: Engine,
    machine_of: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With configurations that are valid, and every figure that the table promises."""
    machine_of(8, 81559)
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    monkeypatch.setattr(training, "processes", lambda called: [1] * (called == "EngineCore"))
    commands = Commands()
    check = check_of(tmp_path, commands, device=device)
    check.address = "10.0.0.1:6379"
    results = {}
    for name in STAGES:
        victim = engine() if name.startswith("kill") else None
        results[name] = run_stage(name, check, 8)
        assert victim is None or victim.wait(10) == -9, "the engine was not killed"
    left_out = {"fp8"} if device == "cpu" else set()
    assert {name for name, one in results.items() if one.outcome == "left out"} == left_out
    passed = {name: one for name, one in results.items() if name not in left_out}
    assert {name: one.reason for name, one in passed.items() if one.outcome != "passed"} == {}
    figures = {name: one.figures for name, one in results.items()}
    assert figures["ipc"]["bfloat16 self_check_error"] == 0.011
    assert figures["ipc"]["float32 accuracy"] == 0.5
    # 4,000 tokens in two updates of 2 s each
    assert figures["one_gpu"]["learner_tokens_per_s"] == 1000
    assert figures["senders"]["gb_per_s"] == 20.0
    assert figures["one_gpu"]["engine_tokens_per_s"] == 100
    assert figures["one_gpu"]["memory_peak_mib"] == "70000 / 1"
    assert figures["one_gpu"]["learner_mfu"] >= 0
    assert figures["seven_b"]["trained"] == ("all weights" if device == "cuda" else "adapters")
    assert figures["kill"] == {"restarts": 1.0, "steps": 21.0}
    assert figures["kill_publishing"]["dropped_engines"] == 1.0
    # 8,000 tokens of the two steps after the first, in 4 s each
    assert figures["compile"]["tokens_per_s"] == figures["compile"]["tokens_per_s off"] == 1000
    assert (figures["compile"]["first_step_s"], figures["compile"]["difference"]) == (4.0, 0.0)
    assert figures["long_rows"]["response_tokens"] == 12_000
    assert figures["long_rows"]["memory_peak_mib"] == 70000
    assert figures["evaluation"]["evaluations"] == 3
    assert commands.environment == "RAY_ADDRESS=10.0.0.1:6379"
    lines = gpu_check.table(list(results.values()))
    assert len(lines) == 2 + len(STAGES) and all(line.startswith("|") for line in lines)
    if device == "cuda":
        by_backend = [settings_of(one).get("weight_sync.backend") for one in commands.seen]
        assert {"ipc", "nccl"} <= set(by_backend)
        assert not list((tmp_path / "models").glob("*7B*")), "tens of gigabytes are left"
        ranks = [settings_of(one).get("learner.ranks") for one in commands.seen]
        assert "8" in ranks, "the learner does not fill its node"


@pytest.mark.parametrize(
    ("gpus", "mib", "free_gb", "trained"),
    [
        (8, 81559, 1000, "all weights"),
        (8, 81559, 100, "adapters"),  # a checkpoint of all weights has no room on the disk
        (2, 81559, 1000, "adapters"),
        (1, 81559, 1000, "adapters"),
        (1, 24576, 1000, "needs about"),
        (1, 81559, 20, "GB of disk"),
    ],
)
def test_a_7b_model_is_trained_as_the_machine_allows(
    tmp_path: Path,
    machine_of: Machine,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    mib: int,
    free_gb: int,
    trained: str,
) -> None:
    machine_of(gpus, mib)
    free = SimpleNamespace(free=free_gb * 1e9)
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda _: free)
    commands = Commands()
    result = run_stage("seven_b", check_of(tmp_path, commands), gpus)
    if result.outcome == "left out":
        assert trained in result.reason and not commands.seen
    else:
        assert result.figures["trained"] == trained, result
        [run] = [settings_of(one) for one in commands.seen if "async_grpo.run" in one]
        assert run.get("model.lora") == (None if trained == "all weights" else "{}")


def test_what_compilation_changes_beyond_rounding_fails_the_stage(tmp_path: Path) -> None:
    commands = Commands()
    commands.compiled_loss = 0.2
    result = run_stage("compile", check_of(tmp_path, commands), 1)
    assert "differ by 0.1 from those without compilation" in result.reason
    commands.compiled_loss = 0.1 + 1e-2
    assert run_stage("compile", check_of(tmp_path, commands), 1).outcome == "passed"
    on_cpu = run_stage("compile", check_of(tmp_path / "cpu", commands, device="cpu"), 0)
    assert on_cpu.outcome == "failed", "float32 is closer"


def test_a_stage_that_cannot_run_here_is_left_out(tmp_path: Path) -> None:
    commands = Commands()
    check = check_of(tmp_path, commands, device="cpu")
    assert "on GPUs only" in run_stage("fp8", check, 0).reason
    result = run_stage("two_nodes", check, 0)
    assert (result.outcome, commands.seen) == ("left out", [])
    assert "--address ADDRESS" in result.reason


@pytest.mark.parametrize(
    ("here", "said"), [([], "neither"), (["EngineCore", "LearnerProcess"], "and")]
)
def test_learner_and_engines_have_a_node_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str], said: str
) -> None:
    check = check_of(tmp_path, Commands())
    check.address = "10.0.0.1:6379"
    monkeypatch.setattr(training, "processes", lambda called: [1] * (called in here))
    result = run_stage("two_nodes", check, 2)
    assert result.outcome == "failed" and said in result.reason


def test_a_run_is_resumed_with_fewer_ranks_in_bfloat16(tmp_path: Path) -> None:
    commands = Commands()
    assert run_stage("resume_ranks", check_of(tmp_path, commands), 2).outcome == "passed"
    first, second = map(settings_of, commands.seen)
    assert (first.pop("learner.ranks"), second.pop("learner.ranks")) == ("2", "1")
    assert first["model.dtype"] == second["model.dtype"] == "bfloat16"
    # 30 more than it had when it was stopped
    assert (first["run.total_steps"], second["run.total_steps"]) == ("300", "51")
    assert first["run.dir"] == second["run.dir"]


def test_an_engine_stands_still_when_it_is_killed_in_a_publication(
    tmp_path: Path, engine: Engine
) -> None:
    victim, states = engine(), []
    check = check_of(tmp_path, Commands())

    def pause(seconds: float) -> None:
        deadline = time.monotonic() + 10
        stat = Path(f"/proc/{victim.pid}/stat")
        while stat.read_text().split()[2] != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        states.append((seconds, stat.read_text().split()[2]))

    check.pause = pause
    assert run_stage("kill_publishing", check, 3).outcome == "passed"
    assert states == [(15.0, "T")] and victim.wait(10) == -9


def test_stages_without_their_gpus_are_left_out(tmp_path: Path) -> None:
    check = check_of(tmp_path, Commands())
    assert run_stage("senders", check, 1).reason == "needs 4 GPUs, there is 1"
    assert run_stage("nccl", check, 1).outcome == "left out"
    assert run_stage("kill", check, 0).reason == "needs 1 GPU, there are 0"


@pytest.mark.parametrize(("code", "said"), [(3, "exit code 3"), (124, "did not end in time")])
def test_a_stage_that_fails_says_why_and_keeps_its_output(
    tmp_path: Path, code: int, said: str
) -> None:
    result = run_stage("ipc", check_of(tmp_path, Commands(code=code)), 1)
    assert result.outcome == "failed" and said in result.reason
    assert result.tail[0] == "-- ipc-float32.log" and "weights arrive" in result.tail[1]


def test_what_should_have_happened_is_asked_for(tmp_path: Path, engine: Engine) -> None:
    line = LINE | {"cluster/restarts": 0.0, "replay/steps": 9.0, "rollout/response_length": 9.0}
    engine()
    check = check_of(tmp_path, Commands(lines=[line]))
    assert "the run did not notice" in run_stage("kill", check, 1).reason
    assert "there was none during training" in run_stage("evaluation", check, 1).reason
    assert "responses have 9 tokens, of 15872" in run_stage("long_rows", check, 1).reason
    assert "1 steps were trained again" in run_stage("compile", check, 1).reason
    missed = Commands(lines=[LINE | {"weights/dropped_engines": 0.0, "replay/steps": 9.0}])
    engine()
    missed = check_of(tmp_path / "missed", missed)
    assert "no publication was under way" in run_stage("kill_publishing", missed, 3).reason
    assert "left no checkpoint" in run_stage("tensor_parallel", check, 2).reason
    early = check_of(tmp_path / "early", Commands(lines=[LINE | {"replay/steps": 0.0}]))
    early.until_step = ended  # type: ignore[method-assign]
    assert run_stage("resume", early, 1).reason == "the run did not reach step 2"


def ended(*_: Any) -> None:
    raise CheckFailed("the run did not reach step 2")


def test_other_bits_than_were_sent_fail_the_stage(tmp_path: Path) -> None:
    commands = Commands(code=1)
    commands.wrong_pieces = 3
    check = check_of(tmp_path, commands)
    check.train = lambda *_: {"metrics": {}}  # type: ignore[method-assign]
    assert "3 pieces arrived with other bits" in run_stage("senders", check, 4).reason


def test_a_bug_in_a_stage_is_a_failed_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(check: Check) -> dict[str, Any]:
        raise KeyError("x")

    monkeypatch.setitem(STAGES, "ipc", gpu_check.Stage(work))
    result = run_stage("ipc", check_of(tmp_path, Commands()), 1)
    assert (result.outcome, result.reason) == ("failed", "KeyError: 'x'")


def test_a_command_ends_at_its_deadline_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    running = Running([sys.executable, "-c", code], tmp_path / "log", limit_s=2.0)
    done = running.wait()
    assert done.code == 124 and done.seconds < 20
    child = int(done.output.split()[0])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_a_run_that_ends_early_is_not_waited_for(tmp_path: Path) -> None:
    running = Running([sys.executable, "-c", "pass"], tmp_path / "log")
    running.process.wait(30)
    with pytest.raises(CheckFailed, match="did not reach step 2"):
        Check(device="cpu", directory=tmp_path).until_step("none", running, 2)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    check = Check(device="cpu", directory=tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text('{"x": 1}\n{"x": 2, "y')
    assert check.metrics("a") == {"x": 1}


def test_the_peak_of_known_gpus() -> None:
    assert Gpu("NVIDIA H100 80GB HBM3", 81559).peak_flops == 989e12
    assert Gpu("NVIDIA A100-SXM4-80GB", 81920).peak_flops == 312e12
    assert Gpu("Something else", 1).peak_flops is None


def test_only_visible_gpus_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script stands for `nvidia-smi`, and says what it was asked for."""
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\necho "$*, 81559"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    [everyone] = gpu_machine.gpus()
    assert "--id" not in everyone.name and everyone.total_mib == 81559
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    [ours] = gpu_machine.gpus()
    assert ours.name.endswith("--id=2,5")
    for none in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert gpu_machine.gpus() == []
    assert visible("0, GPU-8a,-1,3") == ["0", "GPU-8a"]


def test_memory_that_a_gpu_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert number(" [N/A]") is None and number(" 81559") == 81559
    answers = {"name,memory.total": ["NVIDIA GB10, [N/A]"], "memory.used": ["[N/A]"]}
    monkeypatch.setattr(gpu_machine, "smi", lambda fields: answers[fields])
    [gpu] = gpu_machine.gpus()
    assert gpu == Gpu("NVIDIA GB10", None) and str(gpu) == "NVIDIA GB10 (memory unknown)"
    with Memory() as memory:
        pass
    assert memory.peaks == [0]
    assert until_free([0.0]) == 0


def test_a_stage_begins_when_the_memory_of_the_one_before_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = [["10", "3"], ["10", "60000"], ["10", "9000"], ["100", "400"]]
    monkeypatch.setattr(
        gpu_machine, "smi", lambda _: readings.pop(0) if len(readings) > 1 else readings[0]
    )
    before = gpu_machine.used_mib()
    assert until_free(before, pause_s=0.0) == 0 and readings == [["100", "400"]]
    readings[:] = [["10", "5003"]]
    assert until_free(before, limit_s=0.05, pause_s=0.01) == 5000
    check = check_of(tmp_path, Commands())
    check.used_mib = before
    monkeypatch.setattr(gpu_check, "until_free", lambda held: held[1])
    monkeypatch.setitem(STAGES, "ipc", gpu_check.Stage(lambda _: {}))
    assert run_stage("ipc", check, 1).figures == {"memory_left_by_others_mib": 3}


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu_machine.gpus():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([])
    assert ended.value.code == 2
    assert "nvidia-smi shows no GPU on this machine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_check.main(["ipx", "--device", "cpu"])
    assert "there is no stage 'ipx'" in capsys.readouterr().err


def test_table_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stage(name: str, check: Check, found: int) -> Result:
        passed = name == "kill"
        return Result(name, "passed" if passed else "failed", 2.0, {"restarts": 1.0}, tail=["t"])

    monkeypatch.setattr(gpu_check, "run_stage", stage)
    arguments = ["kill", "resume", "--device", "cpu", "--dir", str(tmp_path)]
    assert gpu_check.main(arguments) == 1
    [file] = tmp_path.glob("*/gpu-check.json")
    written = json.loads(file.read_text())
    assert [one["outcome"] for one in written["stages"]] == ["passed", "failed"]
    printed = capsys.readouterr().out
    assert "| kill | passed | 2 | restarts 1 |" in printed and str(file) in printed


def test_memory_is_the_highest_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [["100"], ["900"], ["200"]]
    seen = threading.Event()

    def smi(fields: str) -> list[str]:
        if len(readings) == 1:
            seen.set()
            return readings[0]
        return readings.pop(0)

    monkeypatch.setattr(gpu_machine, "smi", smi)
    with Memory() as memory:
        assert seen.wait(10)
    assert memory.peaks == [900]
