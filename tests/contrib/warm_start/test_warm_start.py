"""The warm start's cache, child process, tokenizer and training, with a few steps of a very small
model.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.config.schema import Config, Model, Run, TaskConfig, WarmStart
from async_grpo.contrib.warm_start import cache as warm_start
from async_grpo.contrib.warm_start import model as warm_start_model
from async_grpo.errors import StopRequested
from async_grpo.tasks.registry import load_task

ROOT = Path(__file__).resolve().parents[3]


def _config(cache: Path, *, seed: int = 0, digits: int = 1, **settings: object) -> Config:
    small: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "layers": 1,
        "heads": 1,
        "batch_size": 32,
        "max_steps": 3,
        "blur_max_steps": 2,
    }
    return Config(
        seed=seed,
        run=Run(total_steps=1),
        model=Model(warm_start=WarmStart(cache_dir=str(cache), **{**small, **settings})),
        task=TaskConfig(options={"max_digits": digits}),
    )


def _weights(directory: str) -> str:
    return hashlib.sha256((Path(directory) / "model.safetensors").read_bytes()).hexdigest()


def _quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, str, list[str]]:
    """Built the way a run does it, in a child process."""
    config = _config(tmp_path_factory.mktemp("cache"))
    lines: list[str] = []
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(
        0, {min(cores)}
    )  # two threads on a busy machine wait for each other, for minutes at this size
    try:
        return (
            config,
            warm_start.ensure_warm_start(config, progress=lines.append, timeout_s=300.0),
            lines,
        )
    finally:
        os.sched_setaffinity(0, cores)


def test_the_child_builds_a_model_that_transformers_loads(
    built: tuple[Config, str, list[str]],
) -> None:
    _, directory, lines = built
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (model.config.model_type, model.dtype, model.config.max_position_embeddings) == (
        "qwen2",
        torch.float32,
        512,
    )
    assert (
        model.config.eos_token_id
        == tokenizer.eos_token_id
        != tokenizer.pad_token_id
        == model.config.pad_token_id
    )
    assert model.config.vocab_size == len(tokenizer) == 64
    report = json.loads((Path(directory) / "warm_start.json").read_text())
    assert (report["clean_steps"], 1 <= report["blur_steps"] <= 2) == (3, True)
    assert lines[0].startswith("warm start: step 3 of at most 3")
    assert lines[-1].startswith("warm start: built a model in 3 + ")


def test_the_tokenizer_returns_exactly_the_characters(built: tuple[Config, str, list[str]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built[1])
    text = "12+34=64 " + warm_start_model.ALPHABET
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    encoded = warm_start_model.Encoder(tokenizer).encode([("1+2=", "3"), ("10+20=", "03")])
    assert encoded.tokens[1].tolist() == [*tokenizer.encode("10+20=03"), tokenizer.eos_token_id]
    assert (encoded.labels[0] != -100).tolist() == [False] * 4 + [True] * 2 + [False] * 3


def test_a_cache_hit_needs_no_torch_and_no_child(built: tuple[Config, str, list[str]]) -> None:
    config, directory, _ = built
    program = """
import subprocess, sys
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start.cache import ensure_warm_start
def refuse(*args, **kwargs): raise AssertionError("a child was started")
subprocess.Popen = refuse
config = Config.model_validate_json(sys.stdin.read())
print(ensure_warm_start(config, progress=lambda text: None, timeout_s=1.0))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=config.model_dump_json(),
        text=True,
        capture_output=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    assert run.stdout.strip() == directory


def test_the_key_covers_what_the_weights_depend_on(tmp_path: Path) -> None:
    def path(config: Config) -> Path:
        return warm_start.cache_path(config, load_task(config.task, config.seed))

    base = path(_config(tmp_path))
    assert path(_config(tmp_path)) == base
    others = [
        _config(tmp_path, seed=1),
        _config(tmp_path, digits=2),
        _config(tmp_path, lr=0.1),
        _config(tmp_path, tie_embeddings=True),
    ]
    assert len({base, *(path(config) for config in others)}) == 5
    assert path(_config(tmp_path / "elsewhere")).name == base.name


