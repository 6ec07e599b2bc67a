"""The gate on learning: its band, and what it says of runs below it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning

FIVE = [0.90, 0.92, 0.91, 0.93, 0.89]


def row(name: str, accuracy: float) -> dict[str, Any]:
    return {"name": name, "seed": 7, "before": 0.4, "accuracy": accuracy, "seconds": 60}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "learning.jsonl"
    path.write_text("".join(json.dumps(row("chain", one)) + "\n" for one in FIVE))
    monkeypatch.setattr(learning, "RECORD", path)
    monkeypatch.setattr(learning.recorded, "__defaults__", (path,))
    return path


def test_the_band_is_the_prediction_interval_of_one_more_run() -> None:
    # by hand: deviation 0.0158, 4.604 of them times sqrt(1.2) = 0.0797 below 0.91
    assert learning.low(FIVE) == pytest.approx(0.8303, abs=1e-4)
    assert learning.low([0.1, 0.9]) == 0.0
    assert learning.low(FIVE * 4) > learning.low(FIVE)


@pytest.mark.parametrize(
    ("accuracy", "code", "said"),
    [(0.84, 0, "at least 83.0%"), (0.82, 1, "FAILED: less than 83.0%")],
)
def test_a_run_below_the_band_fails(
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    accuracy: float,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(learning, "run", lambda name, *_: row(name, accuracy))
    before = record.read_text()
    assert learning.main(["chain"]) == code
    assert said in capsys.readouterr().out
    assert record.read_text() == before
    assert learning.main(["chain", "--record", "--seeds", "1", "2"]) == 0
    assert [one["accuracy"] for one in learning.read_rows(record)][5:] == [accuracy] * 2


def test_without_recorded_runs_there_is_no_verdict(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "run", lambda name, *_: row(name, 1.0))
    with pytest.raises(SystemExit) as ended:
        learning.main(["real"])
    assert ended.value.code == 2
    assert "fewer than two runs of real on record" in capsys.readouterr().err
    assert learning.main([]) == 0
    said = capsys.readouterr().out
    assert "real: left out" in said and "chain, seed 0: 40.0% -> 100.0%" in said


def test_every_recipe_is_cut_to_a_length_and_evaluated_at_its_end() -> None:
    from async_grpo.config.load import load_config

    for config, *settings in learning.RECIPES.values():
        found = load_config(learning.ROOT / config, settings)
        assert found.run.total_steps and found.evaluation.before
        assert found.evaluation.max_samples >= 300
    names = {one["name"] for one in learning.read_rows(learning.RECORD)}
    assert names and names <= set(learning.RECIPES)
