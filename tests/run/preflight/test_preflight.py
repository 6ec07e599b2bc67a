"""Model, tokenizer and prompts that do not fit each other are found before anything starts, and
those that fit pass.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import socket
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_grpo.config import operation, schema
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start.cache import cache_path
from async_grpo.errors import SetupError
from async_grpo.run.preflight import model as preflight
from async_grpo.run.preflight.model import SAMPLE, SOME_ROWS, _check_weights, check_fit, rate_notes
from async_grpo.run.trainer import Trainer
from async_grpo.tasks.arithmetic import Arithmetic
from async_grpo.tasks.base import Problem
from async_grpo.tasks.registry import load_task
from tests.support.judge_models import write_judge, write_reward_model
from tests.support.models import write_model


@pytest.fixture(autouse=True)
def engine_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM says is not asked here: tests/run/preflight/test_architecture_check.py."""
    answer = {"refused": "", "sure": False}
    monkeypatch.setattr("async_grpo.run.preflight.architecture._ask", lambda _: answer)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def config(model: Path, *, rollout: dict[str, Any] | None = None, **task: Any) -> Config:
    lengths = {"prompt_length": 12, "response_length": 12, "rollout_batch_size": 4}
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": str(model)},
            "task": task,
            "rollout": lengths | (rollout or {}),
        }
    )


def fit(model: Path, *, rollout: dict[str, Any] | None = None, **task: Any) -> list[str]:
    wanted = config(model, rollout=rollout, **task)
    return list(check_fit(wanted, str(model), load_task(wanted.task, wanted.seed)))


def refused(model: Path, *, rollout: dict[str, Any] | None = None, **task: Any) -> str:
    with pytest.raises(SetupError) as caught:
        fit(model, rollout=rollout, **task)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut_vocabulary(model: Path, rows: int) -> None:
    change(model / "config.json", vocab_size=rows)
    [file] = model.glob("*.safetensors")
    weights = {name: one.clone() for name, one in load_file(file).items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:rows].clone()
    save_file(weights, file, metadata={"format": "pt"})


def rows(path: Path, prompts: list[Any]) -> str:
    key = "messages" if isinstance(prompts[0], list) else "prompt"
    path.write_text("".join(json.dumps({key: prompt, "answer": "a"}) + "\n" for prompt in prompts))
    return str(path)


def test_what_fits_passes(good: Path) -> None:
    assert fit(good) == []


@pytest.mark.parametrize(
    ("bound", "schedule", "told"),
    [
        (8, "constant", 1),
        (7, "constant", 0),
        (8, "linear", 0),
        (16, "cosine", 0),
        (16, "settle", 0),
    ],
)
def test_a_constant_rate_with_old_data_is_warned_of(bound: int, schedule: str, told: int) -> None:
    settings = [f"replay.max_staleness={bound}", f"learner.schedule={schedule}"]
    notes = list(rate_notes(load_config("configs/quickstart.yaml", settings)))
    assert len(notes) == told and all("learner.schedule: linear" in note for note in notes)


# ---- the model's files


