"""What a configuration names and is not there: each fault is planted, and named in one sentence."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import yaml

from async_grpo.tools.doctor import machine, services
from tests.support.hub import serving

Look = Callable[..., dict[str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the files of a model, as far as their names are looked at."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def look(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Look at a run of that model with other settings; the sentences of what is wrong."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "WRITTEN", 2**14)
    monkeypatch.setattr(machine, "LEAST_MIB_S", 0.0)
    monkeypatch.setattr(machine, "LEAST_DISK_GIB", 0.0)
    settings = {
        "run": {"name": "r", "dir": str(tmp_path / "runs/r"), "total_steps": 1},
        "model": {"path": str(model)},
        "task": {"name": "arithmetic"},
        "tracking": {"mlflow": False},
    }
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(settings))

    def look(*words: str) -> dict[str, str]:
        rows = machine.each({"config": lambda: services.services(str(file), list(words))})
        return {label: fault for _, label, _, fault, _ in rows if fault}

    return look


def test_a_run_that_has_all_that_it_names(look: Look, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert look() == {}
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_a_setting_that_does_not_exist(look: Look) -> None:
    assert "`rollout.grup_size` is not a setting." in look("rollout.grup_size=8")["config"]


@pytest.mark.parametrize(
    ("name", "lacks"), [("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")]
)
def test_a_model_that_lacks_files(look: Look, model: Path, name: str, lacks: str) -> None:
    (model / name).unlink()
    said = f"`model.path` is {model}, which has no {lacks}: fetch it again"
    assert look() == {"model.path": said}


def test_a_directory_that_is_no_model(look: Look, model: Path) -> None:
    (model / "config.json").unlink()
    found = look()["files"]
    assert found.startswith("`model.path` is ")
    assert ", which has no config.json; allowed is a directory of a Hugging Face model" in found


def test_a_model_of_the_hub(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own client asks: a hub that has it, one that does not, and none."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    how = "name a directory, or see to HF_TOKEN, HF_HUB_OFFLINE and the network"
    with serving("some-body/model-one", {}) as hub:
        address = f"http://127.0.0.1:{hub.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        assert look("model.path=some-body/model-one") == {}
        said = look("model.path=some-body/model-two")["model.path"]
        begin = "`model.path` is some-body/model-two, not in the cache nor from the hub ("
        assert said.startswith(begin) and "404" in said and said.endswith(f"): {how}")
    said = look("model.path=some-body/model-one")
    begin = "`model.path` is some-body/model-one, not in the cache nor from the hub "
    assert said == {"model.path": f"{begin}([Errno 111] Connection refused): {how}"}


def test_a_hub_that_is_silent_is_left(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(services, "HUB_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        begun = time.monotonic()
        assert "timed out" in look("model.path=some-body/model-one")["model.path"]
        assert time.monotonic() - begun < 3


def test_a_model_in_the_cache_is_not_asked_for(
    look: Look, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_info(*_: object, **__: object) -> None:
        pytest.fail("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    cached = str(model / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: cached)
    assert look("model.path=some/model") == {}


def test_a_hub_that_may_not_be_asked(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    found = look("model.path=nobody/nothing-of-that-name")["model.path"]
    assert "offline mode is enabled" in found


def test_a_tracking_server_that_does_not_answer(look: Look) -> None:
    found = look("tracking.mlflow=true", "tracking.uri=http://127.0.0.1:1")
    said = "`tracking.uri` is http://127.0.0.1:1, where nothing answers (Connection refused)"
    assert found["trackers"].startswith(said)


def test_a_run_on_gpus_that_are_not_there(look: Look) -> None:
    assert "asks for 1 learner rank with a GPU" in look("cluster.device=cuda")["devices"]


def test_a_run_directory_that_is_a_file(look: Look, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    found = look()
    assert "which cannot be created or written: Not a directory." in found["files"]


def test_the_disk_is_that_of_the_run_directory(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LEAST_DISK_GIB", 1e9)
    assert f" GiB are free in {tmp_path}, and a small run needs 1e+09" in look()["disk"]
