"""A cluster that a run starts for itself has no process that nobody needs; in a process of its own,
as Ray is one per process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, psutil, ray
from ray._private import parameter
from async_grpo.cluster.session import Session
usual = parameter.RayParams
session = Session.open(processes=2)
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
