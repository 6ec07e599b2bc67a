"""A run that lacks resources asks its cluster for them, on Ray's own autoscaler with nodes that it
starts as processes of this machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import AutoscalingCluster
from ray.util import get_node_ip_address

from tests.support.processes import free_ports, kill_marked, marked
from tests.support.waiting import wait_until

MARK = "ASYNC_GRPO_TEST_AUTOSCALING"

pytestmark = pytest.mark.timeout(180)

WORKER = {
    "resources": {"CPU": 2, "GPU": 2, "object_store_memory": 2**27},
    "node_config": {},
    "min_workers": 0,
    "max_workers": 3,
}


NO_COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)


class GrowingCluster(AutoscalingCluster):
    """Ray's, with a configuration of its own: the wheel of Ray lacks the file it would read."""

    def _generate_config(self, head_resources, worker_node_types, **options) -> dict[str, Any]:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": "growing",
            "max_workers": 3,
            "idle_timeout_minutes": 5,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": os.environ["RAY_ADDRESS"],
                "launch_multiple": True,
            },
            "available_node_types": {**worker_node_types, "ray.head.default": head},
            "head_node_type": "ray.head.default",
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in NO_COMMANDS},
        }


@pytest.fixture
def growing(monkeypatch) -> Iterator[None]:
    """A cluster of a head without a GPU, to which an autoscaler adds nodes with two."""
    temp = Path(tempfile.mkdtemp(prefix="ag", dir="/tmp"))  # short, for the paths of Unix sockets
    port, agent, client = free_ports(3)
    mark = uuid.uuid4().hex

    def start(command: list[str], **options) -> None:
        """Start the head beside other clusters, where Ray would first stop those."""
        if command[:2] == ["ray", "stop"]:
            return
        places = {
            "--port": str(port),
            "--node-ip-address": "127.0.0.1",
            "--include-dashboard": "false",
            "--dashboard-agent-listen-port": str(agent),
            "--ray-client-server-port": str(client),
            "--temp-dir": str(temp),
        }
        arguments = [word for name, value in places.items() for word in (name, value)]
        options["env"] |= {MARK: mark}
        subprocess.run([*command, *arguments], **options, check=True, stdout=subprocess.DEVNULL)

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_ADDRESS", f"{get_node_ip_address()}:{port}")
    monkeypatch.setattr(subprocess, "check_call", start)
    GrowingCluster({"CPU": 2, "object_store_memory": 2**27}, {"worker": WORKER}).start()
    try:
        yield
    finally:
        wait_until(
            lambda: kill_marked(MARK, mark) or not marked(MARK, mark), 30, "the cluster's end"
        )
        shutil.rmtree(temp, ignore_errors=True)


SCRIPT = """
import asyncio, json, ray, time
from async_grpo.cluster.placement import PlacementError, place
from async_grpo.cluster.session import RaySession
from async_grpo.config.schema import Config

config = Config.model_validate({
    "run": {"total_steps": 1}, "model": {"path": "m"}, "learner": {"ranks": 2},
    "cluster": {"device": "cuda", "layout": "split", "rollout_actors": {"min": 1},
                "resources_timeout_s": 90},
})
session = RaySession.open(processes=3)
try:
    place(config, session.nodes())
    at_first = "room"
except PlacementError as error:
    at_first = str(error)
placement = asyncio.run(session.wait_for_room(config))
deadline = time.monotonic() + 20
while any(node.used_gpus for node in session.nodes()) and time.monotonic() < deadline:
    time.sleep(0.1)
print(json.dumps({
    "at_first": at_first,
    "head": ray.get_runtime_context().get_node_id(),
    "learners": [slot.node_id for slot in placement.learners],
    "engines": [slot.node_id for slot in placement.engines],
    "reserved": sum(node.used_gpus for node in session.nodes()),
}))
session.close()
"""


def test_an_autoscaler_brings_what_a_run_lacks_and_nothing_stays_reserved(growing) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["at_first"].startswith("the run asks for 2 learner ranks with a GPU each")
    assert len(told["learners"]) == 2 and len(told["engines"]) >= 1
    assert told["head"] not in {*told["learners"], *told["engines"]}
    assert told["reserved"] == 0
