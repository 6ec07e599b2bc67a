"""What MLflow refuses or another run does meanwhile, with a client that answers as MLflow does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_ALREADY_EXISTS

from async_grpo.observe.tracking.mlflow_sink import MlflowSink
from async_grpo.observe.tracking.sink import Refused, RunFacts

FACTS = RunFacts(uri=None, experiment="grpo", name="run", parameters={})


@pytest.fixture
def sink(tmp_path: Path) -> MlflowSink:
    return MlflowSink(None, tmp_path)


class Racing:
    """An experiment that another run creates between the question and the order."""

    def __init__(self, found: str | None) -> None:
        self.tags: list[str] = []
        self._answers = [None, SimpleNamespace(experiment_id=found, tags={}) if found else None]

    def get_experiment_by_name(self, name: str) -> Any:
        return self._answers.pop(0)

    def create_experiment(self, name: str, *_: Any) -> str:
        raise MlflowException(f"{name} exists", error_code=RESOURCE_ALREADY_EXISTS)

    def set_experiment_tag(self, experiment: str, name: str, value: str) -> None:
        self.tags.append(name)

    def search_runs(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def create_run(self, experiment: str, *_: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"of experiment {experiment}"))


def test_an_experiment_that_another_run_created_is_taken(
    sink: MlflowSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Racing("7")
    monkeypatch.setattr("mlflow.MlflowClient", lambda tracking_uri: client)
    assert sink.start(FACTS) == "of experiment 7"
    assert client.tags == ["mlflow.experimentKind"]
    monkeypatch.setattr("mlflow.MlflowClient", lambda tracking_uri: Racing(None))
    with pytest.raises(MlflowException, match="grpo exists"):
        MlflowSink(None, tmp_path).start(FACTS)


class Refusing:
    """A registry that does not like a name, or does not answer."""

    def __init__(self, code: int | None) -> None:
        self._options = {} if code is None else {"error_code": code}

    def create_registered_model(self, name: str) -> None:
        raise MlflowException("a name without slashes, please", **self._options)


def test_a_name_that_the_registry_refuses_is_told_from_one_that_does_not_answer(
    sink: MlflowSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlflow.MlflowClient", lambda tracking_uri: Refusing(INVALID_PARAMETER_VALUE)
    )
    with pytest.raises(Refused, match="be registered as a/b: a name without slashes, please"):
        sink.register("r", "a/b", "model")
    monkeypatch.setattr("mlflow.MlflowClient", lambda tracking_uri: Refusing(None))
    with pytest.raises(MlflowException):
        MlflowSink(None, tmp_path).register("r", "a", "model")
