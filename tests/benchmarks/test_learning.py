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


def test_the_page_shows_every_recorded_run(tmp_path: Path, record: Path) -> None:
    times = [
        {"time": 10.0 + step, "time/step": 2.0, "rollout/accuracy": step / 3} for step in (1, 2)
    ]
    curve = learning.curve([*times, {"time": 13.0}])
    assert curve == [(2.0, 0.3333), (3.0, 0.6667)]
    of_all = {"curve": curve, "weights": "0123456789abcdef", "commit": "c0ffee"}
    of_all |= {"machine": "two cores; load 1.0", "command": "python -m async_grpo.run"}
    rows = [row("quickstart", 0.97), row("quickstart", 0.93), row("chain", 0.9)]
    record.write_text("".join(json.dumps(one | of_all) + "\n" for one in rows))
    page, picture = tmp_path / "index.md", tmp_path / "runs.png"
    page.write_text(
        "# Runs\n\n<!-- benchmarks.learning: begin -->\n<!-- benchmarks.learning: end -->\n"
    )
    learning.main(["--show", "--docs", str(page), "--picture", str(picture)])
    learnt = "40.0% -> 95.0% (93.0% to 97.0%) | 60 (60 to 60) | two cores, commit c0ffee |"
    assert f"| `quickstart` | 2 | 2 | {learnt}" in page.read_text()
    assert "| `chain` | 2 | 1 | 40.0% -> 90.0%" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
