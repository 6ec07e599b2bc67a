"""A model on the hub: what is pushed, its card, what is kept from it, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from async_grpo.config.load import dump, load_config
from async_grpo.config.schema import Config
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.tools import hub as product
from tests.support.models import write_model
from tests.support.push_hub import LARGE, TOKEN, PushHub, Repository, taking_pushes
from tests.support.verbs import export, train

STEPS, PROBLEMS, KEY = 40, 1319, "sk-of-a-task"
LICENSE = "---\nlicense: other\nlicense_name: research\nlicense_link: LICENSE\n---\n# base\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PushHub]:
    """A hub for this process and its children, and a token for it."""
    with taking_pushes() as server:
        values = {"ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        values["HUGGINGFACE_CO_URL_TEMPLATE"] = (
            server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        switches = {"HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
        for name, value in (values | switches).items():
            monkeypatch.setattr(constants, name, value)
        for name, text in {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(name, text)
        yield server


def settings(place: Path, model: str, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "pushed", "dir": str(place / "run"), "total_steps": STEPS},
            "model": {"path": model},
            "task": {
                "name": "jsonl",
                "train": str(place / "rows.jsonl"),
                "options": {"api_key": KEY, "notes": f"see {place}/notes.txt"},
            },
            "tracking": {"uri": "http://me:password@tracker.internal"},
        }
        | sections
    )


def saved(
    place: Path, *, step: int = STEPS, adapter: bool = False, base: str = "", **sections: Any
) -> Path:
    """The run directory of a run with a checkpoint, metrics, and a base with a license."""
    model, run_dir = Path(base or write_model(place / "clients" / "base", hidden=32)), place / "run"
    if not base:
        (model / "README.md").write_text(LICENSE)
    draft = checkpoint.begin(run_dir, step)
    (draft / "learner" / "state.pt").write_text("moments")
    write_model(draft / "hf", seed=step)
    if adapter:
        (draft / "hf" / "adapter").mkdir()
        facts = {"base_model_name_or_path": str(model), "r": 8}
        (draft / "hf" / "adapter" / "adapter_config.json").write_text(json.dumps(facts))
    config = settings(place, str(model), **sections).model_dump(mode="json")
    code = {"version": "0.1.0", "commit": "c0ffee", "dirty": False}
    manifest = {"step": step, "total_steps": STEPS, "config": config, "code": code}
    checkpoint.commit(draft, manifest)
    evaluation = {"eval/problems": float(PROBLEMS), "time": 1.0}
    rows: list[dict[str, float]] = [{"step": 0, "eval/accuracy_greedy": 0.125, **evaluation}]
    for at in range(1, STEPS + 1):
        rows.append({"step": at, "time": 1.0, "time/step": 1.0, "rollout/score": at / STEPS})
    rows.append({"step": STEPS, "eval/accuracy_greedy": 0.625, **evaluation})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def pushed(hub: PushHub, place: Path, name: str = "me/adder") -> Path:
    """A directory with what the hub has of a repository."""
    place.mkdir()
    for path, data in hub.repositories[name].files.items():
        (place / path).write_bytes(data)
    return place


def test_a_model_is_pushed_in_one_commit_and_loads(hub, tmp_path, capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = saved(tmp_path)
    newest = checkpoint.latest(run_dir)
    assert newest is not None
    capsys.readouterr()
    assert export([str(run_dir), "--push", "me/adder", "--private"]) == 0
    said = capsys.readouterr()
    assert f"at {hub.url}/me/adder; load with AutoModelForCausalLM" in said.out
    repository = hub.repositories["me/adder"]
    assert repository.private and len(repository.commits) == 1
    large = repository.files["model.safetensors"]
    assert len(large) > LARGE and large == (newest / "hf" / "model.safetensors").read_bytes()
    out = pushed(hub, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).encode("1+1=")
    checkpoint.verify(newest)  # what was pushed was linked, and nothing is written there
    assert not (newest / "hf" / "README.md").exists()
    assert TOKEN not in said.out + said.err


def test_the_card_says_what_the_run_was(hub, tmp_path) -> None:
    assert export([str(saved(tmp_path)), "--push", "me/adder"]) == 0
    assert not hub.repositories["me/adder"].private
    out = pushed(hub, tmp_path / "out")
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", "research")
    assert card.data.base_model is None, "a local model has no name on the hub"
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags == ["reinforcement-learning", "grpo", "async_grpo"]
    [result] = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.625)
    assert f"after {STEPS} of {STEPS} steps" in card.text and "task jsonl" in card.text
    assert "commit c0ffee" in card.text and "- `learner.lr`: " in card.text
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", card.text, re.MULTILINE)
    assert 6 <= len(rows) <= 12
    assert rows[0] == ("0", f" | 0.125 | {PROBLEMS}")
    assert rows[-1] == (str(STEPS), f"1 | 0.625 | {PROBLEMS}")


def test_the_card_of_an_earlier_checkpoint_knows_nothing_of_later_steps(hub, tmp_path) -> None:
    assert export([str(saved(tmp_path, step=20)), "--push", "me/adder"]) == 0
    card = ModelCard(hub.repositories["me/adder"].files["README.md"].decode())
    assert card.data.eval_results[0].metric_value == 0.125 and f"20 of {STEPS} steps" in card.text
    assert max(map(int, re.findall(r"^\| (\d+) \|", card.text, re.MULTILINE))) == 20


def test_nothing_of_this_machine_is_published(hub, tmp_path) -> None:
    run_dir = saved(tmp_path, adapter=True)
    assert export([str(run_dir), "--push", "me/adder"]) == 0
    checkpoint.verify(checkpoint.find(run_dir))  # another base is named in a copy
    files = hub.repositories["me/adder"].files
    everything = b"".join(data for name, data in files.items() if "safetensors" not in name)
    for private in (str(tmp_path), "password", "internal", KEY, TOKEN, "clients", "/run"):
        assert private.encode() not in everything, private
    out = pushed(hub, tmp_path / "out")
    config = load_config(out / "training_config.yaml")
    assert config.model.path == "base" and config.task.train == "rows.jsonl"
    assert config.task.options == {"api_key": "***", "notes": "see notes.txt"}
    assert config.run.total_steps == STEPS


def test_an_address_and_a_tag_are_no_directories() -> None:
    kept = {"data": "s3://bucket/rows/a.jsonl", "prompt": "<a>x</a><b>1/2</b>/no_think and/or"}
    assert product.public(kept | {"max_tokens": 7, "dir": "x"}) == kept | {"max_tokens": 7}
    assert product.public(["/a/b/c.txt", "~/a/b", "file:///a/b"]) == ["c.txt", "b", "b"]


def test_adapters_name_their_base_and_data_of_the_hub(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = {"name": "gsm8k", "train": "openai/gsm8k:main"}
    run_dir = saved(tmp_path, adapter=True, base="them/base-0.5B", task=task)
    newest = checkpoint.latest(run_dir)
    assert export([str(run_dir), "--push", "me/alone"]) == 0
    card = ModelCard(hub.repositories["me/alone"].files["README.md"].decode())
    assert (card.data.base_model, card.data.library_name) == ("them/base-0.5B", "peft")
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.license is None and "not known, look it up" in card.text
    facts = json.loads(hub.repositories["me/alone"].files["adapter_config.json"])
    assert facts == {"base_model_name_or_path": "them/base-0.5B", "r": 8}
    assert checkpoint.verify(newest)
    assert export([str(run_dir), "--push", "me/merged", "--merge-lora"]) == 0
    files = hub.repositories["me/merged"].files
    assert "model.safetensors" in files and "adapter_config.json" not in files


def test_what_a_push_before_left_is_not_loaded_with_it(hub, tmp_path) -> None:
    """An adapter, and shards, which would be taken in place of the file that is pushed now."""
    left = ["adapter_config.json", "model-00001-of-00002.safetensors", "model.safetensors"]
    mine = Repository(private=False, files=dict.fromkeys([*left, "notes.txt"], b"before"))
    hub.repositories["me/adder"] = mine
    assert export([str(saved(tmp_path)), "--push", "me/adder", "--private"]) == 0
    assert not mine.private, "a repository that is there stays as it is"
    assert mine.files["notes.txt"] == b"before" and mine.files["model.safetensors"] != b"before"
    [(_, removed)] = mine.commits
    assert sorted(removed) == left[:2]


def test_into_a_directory_too_and_a_checkpoint_without_its_run(hub, tmp_path, capsys) -> None:
    newest = checkpoint.latest(saved(tmp_path))
    assert newest is not None
    aside, out = newest.rename(tmp_path / "best"), tmp_path / "out"
    assert export([str(aside), str(out), "--push", "me/adder"]) == 0
    assert (out / "README.md").read_bytes() == hub.repositories["me/adder"].files["README.md"]
    assert not (out / "model.safetensors").is_symlink()
    assert ModelCard.load(out / "README.md").data.eval_results is None


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        (
            "/api/repos/create",
            401,
            "the hub says 401 to Bearer *** (may the token of HF_TOKEN write there?)",
        ),
        (
            "/api/repos/create",
            403,
            "the hub says 403 to Bearer *** (may the token of HF_TOKEN write there?)",
        ),
        ("/api/repos/create", 500, "the push to me/adder failed: the hub says 500 to Bearer ***\n"),
        ("/api/models/me/adder/commit", 403, "the hub says 403"),
        ("/lfs/", 403, "the hub says 403 to None (may"),
        ("gone", None, "Connection refused"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    hub, tmp_path, capsys, path: str, status: int | None, sentence: str
) -> None:
    run_dir = saved(tmp_path)
    hub.faults = {path: status}
    if path == "gone":
        hub.shutdown()
        hub.server_close()
    capsys.readouterr()
    assert export([str(run_dir), "--push", "me/adder"]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("error: ") == 1 and not said.out
    assert "Traceback" not in said.err and TOKEN not in said.err
    assert not any(one.commits for one in hub.repositories.values())


@pytest.mark.parametrize("name", ["adder", "me/a/b", "me/a b", "me/..", "me--you/x", "", "/x"])
def test_a_name_is_refused_before_the_hub_is_asked(hub, tmp_path, capsys, name: str) -> None:
    assert export([str(tmp_path), "--push", name]) == 2
    said = capsys.readouterr().err
    assert f"{name!r} is no repository of the hub, owner/name" in said and said.count("\n") == 1
    assert hub.asked == []


def test_a_run_begins_only_where_it_may_push(hub, tmp_path, monkeypatch, capsys) -> None:
    file, model = tmp_path / "run.yaml", write_model(tmp_path / "model", hidden=32)
    file.write_text(dump(settings(tmp_path, model, task={"name": "arithmetic"})))

    def refused(name: str, sentence: str) -> None:
        assert train([str(file), f"checkpoint.push={name}"]) == 2
        assert sentence in capsys.readouterr().out
        assert not (tmp_path / "run").exists()

    refused("adder", "'adder' is no repository of the hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("me/adder", "HF_HUB_OFFLINE forbids")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    refused("me/adder", "no token to push to me/adder: set HF_TOKEN")
    assert hub.asked == []


@pytest.mark.slow
def test_a_run_that_is_over_pushes_or_says_how(hub, tmp_path, capfd) -> None:
    run_dir = saved(tmp_path)
    assert product.push_at_end(run_dir, "me/adder") == ("on the hub", "me/adder")
    assert hub.repositories["me/adder"].private
    hub.faults = {"/api/repos/create": 403}
    capfd.readouterr()
    title, text = product.push_at_end(run_dir, "me/other")
    again = f"to try again: async-grpo export {run_dir} --push me/other --private"
    assert title == "not on the hub" and text.endswith(again)
    said = capfd.readouterr()
    assert "error: the push to me/other failed: the hub says 403" in said.err
    assert TOKEN not in said.out + said.err


def test_a_hub_that_hangs_ends_with_its_deadline(hub, tmp_path, monkeypatch) -> None:
    hub.faults = {"/": None}
    monkeypatch.setattr(product, "START_S", 0.5)
    began = time.monotonic()
    title, text = product.push_at_end(saved(tmp_path), "me/adder")
    assert title == "not on the hub" and "timed out after" in text and "to try again" in text
    assert time.monotonic() - began < 30 and os.environ["HF_TOKEN"] not in text
