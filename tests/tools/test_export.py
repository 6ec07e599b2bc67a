"""The model of a checkpoint in a directory of its own: whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.run.checkpoint import directory as checkpoint
from tests.support.models import write_model
from tests.support.verbs import export


def saved(run_dir: Path, step: int, *, adapter: bool = False) -> Path:
    """A checkpoint with a real model, as a learner leaves it."""
    draft = checkpoint.begin(run_dir, step)
    (draft / "learner" / "state.pt").write_text("moments")
    write_model(draft / "hf", seed=step)
    if adapter:
        (draft / "hf" / "adapter").mkdir()
        (draft / "hf" / "adapter" / "adapter_config.json").write_text("{}")
    return checkpoint.commit(draft, {"step": step})


def test_the_newest_checkpoint_of_a_run_loads_by_itself(tmp_path, capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved(tmp_path / "run", 1)
    newest, out = saved(tmp_path / "run", 2), tmp_path / "new" / "model"
    capsys.readouterr()
    assert export([str(tmp_path / "run"), str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("model of step 2: ") and f"from_pretrained('{out}')" in said
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (newest / "hf").iterdir()}
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).encode("1+1=")
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_adapters_alone_or_merged(tmp_path, capsys) -> None:
    path = saved(tmp_path, 3, adapter=True)
    assert export([str(path), str(tmp_path / "alone")]) == 0
    assert [one.name for one in (tmp_path / "alone").iterdir()] == ["adapter_config.json"]
    assert "adapters of step 3" in capsys.readouterr().out
    assert export([str(path), str(tmp_path / "merged"), "--merge-lora"]) == 0
    names = {one.name for one in (tmp_path / "merged").iterdir()}
    assert "config.json" in names and "adapter" not in names


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path, out: (path / "manifest.json").unlink(), "is no checkpoint and has none"),
        (lambda path, out: (path / "hf" / "config.json").write_text("{]"), "cannot be exported"),
        (lambda path, out: out.mkdir() or (out / "mine").write_text("x"), "is there already"),
        (lambda path, out: out.write_text("x"), "is there already"),
    ],
    ids=["no_checkpoint", "damaged", "not_empty", "a_file"],
)
def test_what_is_refused_leaves_nothing(tmp_path, capsys, spoil, sentence) -> None:
    path, out = saved(tmp_path / "run", 1), tmp_path / "out"
    spoil(path, out)
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert export([str(path), str(out)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_there_is_nothing_to_merge(tmp_path, capsys) -> None:
    assert export([str(saved(tmp_path, 1)), str(tmp_path / "out"), "--merge-lora"]) == 2
    assert "no adapters to merge" in capsys.readouterr().err


def test_a_checkpoint_by_another_name_into_the_current_directory(
    tmp_path, capsys, monkeypatch
) -> None:
    aside = saved(tmp_path / "run", 4).rename(tmp_path / "best")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert export([str(aside), "."]) == 0
    assert "model of step 4" in capsys.readouterr().out
    assert (tmp_path / "here" / "config.json").is_file()


def test_one_word_is_where_to_and_the_newest_run_is_meant(tmp_path, capsys, monkeypatch) -> None:
    saved(tmp_path / "runs" / "mine", 5)
    (tmp_path / "runs" / "mine" / "status.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert export(["out"]) == 0
    assert "model of step 5" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").is_file()
    assert export([]) == 2
    assert "runs is there already" in capsys.readouterr().err
