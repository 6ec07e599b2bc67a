"""A cluster that a run starts for itself has no process that nobody needs, and a token of its own;
in a process of its own, as Ray is one per process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import services

from async_grpo.cluster import session
from async_grpo.cluster.placement import Node
from async_grpo.errors import SetupError, StopRequested
from async_grpo.runtime.stopping import Stop

CLIENT = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_put(b"key", b"value", True, None, timeout=10))
"""
SCRIPT = """
import json, os, psutil, ray, subprocess, sys
from pathlib import Path
from ray._private import parameter
from async_grpo.cluster.session import RaySession
usual = parameter.RayParams
session = RaySession.open(processes=2)
children = psutil.Process().children(recursive=True)
lines = [" ".join(child.cmdline()) for child in children]
token = ray.get(ray.remote(lambda: os.environ["RAY_AUTH_TOKEN"]).remote())
address = ray.get_runtime_context().gcs_address
clients = [
    subprocess.run(
        [sys.executable, "-c", sys.argv[1], address], env=os.environ | more, capture_output=True
    ) for more in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
]
stranger = [
    subprocess.run(["cat", f"/proc/{child.pid}/environ"], capture_output=True, user=65534).stdout
    for child in children if os.geteuid() == 0
]
session.close()
print(json.dumps({
    "lines": lines,
    "restored": parameter.RayParams is usual and not [n for n in os.environ if "RAY_AUTH" in n],
    "token": token,
    "clients": [client.returncode for client in clients],
    "refused": clients[0].stderr.decode(),
    "stranger": b"".join(stranger).decode(),
    "written": [str(path) for path in Path.home().rglob("*token*")],
}))
"""


@pytest.mark.timeout(120)
def test_a_local_cluster_has_a_token_of_its_own_and_no_autoscaler_or_log_monitor(
    tmp_path: Path,
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, CLIENT],
        env=kept | {"HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["restored"] and not told["written"]
    assert len(told["token"]) == 64 and not [
        line for line in told["lines"] if told["token"] in line
    ]
    assert told["clients"] == [1, 0] and "InvalidAuthToken" in told["refused"]
    assert not told["stranger"], "another user reads the environment of Ray's processes"
    [raylet] = [line for line in told["lines"] if line.partition(" ")[0].endswith("/raylet")]
    for name in session.AGENT_PORTS:  # with 0 or none it would wait for the agent's own choice
        [port] = re.findall(rf" --{name.replace('_', '[-_]')}=(\d+)(?= --|$)", raylet)[-1:]
        assert int(port) in session.OWN_PORTS, raylet
    assert not [line for line in told["lines"] if "log_monitor" in line or "monitor.py" in line]


def test_a_token_that_is_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RAY_AUTH_TOKEN", "mine"), ("RAY_AUTH_MODE", "disabled")):
        with monkeypatch.context() as patched:
            patched.delenv("RAY_AUTH_TOKEN", raising=False)
            patched.setenv(name, value)
            before = dict(os.environ)
            with session._own_token():
                assert dict(os.environ) == before


def test_a_token_that_every_user_can_read_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "is_token_auth_enabled", lambda: True)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    joined = session.RaySession(local=False)
    with tempfile.TemporaryDirectory() as folder:  # below one that everybody can enter
        home = Path(folder)
        monkeypatch.setenv("HOME", folder)
        assert joined.exposed_token() is None
        (home / ".ray").mkdir()
        token = home / ".ray" / "auth_token"
        token.write_text("token")  # as Ray writes it
        token.chmod(0o644)
        assert joined.exposed_token() is None, "the home directory is closed"
        home.chmod(0o755)
        said = joined.exposed_token()
        assert said is not None and f"`chmod 600 {token}`" in said
        assert session.RaySession(local=True).exposed_token() is None
        with monkeypatch.context() as patched:
            patched.setenv("RAY_AUTH_TOKEN", "another")
            assert joined.exposed_token() is None
        token.chmod(0o600)
        assert joined.exposed_token() is None
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "other"))
        (home / "other").write_text("token")
        assert "other" in str(joined.exposed_token())


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


def test_the_memory_of_gpus_is_asked_of_the_nodes_that_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node whose driver says nothing, or that does not answer in time, is left out."""
    told = {"a": 80 * 2**30, "c": None, "d": TimeoutError("no answer within 2 s")}

    class Smallest:
        def options(self, *, max_retries: int, node: str) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda: node)

    def answers(calls: list[str], *, timeout_s: float) -> list[object]:
        assert timeout_s == 2.0
        return [told[call] for call in calls]

    monkeypatch.setattr(session, "_smallest_gpu", Smallest())
    monkeypatch.setattr(session, "answers", answers)
    opened = session.RaySession(local=False)
    gpus = {"a": 8.0, "b": 0.0, "c": 1.0, "d": 1.0}
    nodes = [Node(name, name, cpus=8.0, gpus=count) for name, count in gpus.items()]
    monkeypatch.setattr(opened, "nodes", lambda: nodes)
    monkeypatch.setattr(opened, "on_node", lambda node: {"node": node})
    assert opened.gpu_memory(timeout_s=2.0) == {"a": 80 * 2**30}
