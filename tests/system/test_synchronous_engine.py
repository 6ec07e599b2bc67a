"""With a real seeded engine, `max_staleness: 0` is a synchronous loop: same tokens, same losses as
one written here by hand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.algo.metrics import MetricSums
from async_grpo.cluster import learner_group
from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.replay.journal import Segment, segments
from async_grpo.rollout.producer import _GroupWork
from async_grpo.run.planning import RowMath
from async_grpo.run.system import System
from async_grpo.run.trainer import Trainer
from async_grpo.wire.codec import (
    Batch,
    Group,
    GroupTicket,
    decode_group,
    decode_meta,
    encode_group,
    pack_frames,
)
from tests.support.models import write_model

STEPS, R = 5, 4

pytestmark = [pytest.mark.timeout(250), pytest.mark.alone]


def settings(home: Path, model: str) -> Config:
    return Config.model_validate(
        {
            "seed": 9,
            "run": {"name": "product", "dir": str(home / "product"), "total_steps": STEPS},
            "model": {"path": model},
            "task": {"name": "tests.support.mixed_task:Mixed"},
            "rollout": {
                "rollout_batch_size": R,
                "group_size": 4,
                "prompt_length": 32,
                "response_length": 20,
            },
            "replay": {"max_staleness": 0},
            "learner": {
                "lr": 1e-3,
                "ppo_epochs": 2,
                "ppo_mini_batch_size": 2,
                "tokens_per_micro_batch": 4096,
            },
            "evaluation": {"before": False, "max_samples": 4},
            "tracking": {"mlflow": False, "report": False},
            "weight_sync": {"self_check": False},
            "cluster": {"rollout_actors": {"min": 1, "max": 1}, "engine": {"max_num_seqs": 32}},
        }
    )


class FileFedLearner(learner_group.LearnerProcess):
    """A learner rank whose groups come from a file of the test, where there is one, instead of the
    queue.
    """

    def _fetch(self, step: int, group_ids: Sequence[int]) -> Any:
        path = batch_file(self._config, step)
        return np.fromfile(path, np.uint8) if path.exists() else super()._fetch(step, group_ids)


def batch_file(config: Config, step: int) -> Path:
    return Path(f"{config.run.dir}-batch-{step}")


async def synchronous(system: System, config: Config) -> tuple[list[Group], list[float]]:
    """Generate a batch, train on it, publish, and only then generate the next one: no queue, no
    tickets but those made here.
    """

    async def nobody_waits_for_slots(version: int, digest: str) -> None: ...

    live, system.coordinator._live = system.coordinator._live, nobody_waits_for_slots
    await system.learner._all("call", "save", f"{config.run.dir}-start", {})
    engine, rows = system.actors.alive()[0], RowMath(config, {"correct": 1.0, "format": 0.0})
    everything, losses = [], []
    for step in range(1, STEPS + 1):
        tickets = [
            GroupTicket(group_id, 1, step - 1) for group_id in range((step - 1) * R, step * R)
        ]
        works = [_GroupWork(ticket, "queued", since=0.0, begun=0.0) for ticket in tickets]
        groups = await asyncio.gather(*[engine.handle._group.remote(work) for work in works])
        frames = [encode_group(group) for group in groups]
        pack_frames(frames).tofile(batch_file(config, step))
        batch = Batch(step, tuple(decode_meta(frame) for frame in frames))
        plans = rows.plans(batch)
        values, _ = rows.values(batch, await system.learner.prepare(plans))
        sums = MetricSums()
        for rank in await system.learner.train(values, rows.kl_coef, rows.lr_factor):
            sums.merge(MetricSums.from_wire(rank))
        everything += groups
        losses.append(sums.means()["train/loss"])
        await system.coordinator.publish(step)
        await system.coordinator.wait()
        batch_file(config, step).unlink()
    # Back to the beginning, bit for bit, for the product's turn.
    await system.learner._all("call", "load", f"{config.run.dir}-start")
    system.coordinator._live, system.coordinator.run_epoch = (
        live,
        1,
    )  # an engine takes no version older than its own
    await system.coordinator.publish(0)
    await system.coordinator.wait()
    return everything, losses


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> dict:
    """The loop above, and then the product's run with the same parts from the same weights."""
    home = tmp_path_factory.mktemp("synchronous")
    config, told = settings(home, write_model(home / "model", positions=64)), {}
    with pytest.MonkeyPatch.context() as patch, open(home / "log.txt", "w") as log:
        patch.setattr(learner_group, "LearnerProcess", FileFedLearner)
        with Trainer(config, console=Console(log)) as trainer:
            trainer.start()
            work = synchronous(trainer.system, trainer.config)
            told["plain_groups"], told["plain_losses"] = asyncio.run_coroutine_threadsafe(
                work, trainer.system.event_loop
            ).result(timeout=120)
            trainer.train()
    directory = home / "product" / "journal"
    told["groups"] = {}
    for number in segments(directory):
        segment = Segment(directory, number)
        frames = [
            segment.payload(record.place) for record in segment.records() if record.body[0] == "put"
        ]
        told["groups"] |= {group.group_id: group for group in map(decode_group, frames)}
    lines = map(json.loads, (home / "product" / "metrics.jsonl").read_text().splitlines())
    told["losses"] = [line["train/loss"] for line in lines if "train/loss" in line]
    return told


def test_the_tokens_of_every_step_are_the_same(both):
    assert (
        sorted(both["groups"])
        == list(range(STEPS * R))
        == [group.group_id for group in both["plain_groups"]]
    )
    for plain in both["plain_groups"]:
        product = both["groups"][plain.group_id]
        assert product.prompts[0].tolist() == plain.prompts[0].tolist()
        for one, other in zip(product.rows, plain.rows, strict=True):
            assert one.response_ids.tolist() == other.response_ids.tolist(), (
                f"group {plain.group_id}"
            )
            assert one.rewards == other.rewards and one.versions == other.versions


def test_the_losses_agree(both):
    assert len(both["losses"]) == STEPS and np.abs(both["losses"]).max() > 1e-3, (
        "the losses show nothing"
    )
    assert both["losses"] == pytest.approx(both["plain_losses"], abs=1e-3)


def test_neighbouring_groups_and_rollouts_do_not_share_noise(both):
    """vLLM adds the place of a sample to the seed: with sums as seeds, sample i of a group would be
    sample i - 1 of the next one.
    """
    responses = [
        tuple(row.response_ids.tolist()) for group in both["plain_groups"] for row in group.rows
    ]
    assert len(set(responses)) > 0.9 * len(responses)
