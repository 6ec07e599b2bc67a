"""A cluster that a run starts for itself has no process that nobody needs; in a process of its own,
as Ray is one per process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private import services

from async_grpo.cluster import session
from async_grpo.cluster.placement import Node
from async_grpo.errors import SetupError, StopRequested
from async_grpo.runtime.stopping import Stop

SCRIPT = """
import json, psutil, ray
from ray._private import parameter
from async_grpo.cluster.session import RaySession
usual = parameter.RayParams
session = RaySession.open(processes=2)
lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
answer = ray.get(ray.remote(lambda: 42).remote())
session.close()
print(json.dumps({"lines": lines, "answer": answer, "restored": parameter.RayParams is usual}))
"""


@pytest.mark.timeout(120)
def test_a_local_cluster_works_without_autoscaler_and_log_monitor() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["answer"] == 42 and told["restored"]
    assert any("raylet" in line for line in told["lines"])
    assert not [line for line in told["lines"] if "log_monitor" in line or "monitor.py" in line]


def test_a_node_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [RuntimeError("no such node")] * 3 + ["the node"]

    def get_node(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    with session._own_cluster(lambda: None):
        assert services.get_node("address", "id") == "the node"
    assert services.get_node is get_node
    answers.append(RuntimeError("no such node"))
    monkeypatch.setattr(session, "START_S", -1.0)
    with session._own_cluster(lambda: None), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("address", "id")


def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore of it.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SetupError) as caught:
        session.RaySession.open(processes=2)
    said = str(caught.value)
    assert said.startswith(
        "Ray did not start on this machine (The current node timed out during startup)"
    )
    assert "session_latest/logs" in said and "\n" not in said


def test_a_stop_ends_the_wait_for_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_node(*_: object) -> None:
        raise RuntimeError("no such node")

    def init(**_: object) -> None:
        services.get_node("address", "id")

    stop = Stop()
    stop.set()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(StopRequested):
        session.RaySession.open(processes=2, check=stop.check)


def test_a_cluster_that_cannot_be_joined_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("Version mismatch: the cluster was started with:\n    Ray: 2.50.0")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SetupError) as caught:
        session.RaySession.open(processes=2)
    said = str(caught.value)
    assert said.startswith("RAY_ADDRESS is auto, and that cluster cannot be joined (Version")
    assert "\n" not in said


async def test_a_node_that_may_not_use_the_run_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = PermissionError(13, "Permission denied", str(tmp_path))
    error = ray.exceptions.RayTaskError("_probe_storage", "trace", cause).as_instanceof_cause()

    class Probe:
        def options(self, **_: object) -> Probe:
            return self

        async def remote(self, *_: object) -> bool:
            raise error

    monkeypatch.setattr(session, "_probe_storage", Probe())
    monkeypatch.setattr(session, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    opened = session.RaySession(local=True)
    monkeypatch.setattr(opened, "nodes", lambda: [Node("n0", "10.0.0.7", 1.0, 0.0)])
    with pytest.raises(
        SetupError, match=r"node 10\.0\.0\.7 cannot use run\.dir .*Permission denied"
    ):
        await opened.check_shared_storage(str(tmp_path), {"n0"}, timeout_s=10.0)
    assert not list(tmp_path.iterdir())
