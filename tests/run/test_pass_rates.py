"""Pass rates that one run found and another begins with (`replay.difficulty.rates_from`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.run.preflight.run_check import check_run
from tests.support.rated_run import rated_run


def config(run: Path, source: Path | None = None, **sections: Any) -> Config:
    difficulty = {"choose": "window", "rates_from": None if source is None else str(source)}
    values = {
        "run": {"total_steps": 3, "dir": str(run)},
        "model": {"path": "hub/policy"},
        "replay": {"difficulty": difficulty},
    }
    return Config.model_validate(values | sections)


def test_they_are_those_of_the_end_of_a_run_on_the_same_data(tmp_path: Path) -> None:
    first = config(tmp_path / "first", seed=3, rollout={"group_size": 4})
    rated_run(first, {5: 1.0, 7: 0.25, 5 + 1: 0.5} | {5: 0.75})
    found = check_run(config(tmp_path / "second", tmp_path / "first"), notes=[]).pass_rates
    assert found == {5: 0.75, 7: 0.25, 6: 0.5}
    assert check_run(first, notes=[]).pass_rates == {}
    second = config(tmp_path / "second", tmp_path / "first")
    rated_run(second, {1: 0.5})  # it has begun
    shutil.rmtree(tmp_path / "first")
    assert check_run(second, notes=[]).pass_rates == {}, "a run that goes on has its own"


@pytest.mark.parametrize(
    ("rates", "options", "says"),
    [
        ({1: 1.0}, {"max_digits": 2}, "a run on other data"),
        ({}, {}, "which kept no pass rates: its `replay.difficulty.choose` is all"),
        (None, {}, "which is no directory of a run"),
    ],
)
def test_a_run_that_has_none_for_this_data_is_refused(
    tmp_path: Path, rates: dict[int, float] | None, options: dict[str, int], says: str
) -> None:
    if rates is not None:
        choose = {"difficulty": {"choose": "window" if rates else "all"}}
        rated_run(config(tmp_path / "first", replay=choose), rates)
    task = {"name": "arithmetic", "options": options}
    wanted = config(tmp_path / "second", tmp_path / "first", task=task)
    with pytest.raises(SetupError, match=f"rates_from` is {tmp_path}/first, {says}"):
        check_run(wanted, notes=[])
