"""A real run that is killed while responses are under way, and continues them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.rollout.partial import FILE, PartialFile
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer
from tests.support.engine_weights import learner_logprobs
from tests.support.models import write_model
from tests.support.partial_run import STEPS, settings

ROOT = Path(__file__).resolve().parents[2]
TOLD = re.compile(r"(\d+) responses of (\d+) groups continue from ([\d,]+) tokens")


@pytest.mark.slow
@pytest.mark.timeout(1100)
def test_a_run_that_was_killed_continues_the_responses_of_its_checkpoint(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    with torch.no_grad():
        model.lm_head.weight[1].zero_()  # the end of a response is rarer
    model.save_pretrained(directory)
    died = subprocess.run(
        [
            sys.executable,
            "-c",
            "from pathlib import Path; from tests.support.partial_run import "
            f"first_start; first_start(Path({str(tmp_path)!r}))",
        ],
        cwd=ROOT,
        timeout=560,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    path = checkpoint.latest(tmp_path / "run")
    assert path is not None and FILE in checkpoint.verify(path)["files"], (
        "its sum is in the manifest"
    )
    file = PartialFile(path / FILE)
    left = read_history(tmp_path / "run" / "journal")
    in_flight = {
        one.group_id: one
        for one in file.starts
        if left.groups[one.group_id].state == State.IN_FLIGHT
    }
    assert in_flight, "nothing was under way when it was killed"
    with (
        open(tmp_path / "second.txt", "w") as log,
        Trainer(settings(tmp_path), console=Console(log)) as trainer,
    ):
        metrics = trainer.train()
        counts = asyncio.run_coroutine_threadsafe(
            trainer.system.queue.call(ReplayQueue.counts), trainer.system.event_loop
        ).result(timeout=60)
    text = (tmp_path / "second.txt").read_text()
    responses, groups, tokens = (
        int(number.replace(",", "")) for number in TOLD.search(text).groups()
    )
    assert (responses, groups, tokens) == tuple(
        sum(numbers)
        for numbers in zip(
            *[(one.responses, 1, one.tokens) for one in in_flight.values()], strict=True
        )
    ), text
    assert 0 < metrics["rollout/continued_tokens"] <= tokens
    history = read_history(tmp_path / "run" / "journal")
    assert sorted(history.steps) == list(range(1, STEPS + 1)) and {
        len(ids) for ids in history.steps.values()
    } == {2}
    assert (counts["invalid"], counts["failed"], counts["trained"]) == (0, 0, 2 * STEPS)
    trained = {group_id for ids in history.steps.values() for group_id in ids}
    assert trained & in_flight.keys(), "none of them was trained"
    for group_id in trained & in_flight.keys():
        group, beginning = history.group(group_id), in_flight[group_id]
        assert (group.attempt, group.policy_version) == (beginning.attempt, beginning.version)
        _, known, _ = unpacked(file, group_id)
        for one, start in zip(group.rows, known, strict=True):
            size = len(start.token_ids)
            assert one.response_ids[:size].tolist() == start.token_ids.tolist(), (
                "a token was changed"
            )
            assert one.behavior_logprobs[:size].tolist() == start.logprobs.tolist()
            assert (
                len(one.response_ids) == size
                if start.finish_reason
                else len(one.response_ids) > size
            )
            expected = learner_logprobs(model, group.prompts[0].tolist(), one.response_ids, 1.0)
            assert np.abs(one.behavior_logprobs - expected).max() < 1e-4


def unpacked(file: PartialFile, group_id: int):
    from async_grpo.rollout.partial import _decode

    return _decode(file.packed(group_id))
