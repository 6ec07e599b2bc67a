"""A trainer that a script drives, with a system whose steps cost nothing: what ends training, what
callbacks do to a run, and signals. The same with real parts: tests/system/test_library_runs.py.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from async_grpo import Callback, RunError, Trainer
from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.errors import StopRequested
from async_grpo.observe.console.console import Console
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.run.running import RunningSystem
from async_grpo.tools import hub
from tests.support.verbs import train
from tests.support.wiring import tiny_model
from tests.wiring.run import doubles

ASKED = f"{__name__}:Asks"


class Asks(Callback):
    """Does something after the second learner step."""

    def __init__(self, what: str = "nothing", act: Callable[[Trainer], None] | None = None) -> None:
        self._what, self._act = what, act

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        if result["training_iteration"] != 2:
            return
        if self._act is not None:
            self._act(trainer)
        if self._what == "breaks":
            raise KeyError("no such metric")
        if self._what == "signals":
            os.kill(os.getpid(), signal.SIGTERM)
        if self._what == "finishes":
            trainer.finish("it is enough")


def settings(home: Path, **run: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(home / "run"), "total_steps": 6, **run},
            "model": {"path": tiny_model()},
            "task": {"name": "arithmetic"},
            "rollout": {"prompt_length": 16, "response_length": 6},
            "evaluation": {"max_samples": 4, "before": False},
            "tracking": {"mlflow": False, "report": False},
        }
    )


@contextmanager
def trained(home: Path, *callbacks: Callback, **run: Any) -> Iterator[tuple[Trainer, io.StringIO]]:
    said = io.StringIO()
    config = settings(home, **run)
    with doubles([]), Trainer(config, console=Console(said), callbacks=callbacks) as trainer:
        yield trainer, said


def steps(results: list[dict[str, Any]]) -> list[int]:
    return [one["training_iteration"] for one in results]


def test_train_and_steps_go_on_where_the_other_ended(tmp_path: Path) -> None:
    with trained(tmp_path) as (trainer, said):
        assert trainer.train(2)["training_iteration"] == 2
        assert steps(list(trainer.steps(2))) == [3, 4]
        result = next(iter(trainer))
        last = trainer.train()
        assert result["training_iteration"] == 5 and not result["done"]
        assert last["training_iteration"] == 6 and last["done"]
        assert trainer.train() == {} and "nothing is left to train" in said.getvalue()
    with pytest.raises(RunError, match="this trainer has run"):
        trainer.train()


def test_a_finished_run_trains_no_further_and_ends_in_order(tmp_path: Path) -> None:
    with trained(tmp_path, Asks("finishes")) as (trainer, said):
        results = list(trainer)
        assert steps(results) == [1, 2] and results[-1]["done"]
        assert said.getvalue().count("training ends here: it is enough") == 1
        assert "nothing is trained" not in said.getvalue()
        assert trainer.train() == {} and not trainer.stop_requested
        assert said.getvalue().count("nothing is trained: the run is finished (it is enough)") == 1


def test_early_stopping_of_the_yaml_ends_a_run(tmp_path: Path) -> None:
    rule = {"metric": "train/loss", "mode": "min", "patience": 2}
    with trained(tmp_path, callbacks={"early_stopping": rule}) as (trainer, said):
        results = list(trainer)
        assert steps(results) == [1, 2, 3] and results[-1]["done"]
        why = "train/loss has not improved on 0 in 2 values, the last 0 at step 3"
        assert said.getvalue().count(f"training ends here: {why}") == 1
        assert trainer.train() == {}
        assert said.getvalue().count(f"nothing is trained: the run is finished ({why})") == 1


def test_the_command_saves_and_evaluates_a_run_that_a_callback_finished(tmp_path: Path) -> None:
    config = settings(tmp_path, callbacks={ASKED: {"what": "finishes"}})
    (tmp_path / "c.yaml").write_text(dump(config))
    seen: list[Any] = []
    with doubles(seen):
        assert train([str(tmp_path / "c.yaml")]) == 0
    assert [one for one in seen if one in (1, 2, 3) or one == ("evaluate", 4)] == [
        1,
        2,
        ("evaluate", 4),
    ]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]


@pytest.mark.parametrize(
    ("what", "pushes"), [("nothing", True), ("finishes", True), ("signals", False)]
)
def test_the_command_pushes_what_was_trained_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, pushes: bool
) -> None:
    """A push that cannot even begin costs the run nothing."""
    config = settings(tmp_path, callbacks={ASKED: {"what": what}})
    (tmp_path / "c.yaml").write_text(dump(config))
    fails = mock.Mock(side_effect=OSError(12, "Cannot allocate memory"))
    push_at_end = hub.push_at_end
    with (
        doubles([]),
        mock.patch.object(hub, "push_at_end", push_at_end),
        mock.patch.object(hub.subprocess, "run", fails),
    ):
        assert train([str(tmp_path / "c.yaml"), "checkpoint.push=me/adder"]) == 0
    said = capsys.readouterr().out
    assert fails.called == pushes and said.count("pushing the final model to me/adder") == pushes
    assert said.count("not on the hub") == said.count("Cannot allocate memory") == pushes
    assert said.count(f"async-grpo export {tmp_path}/run --push me/adder --private") == pushes
    assert said.rstrip().endswith("exit code 0: done, or stopped on request")


def test_a_run_that_a_signal_ended_is_finished_and_says_that_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task without held-out problems: that is said once, and the run ends without evaluation."""
    told: list[Any] = []
    monkeypatch.setattr(Tracker, "tag", lambda _, name, value: told.append((name, value)))
    monkeypatch.setattr(Tracker, "conclude", lambda _, status: told.append(status))
    config = settings(tmp_path, callbacks={ASKED: {"what": "signals"}})
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "c.yaml").write_text(dump(config))
    task = f"task={{name: jsonl, train: {tmp_path}/rows.jsonl}}"
    with doubles([]):
        assert train([str(tmp_path / "c.yaml"), task]) == 0
    ended = ["FINISHED"]  # before the report
    assert told[-2:] == [("async_grpo.stopped", "on request, after step 2"), *ended]
    assert capsys.readouterr().out.count("no evaluation") == 1
    with doubles([]):
        assert train([str(tmp_path / "c.yaml"), task, "run.callbacks={}"]) == 0
    assert told[-2:] == [("async_grpo.stopped", "no"), *ended], "it went on to its end"


