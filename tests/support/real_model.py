"""The pretrained model of the recipes (examples/real_model).

A test that asks for it is skipped, with the reason, where it cannot be had.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "real_model" / "get_model.py"
GET_S = 900.0
LAYERS = 30


@cache
def real_model() -> str:
    """The directory of the model; skips the test where it cannot be had."""
    command = [sys.executable, str(SCRIPT)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GET_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the real model did not come within {GET_S:g} s")
    if done.returncode:
        pytest.skip(f"the real model: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]
