"""Runs of a pretrained model: what only a trained one shows, a peaked distribution, a chat template
and a tied head of 49 thousand words. Three learner steps each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.config.load import dump, load_config
from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.run.trainer import Trainer
from async_grpo.wire.codec import Group
from tests.support import real_tasks
from tests.support.real_model import real_model
from tests.support.recipes import CONFIGS
from tests.support.verbs import export
from tests.support.waiting import wait_until

STEPS, GROUPS, SIZE = 3, 2, 4
EXACT, ROUNDING = 1e-4, 0.1
ROOT = CONFIGS.parent
START_S = 300.0
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


def config_of(home: Path, *more: str) -> Config:
    rows = real_tasks.write_rows(home / "rows.jsonl", start=0, count=64)
    held_out = real_tasks.write_rows(home / "held_out.jsonl", start=1000, count=8)
    (home / "empty.yaml").write_text("")
    return load_config(
        home / "empty.yaml",
        [
            f"run={{name: real, dir: {home}/run, total_steps: {STEPS}}}",
            f"model={{path: {real_model()}}}",
            f"task={{name: 'tests.support.real_tasks:Rows', train: {rows}, eval: {held_out}}}",
            f"rollout={{rollout_batch_size: {GROUPS}, group_size: {SIZE}, prompt_length: 64, "
            "response_length: 16}",
            "learner={lr: 1e-5}",
            "weight_sync={verify_every: 1, kv_cache: recompute}",
            "evaluation={before: false, max_samples: 4, n: 0}",
            "checkpoint={every_steps: 0}",
            "tracking={mlflow: false, report: false}",
            "cluster.rollout_actors.max=1",
            "cluster.engine={max_num_seqs: 32, kv_cache_gb: 0.5}",
            *more,
        ],
    )


def lines_of(home: Path) -> list[dict[str, Any]]:
    path = home / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def trained(home: Path) -> list[Group]:
    history = read_history(home / "run" / "journal")
    found = [
        history.group(group_id)
        for group_id, record in history.groups.items()
        if record.state is State.TRAINED
    ]
    return [group for group in found if group is not None]


def run(home: Path, *more: str) -> list[Group]:
    """Train the steps of a run that is longer by one, so that it leaves no checkpoint of gigabytes,
    and its journal is whole; the groups that it trained.
    """
    config = config_of(home, f"run.total_steps={STEPS + 1}", *more)
    with open(home / "log.txt", "w") as log, Trainer(config, console=Console(log)) as trainer:
        trainer.train(steps=STEPS)
    groups = trained(home)
    assert len(groups) == STEPS * GROUPS
    return groups


def check_steps(home: Path, bound: float) -> list[dict[str, Any]]:
    """All steps, in which engine and learner read the same tokens with the same weights."""
    steps = list({line["step"]: line for line in lines_of(home)}.values())
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    errors = [line["weights/sampler_error"] for line in steps if "weights/sampler_error" in line]
    assert errors and max(errors) <= bound
    assert max(line["weights/drift"] for line in steps) <= (EXACT if bound == EXACT else ROUNDING)
    assert any(line["train/grad_norm"] > 0 for line in steps)
    print(f"sampler errors {errors}, drift {steps[-1]['weights/drift']}", flush=True)
    return steps


def test_killed_it_goes_on_and_its_export_answers_alike(tmp_path: Path) -> None:
    """In float32: the driver is killed behind step 1; the same configuration ends the run."""
    config = config_of(tmp_path, "model.dtype=float32")
    (tmp_path / "own.yaml").write_text(dump(config))
    command = [sys.executable, "-m", "async_grpo.run", str(tmp_path / "own.yaml")]
    with open(tmp_path / "first.txt", "w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            wait_until(lambda: lines_of(tmp_path) or first.poll() is not None, START_S, "a step")
            assert first.poll() is None, (tmp_path / "first.txt").read_text()
            os.kill(first.pid, signal.SIGKILL)
        finally:
            first.kill()
            first.wait(timeout=60)
    begun = lines_of(tmp_path)
    assert 1 <= len(begun) < STEPS
    prompts = [real_tasks.question(number)[0] for number in range(2000, 2006)]
    with (
        open(tmp_path / "second.txt", "w") as log,
        Trainer(config, console=Console(log)) as trainer,
    ):
        trainer.train()
        trainer.save()
        greedy = trainer.generate(prompts, temperature=0.0, max_tokens=12)
        sampled = trainer.generate(prompts, temperature=1.0, max_tokens=12)
    again = check_steps(tmp_path, EXACT)[: len(begun)]
    assert [line["train/loss"] for line in again] == [line["train/loss"] for line in begun]

    assert export([str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for prompt, [best], [one] in zip(prompts, greedy, sampled, strict=True):
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        end = tokenizer.eos_token_id
        said, wanted = (
            [token for token in one if token != end] for one in (answer.tolist(), best.token_ids)
        )
        assert said == wanted, "the exported model answers otherwise"
        tokens = torch.tensor([list(one.token_ids)])
        with torch.no_grad():
            logits = model(torch.cat([ids, tokens], 1)).logits[0, ids.shape[1] - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, tokens[0][:, None])[:, 0]
        assert np.abs(logprobs.numpy() - np.array(one.logprobs)).max() <= EXACT


def test_two_ranks_in_bfloat16(tmp_path: Path) -> None:
    """Half precision, the default on GPUs; ZeRO-2 over two ranks."""
    run(tmp_path, "model.dtype=bfloat16", "learner={lr: 1e-5, ranks: 2, zero_stage: 2}")
    check_steps(tmp_path, ROUNDING)
    assert "weights arrive" in (tmp_path / "log.txt").read_text()


def test_adapters_learn_in_episodes_of_several_turns(tmp_path: Path) -> None:
    """LoRA, in bfloat16, one rank; turns are rendered by the model's own chat template."""
    groups = run(
        tmp_path,
        "model.dtype=bfloat16",
        "model.lora={rank: 8, alpha: 16.0}",
        "learner={lr: 1e-4}",
        "task={name: 'tests.support.real_tasks:Sums'}",
        *SEVERAL_TURNS,
    )
    check_steps(tmp_path, ROUNDING)
    check_turns(groups)