@pytest.mark.parametrize("on_error", ["fail", "count"])
def test_an_error_in_a_callback_ends_the_command_or_is_counted(
    on_error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, callbacks={ASKED: {"what": "breaks"}}, on_callback_error=on_error)
    (tmp_path / "c.yaml").write_text(dump(config))
    with doubles([]):
        code = train([str(tmp_path / "c.yaml")])
    said = capsys.readouterr().out
    assert f"callback {ASKED} raised in on_step: KeyError: 'no such metric'" in said
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if '"train/loss"' in line]
    counted = [row["callbacks/errors"] for row in rows]
    if on_error == "fail":
        assert code == 1 and counted == [0.0, 0.0]
    else:
        assert code == 0 and counted == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_callback_that_cannot_be_made_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(dump(settings(tmp_path, callbacks={"early_stop": {}})))
    with doubles([]):
        assert train([str(tmp_path / "c.yaml")]) == 2
    assert (
        "there is no callback early_stop; use early_stopping or webhook, or"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_steps_and_the_script_goes_on(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    asks = Asks(act=lambda _: os.kill(os.getpid(), number))
    with trained(tmp_path, asks) as (trainer, said):
        with trainer.draining():
            results = list(trainer)
            assert steps(results) == [1, 2] and results[-1]["done"] and trainer.stop_requested
            assert trainer.train() == {}
        assert said.getvalue().count("nothing is trained: the run was asked to end") == 1
        assert signal.getsignal(number) == before
        assert trainer.save().name == "step_000002"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (KeyError("x"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (StopRequested("x"), "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(3), "FAILED"),
    ],
    ids=repr,
)
def test_a_run_ends_as_its_block_does(
    error: BaseException | None, status: str, tmp_path: Path
) -> None:
    ended: list[str] = []

    class Ends(Callback):
        def on_end(self, trainer: Trainer, status: str) -> None:
            ended.append(status)

    with (
        pytest.raises(type(error)) if error is not None else nullcontext(),
        trained(tmp_path, Ends()) as (trainer, _),
    ):
        trainer.train(1)
        if error is not None:
            raise error
    assert ended == [status]


def test_who_is_asked_to_end_while_it_starts_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **__: Any) -> None:
        trainer.request_stop()
        assert trainer.system is None, "it raises that the run was asked to end"

    monkeypatch.setattr(RunningSystem, "start", asked)
    with pytest.raises(StopRequested), trained(tmp_path) as (trainer, said), trainer.draining():
        assert list(trainer) == []
        assert said.getvalue().count("nothing is trained: the run was asked to end") == 1
        trainer.save()


def test_calls_at_the_wrong_time_are_one_sentence(tmp_path: Path) -> None:
    async def nothing() -> int:
        return 1

    async def again(trainer: Trainer) -> None:
        trainer.train(1)

    with trained(tmp_path) as (trainer, _):
        with pytest.raises(RunError, match="the run is not started"):
            trainer.call(nothing())
        trainer.train(1)
        assert trainer.call(nothing()) == 1
        with pytest.raises(RunError, match="cannot wait for a call of its trainer"):
            trainer.call(again(trainer))
    with pytest.raises(RunError, match="the run is not started, or stopped already"):
        trainer.call(nothing())


def test_a_run_goes_back_to_a_checkpoint_of_its_own_history_only(tmp_path: Path) -> None:
    with trained(tmp_path) as (trainer, _):
        trainer.train(2)
        path = trainer.save()
        aside = path.with_name(f"{path.name}.superseded-1")
        shutil.copytree(path, aside)
        trainer.train(1)
        with pytest.raises(RunError, match="is no earlier checkpoint of"):
            trainer.restore(aside)
        trainer.finish("enough")
        trainer.restore(path)
        assert steps(list(trainer)) == [3, 4, 5, 6]


def test_draining_is_for_the_main_thread(tmp_path: Path) -> None:
    with trained(tmp_path) as (trainer, _):
        errors: list[BaseException] = []

        def drain() -> None:
            try:
                with trainer.draining():
                    pass
            except RunError as error:
                errors.append(error)

        thread = threading.Thread(target=drain)
        thread.start()
        thread.join(10)
        assert "use draining() there" in str(errors[0])


def test_a_callback_may_call_the_trainer(tmp_path: Path) -> None:
    saved: list[Path] = []
    with trained(tmp_path, Asks(act=lambda trainer: saved.append(trainer.save()))) as (trainer, _):
        assert len(list(trainer)) == 6
    assert [path.name for path in saved] == ["step_000002"] and saved[0].is_dir()


def test_a_trainer_is_built_from_a_checkpoint_with_other_settings(tmp_path: Path) -> None:
    with trained(tmp_path) as (trainer, _):
        trainer.train(2)
        path = trainer.save()
    other = Trainer.from_checkpoint(path, ["learner.lr=0.5", f"run.dir={tmp_path}/other"])
    assert other.config.learner.lr == 0.5 and other.run_dir == tmp_path / "other"
    assert other.config.rollout == trainer.config.rollout
    with doubles([]):
        other.check()
    assert other.total_steps == 6 and other._facts.checkpoint == path
    other.stop()
    with pytest.raises(ValueError, match=r"learner\.lr"):
        Trainer.from_checkpoint(path, ["learner.lr=-1"])
    with pytest.raises(RunError, match="is not a checkpoint, or was never finished"):
        Trainer.from_checkpoint(tmp_path)
