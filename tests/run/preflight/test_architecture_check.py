"""Whether learner and engine can compute a model, told before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.learner.forward_choice import choose
from async_grpo.run.preflight import architecture
from async_grpo.run.preflight.architecture import check_architecture
from async_grpo.run.preflight.engine_trial import copy_processors
from tests.support import unrepaired
from tests.support.families import write_family
from tests.support.models import write_model

UNASKED = {"refused": "", "sure": False}


@pytest.fixture(autouse=True)
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "ANSWERS", str(tmp_path / "answers"))


def config(model: str, **rollout: int) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": model},
            "rollout": {"prompt_length": 16, "response_length": 16, "group_size": 4} | rollout,
        }
    )


def notes(model: str, **rollout: int) -> list[str]:
    return list(check_architecture(config(model, **rollout), model))


@pytest.mark.slow  # a self-check of a run that finds it too: tests/system/test_model_runs.py
def test_publications_that_do_not_arrive_are_seen_on_a_copy(tmp_path: Path) -> None:
    """In engines that pack experts only once, as vLLM does by itself."""
    write_family("qwen3_moe", tmp_path / "model")
    with unrepaired.in_engines(), pytest.raises(SetupError) as caught:
        notes(str(tmp_path / "model"))
    said = str(caught.value)
    assert "which the engine cannot run: new weights do not arrive in it, or it leaves out" in said
    assert ": log-probs are " in said


def test_a_sure_answer_is_asked_once_for_models_of_a_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    answer = {"refused": "it has no legs", "sure": False}
    monkeypatch.setattr(architecture, "_ask", lambda what: asked.append(what) or answer)
    one, other = (
        write_model(tmp_path / name, hidden=size) for name, size in (("a", 64), ("b", 64))
    )
    for _ in range(2):
        with pytest.raises(SetupError, match="which the engine cannot run: it has no legs"):
            notes(one)
    assert len(asked) == 2, "what may have been an accident is asked again"
    answer["sure"] = True
    for model in (one, other):
        with pytest.raises(SetupError, match="no legs"):
            notes(model)
    assert len(asked) == 3
    tied = write_model(tmp_path / "tied", tied=True)
    with pytest.raises(SetupError, match="no legs"):
        notes(tied)
    assert len(asked) == 4 and asked[-1]["arguments"]["model"] == tied


def change(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "whose weights are quantized (fp8), and training changes whole ones: name the model "
            "from which it was made",
        ),
        (
            {"model_type": "llama9000"},
            f"of model_type llama9000, which transformers {version('transformers')} does not "
            "know: install one that does, or train another model",
        ),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
            "whose config.json names custom Python code (mine.Config): read it, and if you "
            "trust it set `model.trust_remote_code` to true",
        ),
    ],
)
def test_what_config_json_says_is_read_before_anything_is_tried(
    tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    write_family("llama", tmp_path / "model")
    change(tmp_path / "model", **values)
    with pytest.raises(SetupError) as caught:
        notes(str(tmp_path / "model"))
    assert str(caught.value) == f"`model.path` is {tmp_path}/model, {says}"


def test_quantized_weights_are_evaluated_as_far_as_the_engine_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "_ask", lambda _: UNASKED)
    write_family("llama", tmp_path)
    change(tmp_path, quantization_config={"quant_method": "fp8"})
    assert list(check_architecture(config(str(tmp_path)), str(tmp_path), learner=False)) == []


def test_gradient_checkpointing_that_a_model_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "_ask", lambda _: UNASKED)
    write_family("llama", tmp_path)
    asked = config(str(tmp_path))
    asked = asked.model_copy(
        update={"learner": asked.learner.model_copy(update={"gradient_checkpointing": True})}
    )
    assert list(check_architecture(asked, str(tmp_path))) == []
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(
        SetupError, match=r"`learner\.gradient_checkpointing` is true, .* it with llama: set"
    ):
        list(check_architecture(asked, str(tmp_path)))
    assert list(check_architecture(config(str(tmp_path)), str(tmp_path))) == []  # `auto` does not
    learner = config(str(tmp_path)).learner.model_copy(update={"activation_offload": True})
    asked = asked.model_copy(update={"learner": learner})
    with pytest.raises(
        SetupError, match=r"`learner\.activation_offload` is true, .* it with llama: set"
    ):
        list(check_architecture(asked, str(tmp_path)))


def test_routing_replay_of_a_model_without_experts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "_ask", lambda _: UNASKED)
    for name in ("llama", "mixtral"):
        write_family(name, tmp_path / name)
        asked = config(str(tmp_path / name))
        changes = {"routing_replay": "r2", "ppo_epochs": 2}
        learner = asked.learner.model_copy(update=changes)
        asked = asked.model_copy(update={"learner": learner})
        if name == "llama":
            with pytest.raises(SetupError, match="is set; llama has no router whose experts"):
                list(check_architecture(asked, str(tmp_path / name)))
        else:
            list(check_architecture(asked, str(tmp_path / name)))


def test_a_model_whose_sequences_ranks_cannot_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "_ask", lambda _: UNASKED)
    says = {"mamba2": "mamba2 has layers that need a whole", "llama": "attention has 4 heads"}
    for name, size in (("mamba2", 2), ("llama", 8), ("llama", 2)):
        write_family(name, tmp_path / name)
        asked = config(str(tmp_path / name))
        changes = {"ranks": size, "sequence_parallel": size}
        learner = asked.learner.model_copy(update=changes)
        asked = asked.model_copy(update={"learner": learner})
        if (name, size) == ("llama", 2):
            list(check_architecture(asked, str(tmp_path / name)))
        else:
            with pytest.raises(SetupError, match=f"sequence_parallel is {size}, .*{says[name]}"):
                list(check_architecture(asked, str(tmp_path / name)))


def test_a_model_whose_own_forward_pass_fails_is_refused() -> None:
    xmod = AutoConfig.for_model(
        "xmod", hidden_size=64, num_attention_heads=2, num_hidden_layers=2, vocab_size=128,
        intermediate_size=64, is_decoder=True, languages=["en"],
    )  # fmt: skip
    with pytest.raises(SetupError, match=r"forward pass fails \(ValueError: Input language"):
        choose(xmod, trust_remote_code=False)


def test_an_engine_finds_what_lies_beside_the_weights(tmp_path: Path) -> None:
    model, small = tmp_path / "model", tmp_path / "small"
    for place in (model, small):
        place.mkdir()
        (place / "config.json").write_text(place.name)
    for name in ("preprocessor_config.json", "processing_mine.py", "chat_template.jinja",
                 "model.safetensors.index.json", "model.safetensors"):  # fmt: skip
        (model / name).write_text(name)
    copy_processors(str(model), small)
    assert {path.name: path.read_text() for path in small.iterdir()} == {
        "config.json": "small",
        "preprocessor_config.json": "preprocessor_config.json",
        "processing_mine.py": "processing_mine.py",
        "chat_template.jinja": "chat_template.jinja",
    }


def test_what_a_forward_pass_costs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "_ask", lambda _: UNASKED)
    for name in ("bloom", "gemma2", "llama"):
        write_family(name, tmp_path / name)
    [rows] = notes(str(tmp_path / "bloom"), prompt_length=48)
    assert rows == (
        "note: bloom is computed by its own forward pass in padded sequences, so that a prompt is "
        "computed once for every response: with these lengths up to 2.3 times the tokens "
        "(docs/reference/models.md)"
    )
    [logits] = notes(str(tmp_path / "gemma2"))
    assert "memory grows with the square of the sequence length" in logits
    assert notes(str(tmp_path / "llama")) == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("import sys; sys.exit('no luck')", "vLLM could not be asked .*: no luck"),
        ("import time; time.sleep(60)", "vLLM did not say within 1 s"),
    ],
)
def test_an_engine_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, says: str
) -> None:
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda _, **rest: run([sys.executable, "-c", command], **rest)
    )
    monkeypatch.setattr(architecture, "ENGINE_ANSWER_S", 1.0)
    with pytest.raises(SetupError, match=says):
        notes(write_model(tmp_path / "model"))