def test_an_openai_client_plays_episodes(tmp_path: Path) -> None:
    """Programs with the unmodified client; chats go through the endpoint and the model's own chat
    template, and the tokens that are trained are those that were sampled.
    """
    options = {
        "command": [sys.executable, "-m", "tests.support.real_tasks"],
        "of": "jsonl",
        "of_options": {"match": "contains"},
        "rewards": {"correct": 1.0, "digits": 0.5},
        "directory": str(ROOT),
    }
    rows = {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "held_out.jsonl")}
    task = {"name": "program", "options": options, **rows}
    groups = run(tmp_path, "model.dtype=float32", f"task={json.dumps(task)}", *SEVERAL_TURNS)
    steps = check_steps(tmp_path, EXACT)
    check_turns(groups)
    assert steps[-1]["rollout/requests/answered"] >= 2 * GROUPS * SIZE
    forks = {name for line in steps for name, n in line.items() if "/forks/" in name and n}
    assert not forks


SEVERAL_TURNS = (
    "rollout.response_length=96",
    "rollout.turn_length=32",
    "rollout.context_length=256",
    "rollout.max_turns=3",
    "environment.workers=1",
)


def check_turns(groups: list[Group]) -> None:
    """Every episode is one row of turns; between them stands what the chat template adds. A turn
    that is cut off may end it.
    """
    tokenizer, turns = AutoTokenizer.from_pretrained(real_model()), []
    for group in groups:
        assert len(group.rows) == SIZE
        for row in group.rows:
            text, more = tokenizer.decode(row.response_ids), len(row.segments) - 1
            assert more or row.finish_reason == "length"
            assert text.count("<|im_end|>\n<|im_start|>user\nAre you sure? Answer again.") == more
            assert text.count("<|im_end|>\n<|im_start|>assistant\n") == more
            turns.append(more + 1)
    assert max(turns) > 1
    print(f"turns {turns}", flush=True)
