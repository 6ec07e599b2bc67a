"""The system as `ray job submit` runs it: on a cluster of its own, with and without a working
directory, stopped, and failing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ray.exceptions
import yaml

from async_grpo.errors import EXIT_MEANING
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.ending import explained
from async_grpo.runtime.stopping import STOPPED_EARLY
from async_grpo.weights.shared_memory import remove_abandoned_segments
from tests.support.models import write_model
from tests.support.processes import free_ports, kill_marked, left_by, marked

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
CPUS = 4
CLUSTER, JOB = "ASYNC_GRPO_TEST_CLUSTER", "ASYNC_GRPO_TEST_JOB"

pytestmark = pytest.mark.timeout(600)


@dataclass
class Finished:
    """A job that has ended: what the command said, the job's own log, and its processes that were
    seen.
    """

    code: int
    said: str
    log: str
    processes: set[int]
    name: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.strip()]


@dataclass
class Cluster:
    """A Ray cluster of one node on loopback, and the commands that talk to it."""

    dashboard: str
    temp: Path
    environment: dict[str, str]
    home: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def ray(self, *arguments: str, seconds: float) -> str:
        """The output of a `ray` command that succeeds within its deadline."""
        done = subprocess.run(
            [RAY, *arguments],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def submit(
        self,
        *entrypoint: str,
        working_dir: Path | None = None,
        seconds: float = 300,
        **variables: str,
    ) -> Finished:
        """Submit, follow, and wait for the end."""
        job = self.start(*entrypoint, working_dir=working_dir, **variables)
        return job.follow(seconds)

    def start(self, *entrypoint: str, working_dir: Path | None = None, **variables: str) -> Job:
        """Submit a job that carries a mark in the environment of all its processes."""
        name, mark = f"test-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        environment = {JOB: mark, "ASYNC_GRPO_HOME": str(self.home), **variables}
        command = [RAY, "job", "submit", "--address", self.dashboard, "--submission-id", name]
        command += ["--runtime-env-json", json.dumps({"env_vars": environment})]
        command += ["--working-dir", str(working_dir)] if working_dir is not None else []
        said = self.home / f"{name}.txt"
        with open(said, "w") as out:
            process = subprocess.Popen(
                [*command, "--", *entrypoint],
                env=self.environment,
                cwd=self.home,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return Job(self, name, mark, process, said)


@dataclass
class Job:
    """A submitted job and the `ray job submit` that follows it."""

    cluster: Cluster
    name: str
    mark: str
    process: subprocess.Popen
    said: Path

    def log(self) -> str:
        """What the job printed so far."""
        path = self.cluster.temp / "session_latest" / "logs" / f"job-driver-{self.name}.log"
        return path.read_text() if path.exists() else ""

    def wait_until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what} did not happen within {seconds} "
                f"s:\n{self.said.read_text()[-2000:]}\n{self.log()[-3000:]}"
            )
            time.sleep(0.2)

    def follow(self, seconds: float) -> Finished:
        """Wait for the end of the job and of all its processes."""
        seen: set[int] = set()

        def ended() -> bool:
            seen.update(marked(JOB, self.mark))
            return self.process.poll() is not None

        try:
            self.wait_until(ended, seconds, "the end of the job")
        finally:
            self.process.kill()
        self.wait_until(lambda: not marked(JOB, self.mark), 30, "the end of the job's processes")
        return Finished(
            self.process.wait(timeout=5), self.said.read_text(), self.log(), seen, self.name
        )


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    temp = Path(
        tempfile.mkdtemp(prefix="ag", dir="/tmp")
    )  # short: the path of a Unix socket has about a hundred characters at most
    home = tmp_path_factory.mktemp("jobs")
    port, dashboard, agent, client = free_ports(4)
    unwanted = ("RAY_ADDRESS", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "ASYNC_GRPO_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    here = Cluster(f"http://127.0.0.1:{dashboard}", temp, environment, home)
    command = [
        RAY,
        "start",
        "--head",
        "--block",
        "--node-ip-address",
        "127.0.0.1",
        "--port",
        str(port),
        "--include-dashboard",
        "true",
        "--dashboard-host",
        "127.0.0.1",
        "--dashboard-port",
        str(dashboard),
        "--dashboard-agent-listen-port",
        str(agent),
        "--ray-client-server-port",
        str(client),
        "--temp-dir",
        str(temp),
        "--num-cpus",
        str(CPUS),
        "--object-store-memory",
        str(2**28),
    ]
    log = home / "cluster.txt"
    with open(log, "w") as out:
        head = subprocess.Popen(
            command,
            env=environment | {CLUSTER: here.mark},
            cwd=home,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while not (answers(dashboard) and answers(agent)):
            assert head.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield here
    finally:
        end(head, here.mark)
        shutil.rmtree(temp, ignore_errors=True)


def end(head: subprocess.Popen, mark: str) -> None:
    """End the cluster: it takes its processes along when asked, and those that stay are killed one
    by one.
    """
    head.terminate()
    deadline = time.monotonic() + 15
    while marked(CLUSTER, mark) and time.monotonic() < deadline:
        head.poll()
        time.sleep(0.2)
    kill_marked(CLUSTER, mark)
    head.wait(timeout=5)


@pytest.fixture(scope="module")
def config(cluster) -> dict:
    """Two learner steps on a small random model."""
    return {
        "run": {"name": "job", "dir": "runs/{name}", "total_steps": 2},
        "model": {"path": write_model(cluster.home / "model")},
        "task": {"name": "arithmetic"},
        "rollout": {
            "rollout_batch_size": 4,
            "group_size": 4,
            "prompt_length": 8,
            "response_length": 6,
        },
        "evaluation": {"max_samples": 4},
        "tracking": {"report": False},
        "cluster": {"engine": {"max_num_seqs": 16}, "rollout_actors": {"max": 1}},
    }


@pytest.fixture(scope="module")
def package(cluster, config) -> Path:
    """A directory as somebody would submit it: the code, a configuration, and around them what
    .rayignore leaves out.
    """
    directory = cluster.home / "package"
    shutil.copytree(
        ROOT / "async_grpo", directory / "async_grpo", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / ".rayignore", directory)
    for name in (".venv", ".git", "runs", "tests", "docs", "async_grpo/__pycache__"):
        (directory / name).mkdir()
        (directory / name / "large.bin").write_bytes(os.urandom(2**20))
    (directory / "job.yaml").write_text(yaml.safe_dump(config))
    return directory


def entrypoint(config: Path | str, *overrides: str) -> list[str]:
    return ["python", "-m", "async_grpo.run", str(config), *overrides]


def unreadable(job: Finished) -> list[str]:
    """Lines of the job's own log that a person would not want to see there. Ray writes one or two
    of its own at the beginning.
    """
    lines = [line for line in job.log.splitlines() if "job_manager.py" not in line]
    noise = ("(pid=", "INFO", "WARNING", "ray::")
    return [
        line
        for line in lines
        if not line.isprintable() or line != line.rstrip() or any(word in line for word in noise)
    ]


def test_a_submitted_package_trains_and_leaves_its_run_where_it_stays(cluster, package):
    job = cluster.submit(*entrypoint("job.yaml"), working_dir=package)
    assert job.code == 0 and f"Job '{job.name}' succeeded" in job.said, job.log
    assert not unreadable(job)
    assert any(line.startswith("step 2/2") for line in job.lines) and "finished" in job.lines

    run_dir = cluster.home / "runs" / "job"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in steps if "train/loss" in line} == {1, 2}
    assert (run_dir / "checkpoints" / "step_000002" / "manifest.json").is_file()
    [commands] = [line for line in job.lines if "continues this run" in line]
    assert f"{run_dir}/config.yaml" in commands

    assert len(job.processes) >= 4, (
        "the run's processes were not seen at all, so nothing is known about their end"
    )
    assert not left_by(job.processes)

    [unpacked] = (cluster.temp / "session_latest" / "runtime_resources" / "working_dir_files").glob(
        "_ray_pkg_*/"
    )
    assert {path.name for path in unpacked.iterdir()} == {"async_grpo", "job.yaml", ".rayignore"}
    assert not list(unpacked.rglob("large.bin")), "what .rayignore leaves out was sent along"


@pytest.mark.slow  # the message: tests/system/test_command_line.py
def test_a_misspelled_key_fails_the_job_with_one_message(cluster, config):
    path = cluster.home / "misspelled.yaml"
    path.write_text(yaml.safe_dump(config | {"rollout": config["rollout"] | {"grup_size": 8}}))
    job = cluster.submit(*entrypoint(path), seconds=180, PYTHONPATH=str(ROOT))
    assert job.code != 0 and f"Job '{job.name}' failed" in job.said
    assert not unreadable(job)
    assert "`rollout.grup_size` is not a setting" in job.log and "rollout.group_size" in job.log
    assert len([line for line in job.lines if "job_manager.py" not in line]) <= 4, job.log
    assert job.lines[-1] == f"error: exit code 2: {EXIT_MEANING[2]}"


@pytest.mark.slow
def test_missing_resources_are_named_after_joining_the_cluster(cluster, config):
    path = cluster.home / "large.yaml"
    path.write_text(yaml.safe_dump(config | {"learner": {"ranks": 64}}))
    overrides = [
        "run.name=large",
        "cluster.device=cuda",
        "cluster.resources_timeout_s=2",
        "tracking.mlflow=false",
    ]
    job = cluster.submit(*entrypoint(path, *overrides), seconds=180, PYTHONPATH=str(ROOT))
    assert job.code != 0 and f"Job '{job.name}' failed" in job.said
    assert not unreadable(job)
    message = job.lines[
        -2
    ]  # Ray puts the address of the machine in the place of a loopback address
    assert (
        message.startswith("error: ")
        and "64 learner ranks" in message
        and re.search(rf"[\d.]+: {CPUS} CPUs, 0 GPUs", message)
    )
    assert job.lines[-1] == f"error: exit code 2: {EXIT_MEANING[2]}"


LONG = ["run.total_steps=100000", "evaluation.before=false", "tracking.mlflow=false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "name"), [("starting engines", "stopped-early"), ("tok/s", "stopped")]
)
def test_a_stopped_job_saves_within_its_grace_period(cluster, package, moment, name):
    """While it starts, there is nothing to save."""
    job = cluster.start(
        *entrypoint("job.yaml", *LONG, f"run.name={name}"),
        working_dir=package,
        RAY_JOB_STOP_WAIT_TIME_S="120",
    )
    job.wait_until(lambda: moment in job.log(), 240, f"`{moment}` in the log")
    cluster.ray("job", "stop", "--address", cluster.dashboard, job.name, seconds=120)
    ended = job.follow(60)
    assert "was stopped" in ended.said and not unreadable(ended)
    assert (
        "SIGTERM" in ended.log
        and "`ray job stop` gives this run 120 s to save before it is killed" in ended.lines
    ), ended.log
    assert ended.lines[-1] == f"exit code 0: {EXIT_MEANING[0]}"
    if moment == "tok/s":
        assert "stopped early, resumable" in ended.lines
        [saved] = (cluster.home / "runs" / name / "checkpoints").iterdir()
        assert (saved / "manifest.json").is_file()
    else:
        assert STOPPED_EARLY in ended.lines
    assert not left_by(ended.processes)


@pytest.mark.slow
def test_a_job_stopped_without_grace_period_leaves_no_process_and_loses_only_time(cluster, package):
    """Its weights in shared memory stay until the next run on that machine; the same submission
    continues.
    """
    job = cluster.start(
        *entrypoint("job.yaml", *LONG, "run.name=killed", "checkpoint.every_steps=2"),
        working_dir=package,
        RAY_JOB_STOP_WAIT_TIME_S="0",
    )
    job.wait_until(lambda: checkpoint.steps(cluster.home / "runs" / "killed"), 180, "a checkpoint")
    assert (
        "gives this run 0 s to save" in job.log() and "RAY_JOB_STOP_WAIT_TIME_S to 600" in job.log()
    )
    assert len(marked(JOB, job.mark)) >= 4
    cluster.ray("job", "stop", "--address", cluster.dashboard, job.name, seconds=60)
    ended = job.follow(60)
    remove_abandoned_segments()
    assert not left_by(ended.processes)

    kept = max(checkpoint.steps(cluster.home / "runs" / "killed"))  # without a draft under way
    again = cluster.submit(
        *entrypoint(
            "job.yaml",
            *LONG,
            "run.name=killed",
            "checkpoint.every_steps=2",
            f"run.total_steps={kept + 200}",
        ),
        working_dir=package,
        seconds=240,
    )
    assert again.code == 0, again.log
    assert int(re.search(r"resumed .* at step (\d+) of", again.log)[1]) >= kept


def test_an_error_in_a_remote_process_is_explained_without_its_colours(capsys):
    # what Ray makes of an exception in an actor
    text = "\x1b[36mray::work()\x1b[39m (pid=1)\n  line 1\nKeyError: 'a bug'"
    error = ray.exceptions.RayTaskError(
        "work", text, KeyError("a bug"), proctitle="work", pid=1, ip="127.0.0.1"
    )
    code, message = explained(error)
    trace = capsys.readouterr().err
    assert (code, message) == (1, "KeyError: 'a bug'")
    assert "work()" in trace and "\x1b" not in trace
