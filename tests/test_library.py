"""`import async_grpo`: the names that the library promises, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import async_grpo

HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed", "mlflow")


def test_importing_the_package_and_its_main_names_imports_nothing_heavy() -> None:
    code = (
        "import sys, async_grpo\n"
        "first = set(sys.modules)\n"
        "from async_grpo import Config, Trainer, load_config, register_estimator\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], 'pydantic' in first)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[0] == "[] False"


@pytest.mark.parametrize("name", async_grpo.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(async_grpo, name).__name__ == name and name in dir(async_grpo)


def test_another_name_is_an_error_like_any_other() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainor'"):
        async_grpo.Trainor  # noqa: B018
