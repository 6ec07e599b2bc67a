"""The metrics file is always complete; MLflow gets what can be read back, or a counted error."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config.schema import Config, Model, Run, Tracking
from async_grpo.tracking import Tracker, TrackingError, flatten

ROOT = Path(__file__).resolve().parents[1]


def _config(**tracking: object) -> Config:
    return Config(run=Run(name="tracked", total_steps=3), model=Model(path="somewhere"), tracking=Tracking(**tracking))


def _rows(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tracker, Path]]:
    """A tracked run that was interrupted once and resumed."""
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "config.yaml").write_text("seed: 0\n")
    (run_dir / "report.md").write_text("# report\n")
    first = Tracker(_config(), run_dir=run_dir, resume_run_id=None)
    first.log(0, {"rollout/score": 0.25})
    first.start()
    first.log(1, {"rollout/score": 0.5, "train/entropy": float("nan")})
    first.log_samples([{"prompt": "1+1=", "response": "2\x1b[31m"}])
    first.finish("KILLED")
    second = Tracker(_config(), run_dir=run_dir, resume_run_id=first.run_id)
    second.start()
    second.log(2, {"rollout/score": 0.75})
    second.log_samples([{"prompt": "1+2=", "response": "3" * 10_000}])
    second.log_artifact(run_dir / "report.md")
    second.finish("FINISHED")
    second.finish("FAILED")
    yield second, run_dir


def test_mlflow_has_metrics_parameters_samples_and_files(finished: tuple[Tracker, Path]) -> None:
    from mlflow import MlflowClient

    tracker, run_dir = finished
    assert tracker.uri == f"sqlite:///{run_dir}/mlflow.db"
    assert (tracker.errors, tracker.dropped) == (0, 0)
    client = MlflowClient(tracker.uri)
    run = client.get_run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tracked")
    history = client.get_metric_history(tracker.run_id, "rollout/score")
    assert [(point.step, point.value) for point in history] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert "train/entropy" not in run.data.metrics
    assert run.data.params == flatten(_config().model_dump(mode="json"))
    assert len(run.data.params) > 100
    assert {entry.path for entry in client.list_artifacts(tracker.run_id)} == {"config.yaml", "report.md", "samples.json"}
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(run_dir / "mlartifacts")
    table = json.loads(next((run_dir / "mlartifacts").rglob("samples.json")).read_text())
    assert table["columns"] == ["prompt", "response"]
    assert table["data"][0] == ["1+1=", "2\\x1b[31m"]
    assert len(table["data"][1][1]) < 5000


def test_the_metrics_file_has_every_step_of_both_starts(finished: tuple[Tracker, Path]) -> None:
    _, run_dir = finished
    rows = _rows(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["train/entropy"] is None
    assert rows[2]["rollout/score"] == 0.75


def test_errors_after_the_start_are_counted_and_reported_once(
    finished: tuple[Tracker, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(_config(uri=finished[0].uri), run_dir=tmp_path, resume_run_id=None)
    tracker.start()
    with caplog.at_level(logging.WARNING, logger="async_grpo"):
        for step in range(3):
            tracker.log(step, {"m" * 300: 1.0})
        tracker.finish("FINISHED")
        tracker.log(3, {"late": 1.0})
    assert tracker.errors == 3
    assert tracker.dropped == 1
    assert len([record for record in caplog.records if "MLflow call failed" in record.message]) == 1
    assert [row["step"] for row in _rows(tmp_path)] == [0, 1, 2]


def test_an_unusable_server_is_an_error_at_the_start_and_drops_are_counted(tmp_path: Path) -> None:
    tracker = Tracker(_config(uri="nonsense://server"), run_dir=tmp_path, resume_run_id=None)
    with pytest.raises(TrackingError, match="nonsense://server"):
        tracker.start()
    tracker.log(0, {"a": 1.0})
    tracker.finish("FAILED")
    assert tracker.dropped == 1
    assert len(_rows(tmp_path)) == 1


def test_a_tracker_that_was_never_started_counts_what_it_could_not_send(tmp_path: Path) -> None:
    tracker = Tracker(_config(), run_dir=tmp_path, resume_run_id=None)
    tracker.log(0, {"a": 1.0})
    tracker.finish("FAILED")
    assert tracker.dropped == 1


def test_without_mlflow_it_is_not_imported(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from async_grpo.config.schema import Config, Model, Run, Tracking
from async_grpo.tracking import Tracker
config = Config(run=Run(total_steps=1), model=Model(path="x"), tracking=Tracking(mlflow=False))
tracker = Tracker(config, run_dir=Path({str(tmp_path)!r}), resume_run_id=None)
tracker.start()
tracker.log(1, {{"a": 1.0}})
tracker.log_samples([{{"prompt": "p"}}])
tracker.finish("FINISHED")
assert (tracker.run_id, tracker.uri, tracker.errors, tracker.dropped) == (None, None, 0, 0)
assert not [name for name in sys.modules if name.split(".")[0] == "mlflow"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)
    assert _rows(tmp_path)[0]["a"] == 1.0
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"prompt": "p"}
