"""What all of `async_grpo.algo` has in common: it imports with torch alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKER = """
import sys
{first}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {allowed!r} or top in sys.stdlib_module_names:
            return None
        raise ImportError("third-party import of " + name)
sys.meta_path.insert(0, Refuse())
import {modules}
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {{"ray", "vllm", "deepspeed", "mlflow", "transformers", "pydantic", "msgpack"}}, loaded
"""
MATH = "advantages losses importance kl aggregation logprobs metrics rewards filters"


@pytest.mark.parametrize(
    ("first", "allowed", "modules"),
    [
        ("import torch", ("async_grpo", "torch", "numpy"), ", ".join(f"async_grpo.algo.{name}" for name in MATH.split())),
        ("", ("async_grpo",), "async_grpo.algo.filters, async_grpo.algo.rewards, async_grpo.batching"),
    ],
    ids=["torch_alone", "nothing"],
)
def test_imports_need_no_other_package(first: str, allowed: tuple[str, ...], modules: str) -> None:
    code = BLOCKER.format(first=first, allowed=allowed, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
