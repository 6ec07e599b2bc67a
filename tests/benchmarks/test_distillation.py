"""The comparison of distillation with rewards: what it makes of its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from benchmarks import distillation


def row(kind: str, seed: int, *accuracies: float) -> dict:
    every = 3 if kind == "teacher" else 1
    points = [(every * at, 1.0, accuracy) for at, accuracy in enumerate(accuracies)]
    machine = {"machine": "M, 2 cores; load 1", "teacher_kl": [0.5, 0.25]}
    return {"kind": kind, "seed": seed, "points": points} | machine


TEACHER = row("teacher", 100, 0.0, 0.4, 0.6, 0.8, 1.0)  # 0.9 of the gain after 3 x 3.5 steps


def test_steps_are_counted_until_the_same_share_of_the_gain() -> None:
    assert distillation.until(TEACHER["points"], 0.9, 0) == pytest.approx(10.5)
    assert distillation.until(TEACHER["points"], 1.1, 0) is None
    fast, slow = row("top 8", 0, 0.0, 0.9), row("top 8", 1, 0.0, 0.5, 0.8, 1.0)
    *_, aim, other = distillation.table([TEACHER, fast, slow])
    assert other.endswith("| not met |")  # no student of that kind
    assert "0.17 (0.10 to 0.24)" in aim and aim.endswith("| met |")
    *lines, aim, _ = distillation.table([TEACHER, fast, row("top 8", 2, 0.0, 0.1)])
    assert "never in 1" in aim and aim.endswith("| not met |")
    assert any("seed 2" in line and "never" in line for line in lines)
    slower = row("top 8", 3, 0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
    assert distillation.table([TEACHER, slower])[-2].endswith("| not met |")


def test_the_table_goes_where_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    page.write_text(
        "<!-- benchmarks.distillation: begin -->\n<!-- benchmarks.distillation: end -->\n"
    )
    distillation.main(["--table", "--rows", str(rows), "--docs", str(page)])
    assert "Not measured yet." in page.read_text()
    runs = (TEACHER, row("top 8", 0, 0.0, 0.95))
    rows.write_text("".join(json.dumps(one) + "\n" for one in runs))
    distillation.main(["--table", "--rows", str(rows), "--docs", str(page)])
    assert (
        "| top 8, seed 0 | 0.0% | 95.0% |" in page.read_text() and "met" in capsys.readouterr().out
    )


def test_all_kinds_are_runs_that_there_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taught" / "checkpoints" / "step_000030" / "hf").mkdir(parents=True)
    asked: list[list[str]] = []

    def logged(command: list[str], log: Path, *, limit_s: float) -> None:
        asked.append(command[3:])
        lines = [
            {"step": 0, "eval/accuracy_greedy": 0.1},
            {"step": 1, "time": 9.0, "time/step": 4.0, "train/teacher_kl": 0.5},
            {"step": 1, "eval/accuracy_greedy": 0.2},
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (Path(log).with_suffix("") / "metrics.jsonl").write_text(text)

    monkeypatch.setattr(distillation, "run_logged", logged)
    monkeypatch.setattr(distillation, "real_model", lambda: ["model.path=some/model"])
    for kind, seed in (("teacher", 100), ("top 8", 1), ("sampled token", 2)):
        home = tmp_path / kind
        home.mkdir()
        found = distillation.run(kind, seed, home, teacher=tmp_path / "taught")
        assert found["points"] == [(0, 0.0, 0.1), (1, 4.0, 0.2)]
        config = load_config(distillation.ROOT / asked[-1][0], asked[-1][1:])
        taught = kind != "teacher"
        assert config.run.total_steps == (10 if taught else 30) and config.seed == seed
        assert bool(config.frozen) == taught and config.evaluation.n == 0
        distill = config.algorithm.distill
        assert distill.reward_coef == (0.0 if taught else 1.0)
        assert distill.teacher_top_k == (8 if kind == "top 8" else 0)