def test_a_config_that_cannot_be_read(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(model)
    (model / "config.json").write_text("[]")
    assert "no JSON object" in refused(model)


def test_a_model_without_a_usable_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refused(model)
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "needs its tokenizer in the same directory" in refused(model)


def test_a_model_that_is_nowhere(monkeypatch: pytest.MonkeyPatch, good: Path) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("There is no such model. And here are many more words")

    monkeypatch.setattr("transformers.utils.cached_file", unreachable)
    assert refused(good).endswith(
        "cannot be loaded: There is no such model. Name a model of the hub, or a local directory"
    )


def test_no_end_of_a_response(tmp_path: Path) -> None:
    model = Path(write_model(tmp_path / "model", ends=False))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "names no end-of-sequence token" in refused(model)


# ---- sizes


def test_files_of_another_architecture(model: Path) -> None:
    """The names that would be published are compared before a weight is read."""
    change(model / "config.json", model_type="qwen3_moe", num_experts=8)
    message = refused(model)
    assert "are not those that the engine loads" in message and "experts" in message


def test_rows_longer_than_the_models_positions(model: Path) -> None:
    message = refused(model, rollout={"prompt_length": 1000, "response_length": 25})
    assert (
        "`rollout.prompt_length` 1000 + `rollout.response_length` 25 = 1025 tokens" in message
        and "max_position_embeddings 1024" in message
    )
    assert fit(model, rollout={"prompt_length": 1000, "response_length": 24}) == []
    change(model / "config.json", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert fit(model, rollout={"prompt_length": 1000, "response_length": 25}) == [], (
        "stretched positions reach further"
    )


@pytest.mark.parametrize(
    ("rope", "key", "reach"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings", 1024),
        (
            {"type": "longrope", "original_max_position_embeddings": 100},
            "original_max_position_embeddings",
            100,
        ),
    ],
)
def test_rows_behind_which_all_positions_change(
    model: Path, rope: dict[str, Any], key: str, reach: int
) -> None:
    """A row would get other positions beside a longer one."""
    kind = rope.get("rope_type", rope.get("type"))
    change(model / "config.json", rope_scaling=rope)
    message = refused(model, rollout={"prompt_length": reach - 24, "response_length": 25})
    assert f"= {reach + 1} tokens" in message
    assert f"has {key} {reach} and rope type {kind}" in message
    shorter = fit if kind == "dynamic" else refused  # without factors, which transformers wants
    said = shorter(model, rollout={"prompt_length": reach - 24, "response_length": 24})
    assert "rope type" not in said


def test_the_sizes_of_a_language_model_inside_another(model: Path) -> None:
    change(model / "config.json", text_config={"vocab_size": 100, "max_position_embeddings": 20})
    assert "max_position_embeddings 20" in refused(model)


def test_a_tokenizer_of_another_model(model: Path) -> None:
    change(model / "config.json", vocab_size=90)
    message = refused(model)
    assert (
        "the tokenizer gives token ids up to 97" in message
        and "is 90" in message
        and "the model has 90 (vocab_size" in message
    )


def test_added_tokens_that_nobody_uses_may_lie_outside_but_not_in_a_prompt(
    model: Path, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(model)
    cut_vocabulary(model, 98)
    assert fit(model) == []
    train = rows(tmp_path / "rows.jsonl", ["fine", "an <image>"])
    assert "training problem 1 has token id 98, the model has 98" in refused(
        model, name="jsonl", train=train
    )


# ---- prompts


def test_prompts_that_are_too_long_are_counted_with_an_example(good: Path, tmp_path: Path) -> None:
    train = rows(tmp_path / "rows.jsonl", ["short"] * 9 + ["a prompt of 24 tokens !!"])
    message = refused(good, name="jsonl", train=train)
    assert "1 of 10 sampled prompts have more than `rollout.prompt_length` 12 tokens" in message
    assert (
        "training problem 9 has 24 ('a prompt of 24 tokens !!')" in message
        and "task.max_bad_fraction, now 0)" in message
    )
    assert fit(good, name="jsonl", train=train, rollout={"prompt_length": 24}) == []
    [note] = fit(good, name="jsonl", train=train, max_bad_fraction=0.1)
    assert note.startswith("note: 1 of 10") and "left out" in note
    assert "2 of 3" in refused(
        good,
        name="jsonl",
        train=rows(tmp_path / "more.jsonl", ["x" * 20, "y", "z" * 30]),
        max_bad_fraction=0.5,
    )


def test_the_sample_is_spread_over_the_problems(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    wanted = config(good, name="arithmetic")
    task = load_task(wanted.task, 0)
    pose = task.train

    def train(index: int) -> Problem:
        asked.append(index)
        return pose(index)

    monkeypatch.setattr(task, "train", train)
    assert list(check_fit(wanted, str(good), task)) == []
    assert len(asked) == SAMPLE and asked[0] == 0 and asked[-1] > 0.99 * len(task)
    for count in (1, 2, SAMPLE - 1, SAMPLE, SAMPLE + 1, 3 * SAMPLE + 1):
        asked.clear()
        monkeypatch.setattr(type(task), "__len__", lambda self, count=count: count)
        list(check_fit(wanted, str(good), task))
        assert (
            len(asked) == len(set(asked))
            and min(count, SAMPLE / 2) <= len(asked) <= SAMPLE
            and max(asked) < count
        )


def test_messages_need_a_template_that_takes_them(model: Path, tmp_path: Path) -> None:
    train = rows(
        tmp_path / "rows.jsonl",
        [[{"role": "system", "content": "be"}, {"role": "user", "content": "q"}]],
    )
    assert "has no chat template" in refused(model, name="jsonl", train=train)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    assert fit(model, name="jsonl", train=train) == []
    [note] = fit(model, name="jsonl", train=rows(tmp_path / "plain.jsonl", ["q"]))
    assert "has a chat template, but the prompts of task jsonl are plain text" in note
    (model / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    assert "System role not supported; is its chat template made for these messages" in refused(
        model, name="jsonl", train=train
    )
    (model / "chat_template.jinja").write_text("{{ '' }}")
    assert "training problem 0 of task jsonl is an empty prompt" in refused(
        model, name="jsonl", train=train
    )


def test_a_task_that_cannot_pose_its_problems(good: Path) -> None:
    class Broken:
        weights: ClassVar[dict[str, float]] = {"a": 1.0}

        def __len__(self) -> int:
            return 3

        def train(self, index: int) -> Problem:
            raise KeyError("question")

    with pytest.raises(
        SetupError, match="task arithmetic cannot pose training problem 0: KeyError: 'question'"
    ):
        list(check_fit(config(good), str(good), Broken()))


def test_rows_that_were_left_out_are_told(good: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "answer": "a"}\n' * 3 + "{\n")
    [note] = fit(good, name="jsonl", train=str(tmp_path / "rows.jsonl"), max_bad_fraction=0.25)
    assert (
        "1 of 4 rows are malformed and left out, as task.max_bad_fraction 0.25 allows: "
        "line 4: not JSON on one line" in note
    )


def test_a_model_that_is_still_to_be_made(good: Path, tmp_path: Path) -> None:
    values = {
        "run": {"total_steps": 2},
        "model": {"warm_start": {"cache_dir": str(tmp_path)}},
        "rollout": {"prompt_length": 256, "response_length": 256},
    }
    wanted = Config.model_validate(values)
    task = load_task(wanted.task, wanted.seed)
    assert preflight.look(wanted, task) is None
    longer = Config.model_validate(
        values | {"rollout": {"prompt_length": 256, "response_length": 257}}
    )
    with pytest.raises(
        SetupError, match="= 513 tokens, but a warm-started model has max_position_embeddings 512"
    ):
        preflight.look(longer, task)
    made = cache_path(wanted, task)
    shutil.copytree(good, made)
    (made / "warm_start.json").write_text("{}")
    assert preflight.look(wanted, task) == [], (
        "a model in the cache is looked at before anything starts"
    )
    change(made / "config.json", vocab_size=90)
    with pytest.raises(SetupError, match="do not fit"):
        preflight.look(wanted, task)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout": {"prompt_length": 3}}, "have more than `rollout.prompt_length` 3 tokens"),
        ({"rollout": {"response_length": 1}}, "but the shortest answer of the sampled problems"),
        ({"model": {"freeze": ["nosuchlayer"]}}, "'nosuchlayer', which matches no parameter"),
        ({"model": {"lora": {"target_modules": ["nosuchlayer"]}}}, "nosuchlayer"),
        ({"model": {"warm_start": {"cache_dir": __file__}}}, "cannot be written: Not a directory"),
        ({"task": {"train": "rows.jsonl"}}, "problem 0: the task uses the character 'É'"),
    ],
)
def test_what_does_not_fit_a_model_that_is_still_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "É=", "answer": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    lengths = {"prompt_length": 12, "response_length": 12, "rollout_batch_size": 1}
    wanted = Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"warm_start": {"cache_dir": str(tmp_path)}, **changes.get("model", {})},
            "task": {"name": "jsonl", **changes["task"]} if "task" in changes else {},
            "rollout": lengths | changes.get("rollout", {}),
        }
    )
    with pytest.raises(SetupError) as caught:
        preflight.look(wanted, load_task(wanted.task, wanted.seed))
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "T5For"),
    ],
)
def test_a_model_that_does_not_continue_texts(
    model: Path, values: dict[str, Any], named: str
) -> None:
    change(model / "config.json", **values)
    said = refused(model)
    assert named in said and "does not continue a text: name a causal language model" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_that_are_not_finite_are_named_before_anything_starts(
    model: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = model.glob("*.safetensors")
    weights = {name: one.to(dtype) for name, one in load_file(file).items()}
    weights["counts"], weights["empty"] = torch.tensor([3]), torch.zeros(0, 4)
    name = max(weights, key=lambda one: len(weights[one]))  # more rows than are looked at at least
    assert len(weights[name]) > SOME_ROWS

    def written(row: int, value: float) -> list[str]:
        changed = weights[name].float().clone()
        changed[row, 1] = value
        save_file(weights | {name: changed.to(dtype)}, file, metadata={"format": "pt"})
        return list(_check_weights(model))

    assert written(-1, 1.0) == []
    for value in (math.nan, *([math.inf, -math.inf] if dtype.itemsize > 1 else [])):
        for row in (0, -1):
            with pytest.raises(SetupError, match=re.escape(f"{file} holds a weight that is not a")):
                written(row, value)
    monkeypatch.setattr("async_grpo.run.preflight.model.LOOKED_AT", 1)
    with pytest.raises(SetupError, match=re.escape(f"finite number, in {name}: ")):
        written(SOME_ROWS - 1, math.nan)
    assert "only the first 16 rows of each tensor" in written(-1, math.nan)[0]


def test_weights_that_are_not_there_or_not_whole(model: Path) -> None:
    [file] = model.glob("*.safetensors")
    whole = file.read_bytes()
    weights = {name: one.clone() for name, one in load_file(file).items()}
    file.write_bytes(whole[: len(whole) // 2])
    assert "no whole file of weights (" in refused(model) and file.name in refused(model)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert f"pointer of Git LFS instead of the weights: run `git lfs pull` in {model}" in (
        refused(model)
    )
    file.unlink()
    assert "has no weights: no *.safetensors and no *.bin file" in refused(model)
    (model / "pytorch_model.bin").write_bytes(b"no weights")
    assert "pytorch_model.bin holds no weights that torch reads: " in refused(model)
    for new in (True, False):
        torch.save(weights, model / "pytorch_model.bin", _use_new_zipfile_serialization=new)
        assert fit(model) == []


def test_a_trainer_looks_once_and_before_anything_starts(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(
        "async_grpo.run.preflight.model.check_fit",
        lambda config, model, task, **_: looked.append(model) or iter([]),
    )
    trainer = Trainer(
        Config.model_validate(
            {"run": {"total_steps": 2, "dir": str(tmp_path / "run")}, "model": {"path": str(good)}}
        )
    )
    trainer.check()
    trainer.check()
    assert looked == [str(good)]
    monkeypatch.undo()
    bad = Trainer(
        Config.model_validate(
            {
                "run": {"total_steps": 2, "dir": str(tmp_path / "run")},
                "model": {"path": str(good)},
                "rollout": {"prompt_length": 2, "response_length": 2},
            }
        )
    )
    with pytest.raises(SetupError, match=f"{SAMPLE} of {SAMPLE} sampled prompts"):
        bad.check()


def test_the_prompts_of_a_task_that_is_only_evaluated_are_looked_at(
    good: Path, tmp_path: Path
) -> None:
    chat = rows(tmp_path / "chat.jsonl", [[{"role": "user", "content": "1+1="}]])
    wanted = config(good).unchecked_copy(
        update={
            "evaluation": schema.Evaluation(task=operation.EvaluationTask(name="jsonl", eval=chat))
        }
    )
    with pytest.raises(
        SetupError,
        match=r"evaluation\.task: task jsonl asks in chat messages, .* has no chat template",
    ):
        list(check_fit(wanted, str(good), load_task(wanted.task, wanted.seed)))


# ---- answers, layers, warm starts


def test_a_response_length_in_which_no_answer_can_be_finished(good: Path, tmp_path: Path) -> None:
    """The model's tokenizer has a token per character, so `1234` and its end are five."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "1+1=", "answer": "1" * n}) + "\n" for n in (4, 6, 6, 6))
    )
    task = {"name": "jsonl", "train": str(path)}
    assert fit(good, rollout={"response_length": 7}, **task) == []
    [note] = fit(good, rollout={"response_length": 5}, **task)
    assert "note: 3 of 4 sampled solutions have more than `rollout.response_length` 5" in note
    said = refused(good, rollout={"response_length": 4}, **task)
    assert "`rollout.response_length` is 4, but the shortest answer" in said and "5 tokens" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"freeze": ["nosuchlayer"]}, "'nosuchlayer', which matches no parameter name"),
        ({"lora": {"rank": 2, "target_modules": ["nosuchlayer"]}}, "nosuchlayer"),
    ],
)
def test_layers_that_the_model_does_not_have(good: Path, settings: dict, says: str) -> None:
    wanted = config(good)
    model = schema.Model.model_validate({"path": str(good)} | settings)
    wanted = wanted.unchecked_copy(update={"model": model})
    with pytest.raises(SetupError) as caught:
        list(check_fit(wanted, str(good), load_task(wanted.task, wanted.seed)))
    said = str(caught.value)
    assert says in said and len(said.splitlines()) == 1
    assert said.startswith("model.freeze") or "lora" in settings, "the model is not to blame"


@pytest.mark.parametrize(
    ("rows", "lacks"),
    [
        ([{"prompt": "1+1=", "answer": "2", "solution": None}], "solutions"),
        (
            [{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}],
            "plain-text prompts",
        ),
    ],
)
def test_a_warm_start_needs_texts_with_solutions(
    tmp_path: Path, rows: list[dict[str, Any]], lacks: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    match = "regex" if lacks == "solutions" else "exact"
    values = {
        "run": {"total_steps": 2, "dir": str(tmp_path / "run")},
        "model": {"warm_start": {"cache_dir": str(tmp_path)}},
        "task": {"name": "jsonl", "train": str(path), "options": {"match": match}},
        "rollout": {"rollout_batch_size": 1},
    }
    with pytest.raises(SetupError) as caught:
        Trainer(Config.model_validate(values)).check()
    said = str(caught.value)
    assert f"task jsonl, training problem 0: the task has no {lacks}" in said
    assert "model.warm_start=null" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists(), "a refused configuration leaves no directory"


# ---- what a start finds out before Ray


class Reached(Exception):
    """The start has come to Ray."""


def started(good: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
    """Start a run as far as Ray."""

    def connect(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("async_grpo.run.running.Connection", connect)
    values = {
        "run": {"total_steps": 2, "dir": str(directory)},
        "model": {"path": str(good)},
        "rollout": {"rollout_batch_size": 4},
    }
    trainer = Trainer(Config.model_validate(values | sections))
    try:
        trainer.start()
    finally:
        trainer.stop("FAILED")


def test_a_tracking_server_that_does_not_listen(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Reached):
            started(good, tmp_path / "a", monkeypatch, tracking={"uri": uri})
    with pytest.raises(SetupError, match=r"where nothing answers .*tracking.offline_ok") as caught:
        started(good, tmp_path / "b", monkeypatch, tracking={"uri": uri})
    assert "secret" not in str(caught.value) and not (tmp_path / "b").exists()
    for settings in ({"uri": uri, "offline_ok": True}, {"uri": uri, "mlflow": False}):
        with pytest.raises(Reached):
            started(good, tmp_path / "c", monkeypatch, tracking=settings)


def test_a_gpu_that_is_not_there(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_grpo.cluster.session._gpus", lambda: 0)
    with pytest.raises(SetupError, match="GPU"):
        started(good, tmp_path / "a", monkeypatch, cluster={"device": "cuda"})
    assert not (tmp_path / "a").exists()
    with pytest.raises(Reached):
        started(good, tmp_path / "b", monkeypatch, cluster={"device": "cpu"})
    assert not (tmp_path / "b" / "lock.json").exists()


def test_the_files_that_an_index_names_must_be_there_and_others_need_not(model: Path) -> None:
    whole = model / "model.safetensors"
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    shutil.copy(whole, model / names[0])
    whole.rename(model / names[1])
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    (model / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert fit(model) is not None
    (model / names[1]).unlink()
    assert f"lacks {names[1]}, which {index.name} names: fetch the model again" in refused(model)
    index.write_text("{}")
    assert f"{index} cannot be read" in refused(model)


def test_episodes_cannot_be_continued(good: Path) -> None:
    settings = {
        "run": {"total_steps": 2},
        "model": {"path": str(good)},
        "rollout": {"seeded": "off"},
        "task": {"name": "tests.support.environments:TaskOfTold"},
        "checkpoint": {"partial_rollouts": True},
    }
    config = Config.model_validate(settings)
    with pytest.raises(SetupError, match=r"partial_rollouts. is true, but the environment"):
        preflight.look(config, load_task(config.task, 0))


def taught(model: Path, teacher: Path, **rollout: Any) -> list[str]:
    wanted = config(model, rollout=rollout).model_copy(
        update={
            "frozen": {"big": {"path": str(teacher)}},
            "algorithm": {"distill": {"teacher": "big"}},
        }
    )
    return list(check_fit(wanted, str(model), load_task(wanted.task, wanted.seed)))


def test_a_teacher_reads_the_tokens_of_the_policy(good: Path, tmp_path: Path) -> None:
    teacher = Path(write_model(tmp_path / "teacher", hidden=32, seed=3))
    assert taught(good, teacher) == []
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    change(teacher / "tokenizer.json", **tokenizer)
    said = rf"frozen.big: {teacher} has another vocabulary than {good} \(4 tokens of one"
    with pytest.raises(SetupError, match=said):
        taught(good, teacher)


def given(model: Path, task: str = "arithmetic", **algorithm: Any) -> list[str]:
    values = {
        "run": {"total_steps": 1},
        "model": {"path": str(model)},
        "rollout": {"prompt_length": 13, "response_length": 12, "seeded": "off"},
        "task": {"name": task},
        "algorithm": algorithm,
    }
    wanted = Config.model_validate(values)
    return list(check_fit(wanted, str(model), load_task(wanted.task, 0)))


def test_what_demonstrations_and_a_teacher_that_is_told_more_need(good: Path) -> None:
    told = {"distill": {"teacher": "policy", "teacher_prompt": "{prompt}{solution}"}}
    assert given(good, sft_loss_coef=0.1) == given(good, **told) == []
    long = {"distill": {"teacher": "policy", "teacher_prompt": "12345{prompt}{solution}"}}
    with pytest.raises(
        SetupError, match=r"training problem \d+ has 1\d tokens with it, raise `rollout.prompt_"
    ):
        given(good, **long)
    for algorithm, key in (({"sft_loss_coef": 0.1}, "sft_loss_coef"), (told, "teacher_prompt")):
        with pytest.raises(SetupError, match=rf"{key}` needs plain prompts, and .* has episodes"):
            given(good, "tests.support.environments:TaskOfTold", **algorithm)
    with pytest.raises(SetupError, match=r"no sampled problem of task .* has a `solution`"):
        given(good, f"{__name__}:Unsolved", sft_loss_coef=0.1)
    with pytest.raises(SetupError, match=r"not fit \d+ of \d+ .* has no `solution`"):
        given(good, f"{__name__}:Unsolved", **told)


class Unsolved(Arithmetic):
    def train(self, index: int) -> Problem:
        return dataclasses.replace(super().train(index), solution=None)


def test_a_teacher_has_room_for_the_longest_row_and_one_token(good: Path, tmp_path: Path) -> None:
    short = Path(write_model(tmp_path / "short", positions=24))
    with pytest.raises(SetupError, match=r"frozen.big: .* max_position_embeddings 24"):
        taught(good, short)  # rows of 12 + 12
    assert taught(good, short, response_length=11) == []


def judged(model: Path, judge: str, kind: str = "pointwise", **frozen: Any) -> list[str]:
    wanted = Config.model_validate(
        config(model).model_dump()
        | {
            "frozen": {"critic": {"path": judge, **frozen}},
            "task": {"judges": {"nice": {"model": "critic", "kind": kind}}},
        }
    )
    return list(check_fit(wanted, str(model), load_task(wanted.task, wanted.seed)))


def test_a_judge_has_a_chat_template_and_room_for_what_it_is_asked(
    good: Path, tmp_path: Path
) -> None:
    judge = write_judge(tmp_path / "judge")
    assert judged(good, judge) == []
    short = write_judge(tmp_path / "short", positions=640)
    with pytest.raises(SetupError, match=r"frozen.critic: .* of 1584 tokens, .* 640 positions"):
        judged(good, short)
    assert judged(good, short, context_length=639) == []
    with pytest.raises(SetupError, match=r"frozen.critic: .* has no chat template"):
        judged(good, str(good))


def test_a_reward_model_is_a_classifier_with_one_label(good: Path, tmp_path: Path) -> None:
    assert judged(good, write_reward_model(tmp_path / "one"), "reward_model") == []
    two = write_reward_model(tmp_path / "two", labels=2)
    with pytest.raises(SetupError, match=r"frozen.critic: .* with 2 labels: a reward model"):
        judged(good, two, "reward_model")
    with pytest.raises(SetupError, match=r"frozen.critic: .* Qwen2ForCausalLM: a reward model"):
        judged(good, str(good), "reward_model")


def test_a_teacher_without_its_weights_is_refused(good: Path, tmp_path: Path) -> None:
    teacher = Path(write_model(tmp_path / "teacher"))
    for file in teacher.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(SetupError, match=r"frozen.big: .* has no weights"):
        taught(good, teacher)
    with pytest.raises(SetupError, match=r"frozen.big: .*nowhere"):
        taught(good, tmp_path / "nowhere")
