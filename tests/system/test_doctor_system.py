"""`async-grpo doctor` on a cluster that is there: it looks at its node and leaves it as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]
NODE_ROWS = {"python", "ray", "torch", "memory", "cores", "gpu", "clock", "ports"}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    temp = Path(
        tempfile.mkdtemp(prefix="ag", dir="/tmp")
    )  # short: a Unix socket's path has about a hundred characters at most
    arguments = {
        "num_cpus": 3,
        "include_dashboard": False,
        "object_store_memory": 2**27,
        "temp_dir": str(temp),
    }
    with pytest.MonkeyPatch.context() as patch:  # a run that this process had begun says otherwise
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
        cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def doctor(*words: str) -> tuple[int, dict]:
    """Its exit code, and what it says as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "async_grpo", "doctor", "--json", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.count("\n") == 1, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def test_every_node_of_a_cluster_is_looked_at(cluster: Cluster) -> None:
    code, told = doctor("--address", cluster.address)
    nodes = {one["node"] for one in told["rows"]} - {""}
    assert len(nodes) == 1
    of_it = {one["label"]: one for one in told["rows"] if one["node"]}
    assert of_it.keys() >= NODE_ROWS
    assert not of_it["clock"]["fault"] and not of_it["ports"]["fault"]
    [joined] = [one for one in told["rows"] if one["label"] == "ray cluster"]
    assert "3 CPUs" in joined["found"]
    assert code == (2 if told["missing"] else 0)


def test_a_run_without_room_in_the_cluster(cluster: Cluster) -> None:
    words = ("quickstart", "cluster.device=cuda", "learner.ranks=64")
    code, told = doctor(*words, "--address", cluster.address)
    [places] = [one for one in told["rows"] if one["label"] == "places"]
    assert "the run asks for 64 learner ranks with a GPU each" in places["fault"]
    assert code == 2 and places["severity"] == "error"


def test_the_cluster_is_left_as_it_was(cluster: Cluster) -> None:
    doctor("--address", cluster.address)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        assert [node["Alive"] for node in ray.nodes()] == [True]
        assert ray.available_resources()["CPU"] == 3.0
    finally:
        ray.shutdown()
