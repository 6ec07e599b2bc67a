"""examples/slurm/train.sbatch with doubles of Slurm and Ray: who is called, in which order, with
what, and how the job ends.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest

from tests.support import commands
from tests.support.slurm_doubles import Call, Job
from tests.support.snippets import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
OPTIONS = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": "1",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"\d+",
    "mem": "0",
    "exclusive": "",
    "time": r"\d+:\d\d:\d\d",
    "signal": "B:TERM@600",
    "requeue": "",
    "open-mode": "append",
    "output": "%x-%j.out",
}
"""Options of sbatch that the script has, all of them documented, with their values."""
OF_SRUN = {"nodes", "nodelist", "ntasks-per-node", "cpus-per-task"}
ADDRESS = "10.0.0.5:22345"


def job(home: Path, *words: str, nodes: str = "n1 n2 n3", **variables: str) -> Job:
    return Job(SCRIPT, *(words or ["quickstart"]), home=home, nodes=nodes, **variables)


def called(calls: list[Call], beginning: str) -> list[int]:
    return [at for at, call in enumerate(calls) if str(call).startswith(beginning)]


def test_its_options_are_sbatchs_own() -> None:
    lines = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE)
    assert [name for name, _ in lines] == list(OPTIONS)
    assert all(re.fullmatch(OPTIONS[name], value) for name, value in lines)


def test_it_is_strict_and_clean() -> None:
    text = SCRIPT.read_text()
    directives = text.rindex("#SBATCH")
    first = re.search(r"^[^#\n].*$", text, re.MULTILINE)
    assert first[0] == "set -euo pipefail" and first.start() > directives
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=30)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True, timeout=60)


def test_head_then_workers_then_the_run(tmp_path: Path) -> None:
    one = job(tmp_path, "quickstart", "learner.lr=1e-4", "seed=3", ENDS="yes")
    assert one.end() == (0, "")
    calls = one.calls()
    [head], [workers] = called(calls, "ray start --head"), called(calls, "ray start --address")
    [driver], asked = called(calls, "python"), called(calls, "ray status")
    on_head, on_workers = called(calls, "srun")
    assert called(calls, "scontrol") == [0] and calls[0].words == ["show", "hostnames", "n[1-3]"]
    assert on_head < head < workers < len(calls) and asked[-1] < on_workers < workers
    assert len(asked) >= 2 and asked[-1] < driver, "it waits until the head answers"
    assert str(calls[on_head]).startswith(
        "srun --ntasks-per-node=1 --cpus-per-task=64 --nodes=1 --nodelist=n1 ray start --head "
        "--node-ip-address=10.0.0.5 --port=22345 --num-cpus=64 --num-gpus=8 --block"
    )
    assert "--nodes=2 --nodelist=n2,n3 ray start" in str(calls[on_workers])
    assert f"--address={ADDRESS}" in calls[workers].words == calls[on_workers].words[-6:][1:]
    assert calls[driver].words == [
        *("-m", "async_grpo.run", "quickstart", f"run.dir={tmp_path}/runs/slurm-812345"),
        *("learner.lr=1e-4", "seed=3"),
    ]


def test_the_programs_would_take_its_calls(tmp_path: Path) -> None:
    one = job(tmp_path, str(ROOT / "configs" / "math_8gpu.yaml"), "learner.ranks=8", ENDS="yes")
    one.end()
    for call in one.calls():
        if call.program in ("ray", "python"):
            commands.check(str(call), tmp_path)
        elif call.program == "srun":
            options = [word for word in call.words[: call.words.index("ray")]]
            assert {word[2:].partition("=")[0] for word in options} <= OF_SRUN


def test_only_who_has_the_jobs_token_reaches_its_ray(tmp_path: Path) -> None:
    one = job(tmp_path, ENDS="yes")
    one.end()
    users = [call for call in one.calls() if call.program in ("ray", "python")]
    [token] = {call.auth for call in users}
    assert re.fullmatch("token:[0-9a-f]{64}", token)
    assert {call.ray_address for call in users} == {"", ADDRESS}
    assert users[-1].program == "python" or users[-2].program == "python"
    assert [call.ray_address for call in users if call.program == "python"] == [ADDRESS]


@pytest.mark.parametrize(
    ("numbers", "code", "again"),
    [
        ([SIGTERM], 0, True),
        ([SIGTERM, SIGTERM], 0, True),
        ([SIGTERM], 4, False),
        ([SIGINT], 0, False),
        ([SIGINT, SIGTERM], 0, False),
    ],
)
def test_a_signal_reaches_the_run_once_and_its_code_is_the_jobs(
    tmp_path: Path, numbers: list, code: int, again: bool
) -> None:
    one = job(tmp_path, DRIVER_CODE=str(code), SLOW="10" if len(numbers) > 1 else "")
    one.signal(*numbers)
    assert one.end() == (code, "")
    calls = [str(call) for call in one.calls()]
    assert calls.count("python TERM") == 1
    assert calls[-1] == ("scontrol requeue 812345" if again else "python TERM")


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_ends_by_itself_ends_the_job(tmp_path: Path, code: int) -> None:
    one = job(tmp_path, nodes="n1", ENDS="yes", DRIVER_CODE=str(code))
    assert one.end() == (code, "")
    calls = one.calls()
    assert called(calls, "scontrol requeue") == [] and len(called(calls, "srun")) == 1


def test_without_ray_there_is_no_run(tmp_path: Path) -> None:
    one = job(tmp_path, RAY_FAILS="yes")
    assert one.end() == (1, f"error: Ray did not start on n1 ({ADDRESS})\n")
    assert called(one.calls(), "python") == []


def test_without_a_configuration_it_says_how_it_is_used(tmp_path: Path) -> None:
    one = Job(SCRIPT, home=tmp_path, nodes="n1")
    code, said = one.end()
    assert code == 2 and said.startswith("usage: sbatch examples/slurm/train.sbatch CONFIG")
    assert one.calls() == []