def test_two_builders_at_once_end_with_one_model_and_the_same_weights(tmp_path: Path) -> None:
    config = _config(tmp_path, seed=3)
    arrived = threading.Barrier(2, timeout=60.0)

    def wait_for_the_other(text: str) -> None:
        if text.startswith("warm start: step"):
            arrived.wait()

    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(warm_start.warm_start(config, progress=wait_for_the_other)),
            daemon=True,
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert len(found) == 2
    assert found[0] == found[1]
    assert [entry.name for entry in Path(found[0]).parent.iterdir()] == [Path(found[0]).name]
    AutoModelForCausalLM.from_pretrained(found[0])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        _weights(
            warm_start.warm_start(
                _config(tmp_path / name, seed=seed, tie_embeddings=True), progress=_quiet
            )
        )
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again != other


def test_tied_embeddings_are_stored_once_and_load(tmp_path: Path) -> None:
    directory = warm_start.warm_start(_config(tmp_path, tie_embeddings=True), progress=_quiet)
    with safe_open(Path(directory) / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (not a mapping)
        stored = file.get_tensor("model.embed_tokens.weight")
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(model.lm_head.weight, stored)


@pytest.mark.slow
def test_it_learns_and_the_blur_takes_accuracy_away_again(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        hidden_size=64,
        intermediate_size=64,
        heads=2,
        batch_size=64,
        max_steps=300,
        lr=5e-3,
        blur_noise=1.0,
        blur_max_steps=40,
    )
    report = json.loads(
        (Path(warm_start.warm_start(config, progress=_quiet)) / "warm_start.json").read_text()
    )
    settings = config.model.warm_start
    assert settings is not None
    assert report["clean"]["greedy"] >= settings.target_accuracy
    assert report["clean_steps"] < settings.max_steps
    assert 1 <= report["blur_steps"] < 40
    assert report["blurred"]["greedy"] <= settings.blur_accuracy
    assert report["blurred"]["sampled"] <= settings.blur_sampled_accuracy


def test_teacher_forced_accuracy_is_the_accuracy_of_generated_answers(
    built: tuple[Config, str, list[str]],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(built[1]).eval()
    encoder = warm_start_model.Encoder(AutoTokenizer.from_pretrained(built[1]))
    prompts = [f"{a}+{b}=" for a in range(4) for b in range(4)]
    ids = encoder.encode([(prompt, "") for prompt in prompts]).tokens[:, :-1]
    answers = model.generate(ids, do_sample=False, max_new_tokens=3)[:, ids.shape[1] :]
    # Its own greedy answers, where they end in time, are right by definition; anything else is
    # wrong.
    texts = [
        "".join(warm_start_model.ALPHABET[token - 2] for token in row.tolist() if token > 1)
        for row in answers
    ]
    measured = warm_start_model.measure(
        model, encoder.encode(list(zip(prompts, texts, strict=True)))
    )
    ended = [encoder.eos in row for row in answers.tolist()]
    assert measured.greedy == pytest.approx(sum(ended) / len(ended))
    assert 0.0 <= measured.sampled <= 1.0


def test_failures_are_reported_with_what_the_child_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of the cache directory")
    config = _config(tmp_path / "file")
    with pytest.raises(warm_start.WarmStartError, match=r"(?s)exit code 1.*NotADirectoryError"):
        warm_start.ensure_warm_start(config, progress=_quiet, timeout_s=300.0)
    with pytest.raises(warm_start.WarmStartError, match="longer than 0 s"):
        warm_start.ensure_warm_start(config, progress=_quiet, timeout_s=0.01)


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start.warm_start(_config(tmp_path), progress=interrupt)
    assert list((tmp_path / "warm_start").iterdir()) == []


@pytest.mark.slow
def test_a_stop_ends_the_child_whatever_it_does_and_leaves_no_draft(tmp_path: Path) -> None:
    drafts = tmp_path / "warm_start"

    def check() -> None:
        if drafts.is_dir() and list(drafts.iterdir()):
            raise StopRequested("asked")

    with pytest.raises(StopRequested):
        warm_start.ensure_warm_start(
            _config(tmp_path), progress=_quiet, timeout_s=300.0, check=check
        )
    assert list(drafts.iterdir()) == []


def test_unknown_characters_are_named() -> None:
    encoder = warm_start_model.Encoder(warm_start_model.build_tokenizer())
    with pytest.raises(ValueError, match="'Ü'"):
        encoder.encode([("Ü", "1")])
