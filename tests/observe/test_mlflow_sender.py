"""What MLflow refuses or another run does meanwhile, with a client that answers as MLflow does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_ALREADY_EXISTS

from async_grpo.observe.tracking.mlflow_sender import Delivery
from async_grpo.observe.tracking.outbox import OutboxEntry


def entry(**values: Any) -> OutboxEntry:
    return OutboxEntry(None, "grpo", "run", {}, artifacts=[], run_id="r", **values)


def delivery(tmp_path: Path) -> Delivery:
    outbox: Any = SimpleNamespace(run_dir=tmp_path)
    return Delivery(outbox)


class Racing:
    """An experiment that another run creates between the question and the order."""

    def __init__(self, found: str | None) -> None:
        self._answers = [None, SimpleNamespace(experiment_id=found, tags={}) if found else None]

    def get_experiment_by_name(self, name: str) -> Any:
        return self._answers.pop(0)

    def create_experiment(self, name: str, **options: Any) -> str:
        raise MlflowException(f"{name} exists", error_code=RESOURCE_ALREADY_EXISTS)


def test_an_experiment_that_another_run_created_is_taken(tmp_path: Path) -> None:
    client: Any = Racing("7")
    assert delivery(tmp_path)._experiment(client, entry()) == "7"
    client = Racing(None)
    with pytest.raises(MlflowException, match="grpo exists"):
        delivery(tmp_path)._experiment(client, entry())


class Refusing:
    """A registry that does not like a name, or does not answer."""

    def __init__(self, code: int | None) -> None:
        self._options = {} if code is None else {"error_code": code}

    def create_registered_model(self, name: str) -> None:
        raise MlflowException("a name without slashes, please", **self._options)


def test_a_name_that_the_registry_refuses_is_told_once_and_no_error(tmp_path: Path) -> None:
    one, waiting = delivery(tmp_path), entry(models={"a/b": "model"})
    client: Any = Refusing(INVALID_PARAMETER_VALUE)
    one._register(client, waiting)
    assert waiting.models == {} and one.refused == 1
    assert "could not be registered as a/b: a name without slashes" in one.refusal


def test_a_registry_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    one, waiting = delivery(tmp_path), entry(models={"a": "model"})
    client: Any = Refusing(None)
    with pytest.raises(MlflowException):
        one._register(client, waiting)
    assert waiting.models == {"a": "model"} and one.refused == 0


@pytest.mark.parametrize(
    "line", [b"[1]", b"{", b'{"step": 1}', b'{"step": 1, "time": 2, "a": "b"}']
)
def test_a_line_that_is_no_row_is_counted(tmp_path: Path, line: bytes) -> None:
    one = delivery(tmp_path)
    assert one.points(line, entry()) == [] and one.refused == 1
    assert "a line of metrics.jsonl is not a row of metrics" in one.refusal
