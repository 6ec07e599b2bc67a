"""Every benchmark finds what it uses: the linter does not follow names into the package."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "name",
    sorted(
        ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        for path in FOLDER.rglob("*.py")
    ),
)
def test_a_benchmark_can_be_loaded(name: str) -> None:
    importlib.import_module(name)


def test_what_the_planning_benchmark_compares_is_predicted() -> None:
    from async_grpo.tools.predict.rehearsal import Prediction
    from benchmarks.planning import FIGURES

    assert set(FIGURES) <= {field.name for field in fields(Prediction)}
