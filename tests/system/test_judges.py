"""Judges in a real run: a model that generates, a reward model and an address grade what is
trained, and a judge that does not answer ends nothing and scores nothing.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForSequenceClassification

from async_grpo.config.load import load_config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.run.trainer import Trainer
from async_grpo.wire.codec import decode_group
from tests.support.judge_models import completion, judge_server, write_judge, write_reward_model
from tests.support.models import write_model
from tests.support.recipes import CONFIGS

STEPS, KEY = 2, "sk-secret-of-this-test"
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_three_judges_grade_every_trained_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_model(tmp_path / "policy", positions=64)
    reward = write_reward_model(tmp_path)
    judge = write_judge(tmp_path / "judge")
    monkeypatch.setenv("A_KEY", KEY)
    numbers = itertools.count()

    def reply(asked: dict[str, Any]) -> tuple[int, str, bytes]:
        if next(numbers) % 7 == 3:  # repeated by the client
            return 429, "application/json", b'{"error": {"message": "slow down"}}'
        longer = len(asked["messages"][0]["content"]) % 2
        return completion('{"better": "%s"}' % ("A" if longer else "B"))

    with judge_server(reply) as (url, seen):
        config = load_config(
            CONFIGS / "quickstart.yaml",
            [
                f"run={{dir: {tmp_path}/run, total_steps: {STEPS}}}",
                "model.warm_start=null",
                f"model.path={policy}",
                f"frozen={{critic: {{path: {judge}, context_length: 1024}},"
                f" taste: {{path: {reward}}},"
                f" elsewhere: {{url: '{url}', served_name: m, api_key_env: A_KEY}}}}",
                "task.name=tests.support.mixed_task:Mixed",
                "task.judges={quality: {model: critic, criteria: [clear, right], max_tokens: 64},"
                " liked: {model: taste, kind: reward_model, mean: 1.0, std: 2.0},"
                " better: {model: elsewhere, kind: pairwise}}",
                "rollout={rollout_batch_size: 2, group_size: 4, prompt_length: 32}",
                "rollout.response_length=16",
                "evaluation={before: false, max_samples: 8}",
                "tracking={mlflow: false, report: false}",
                "cluster.rollout_actors.max=1",
                "cluster.engine.max_num_seqs=64",
            ],
        )
        log = tmp_path / "log.txt"
        with open(log, "w") as out, Trainer(config, console=Console(out)) as trainer:
            trainer.train()
            assert trainer.steps_done == STEPS
    assert {key for key, _ in seen} == {f"Bearer {KEY}"}
    classifier = Qwen2ForSequenceClassification.from_pretrained(reward).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward)
    history = read_history(tmp_path / "run" / "journal")
    groups = [decode_group(history.frame(one)) for step in history.steps.values() for one in step]
    assert len(groups) == 2 * STEPS
    for group in groups:
        for row in group.rows:
            assert set(row.rewards) >= {"quality", "liked", "better"}
            assert row.rewards["quality"] * 8 == round(row.rewards["quality"] * 8)
            prompt = tokenizer.decode(group.prompts[row.prompt], skip_special_tokens=True)
            said = tokenizer.decode(row.response_ids, skip_special_tokens=True)
            with torch.no_grad():
                ids = torch.tensor([tokenizer(prompt + said)["input_ids"]])
                score = classifier(input_ids=ids).logits[0, 0].item()
            assert row.rewards["liked"] == pytest.approx((score - 1) / 2, abs=1e-3)
        # every pair of different texts has a winner, and equal ones share
        assert sum(row.rewards["better"] for row in group.rows) == pytest.approx(2.0)
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()
    assert KEY not in log.read_text()
