"""A benchmark's loss is known to the tests of benchmarks alone, whichever of them loads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from async_grpo.algo.catalog import POLICY_LOSSES


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    """Forget a benchmark's loss after each test."""
    yield
    sys.modules.pop("benchmarks.widening", None)
    for known in (POLICY_LOSSES._traits, POLICY_LOSSES._functions):
        known.pop("widening", None)
