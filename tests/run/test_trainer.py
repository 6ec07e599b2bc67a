"""The trainer before its start: what it restores, and what it refuses."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from async_grpo.cluster import session
from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.errors import RunError, SetupError
from async_grpo.observe.console.console import Console
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.resume import Course
from async_grpo.run.directory import RunDirectory
from async_grpo.run.preflight.run_check import Checked, check_run
from async_grpo.run.trainer import Trainer
from tests.support.models import write_model
from tests.support.verbs import train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def trainer(run_dir: Path, model: str) -> Trainer:
    config = Config.model_validate(
        {
            "run": {"total_steps": 9, "dir": str(run_dir)},
            "model": {"path": model},
            "task": {"name": "arithmetic"},
            "rollout": {"prompt_length": 8, "response_length": 6},
            "evaluation": {"max_samples": 4},
        }
    )
    return Trainer(config, console=Console(io.StringIO()))


def chosen(one: Trainer) -> Path | None:
    """Where the run would go on with the settings of this trainer, which has checked the model."""
    return check_run(one.config, notes=one.model_notes).checkpoint


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Trainer]:
    """It takes the model for one that has been tried, which takes an engine
    (tests/run/preflight/test_architecture_check.py).
    """
    with trainer(tmp_path_factory.mktemp("checked") / "run", model) as one:
        one.model_notes = []
        one.check()
        yield one


def test_restore_goes_on_from_the_checkpoint_that_is_named(
    checked: Trainer, tmp_path: Path
) -> None:
    paths = []
    for step in (3, 6):
        directory = checkpoint.begin(Path(checked.config.run.dir), step)
        (directory / "queue.json").write_text("{}")
        paths.append(checkpoint.commit(directory, {"step": step}))
    assert chosen(checked) == paths[1]
    checked.restore(paths[0])
    assert chosen(checked) == paths[0]
    with pytest.raises(SetupError, match="has no manifest"):
        checked.restore(tmp_path)


def test_components_without_weight_are_second_opinions(checked: Trainer) -> None:
    assert checked._log.reward_watch.opinions == ["format"]


def damaged_run(run_dir: Path, *steps: int) -> None:
    """Checkpoints of which the newest has another byte than was written; no journal."""
    for step in steps:
        directory = checkpoint.begin(run_dir, step)
        (directory / "queue.json").write_text("{}")
        newest = checkpoint.commit(directory, {"step": step})
    (newest / "queue.json").write_text("[]")


def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(tmp_path: Path, model: str) -> None:
    damaged_run(tmp_path / "run", 3, 6)
    said: list[str] = []
    config = trainer(tmp_path / "run", model).config
    facts = check_run(config, notes=[])
    assert checkpoint.step_of(facts.checkpoint) == 6, "sizes do not show it"
    directory = RunDirectory(tmp_path / "run", lost=lambda error: None)
    facts, manifest = directory.whole_checkpoint(config, facts, note=said.append)
    assert manifest["step"] == 3 == checkpoint.step_of(facts.checkpoint)
    [warning] = said
    assert "step_000006 is damaged: the contents of queue.json have changed" in warning
    assert warning.startswith("warning: ") and "; the run continues from " in warning


def test_a_run_is_refused_rather_than_begun_anew(tmp_path: Path, model: str, capsys) -> None:
    damaged_run(tmp_path / "run", 3)
    (tmp_path / "c.yaml").write_text(dump(trainer(tmp_path / "run", model).config))
    assert train([str(tmp_path / "c.yaml")]) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert "the run cannot go on from where it was" in said and "checkpoint.resume=never" in said
    assert not ray.is_initialized()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000003"]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path: Path, model: str) -> None:
    with (
        trainer(tmp_path / ("a" * 300), model) as one,
        pytest.raises(SetupError, match=r"cannot be read: File name too long$"),
    ):
        one.check()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"layout": "colocated"}, "cluster.layout: colocated needs GPUs"),
        ({"engine": {"tensor_parallel_size": 2}}, "tensor_parallel_size: 2 needs GPUs"),
        ({"device": "cuda"}, "1 learner rank with a GPU each"),
    ],
)
def test_gpus_that_are_not_here_are_missed_before_ray_starts(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session, "_gpus", lambda: 0)
    with trainer(tmp_path / "run", model) as one:
        cluster = Config.model_validate(
            {"run": {"total_steps": 1}, "model": {"path": model}, "cluster": settings}
        ).cluster
        one.config = one.config.unchecked_copy(update={"cluster": cluster})
        with pytest.raises(SetupError, match=says):
            one.start()
        assert not ray.is_initialized() and not (tmp_path / "run").exists()


def test_a_config_yaml_that_no_run_wrote_is_not_replaced(tmp_path: Path, model: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("# my own notes\n")
    with trainer(run_dir, model) as one:
        with pytest.raises(SetupError, match=r"holds a config\.yaml that no run wrote"):
            one.check()
        (run_dir / "status.json").write_text("{}")
        one.check()


def test_an_evaluation_task_without_held_out_problems_is_one_sentence(
    tmp_path: Path, model: str
) -> None:
    with trainer(tmp_path / "run", model) as one:
        evaluation = Config.model_validate(
            {
                "run": {"total_steps": 1},
                "model": {"path": model},
                "evaluation": {"task": {"name": "gsm8k"}},
            }
        ).evaluation
        one.config = one.config.unchecked_copy(update={"evaluation": evaluation})
        with pytest.raises(SetupError, match=r"no held-out problems \(set evaluation.task.eval\)"):
            one.check()


def test_a_start_that_failed_before_ray_is_repeated_and_a_stopped_trainer_is_not(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    def connect(config: Config, loop: asyncio.AbstractEventLoop, **_: object) -> None:
        loops.append(loop)
        raise SetupError("no Ray here")

    def choose(self: RunDirectory, config: Config, facts: Checked, **_: Any) -> Any:
        return 1 / 0 if fails else (facts, None)

    fails = True
    monkeypatch.setattr(RunDirectory, "whole_checkpoint", choose)
    with trainer(tmp_path / "run", model) as one:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                one.start()
        one.stop("FAILED")
        fails = False
        monkeypatch.setattr("async_grpo.run.running.Connection", connect)
        with pytest.raises(SetupError, match="no Ray here"):
            one.start()
        one.stop("FAILED")
        assert [loop.is_closed() for loop in loops] == [True]
        with pytest.raises(RunError, match="build another one"):
            one.start()


def test_a_replay_that_failed_at_its_start_is_repeated(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves nothing that looks like somebody else's directory."""

    def connect(*_: object, **__: object) -> None:
        raise SetupError("no Ray here")

    source = tmp_path / "source"
    (source / "journal").mkdir(parents=True)
    monkeypatch.setattr("async_grpo.run.trainer.plan_rerun", lambda *_, **__: Course(1, 2, None))
    monkeypatch.setattr("async_grpo.run.trainer.differences", lambda *_: [])
    monkeypatch.setattr("async_grpo.run.running.Connection", connect)
    for _ in range(2):
        with (
            pytest.raises(SetupError, match="no Ray here"),
            trainer(tmp_path / "run", model) as one,
        ):
            one.replay(source)
