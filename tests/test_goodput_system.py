"""A real run whose tokens and seconds are counted twice: by engines and driver, and from the groups that arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config.schema import Config
from async_grpo.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.replay.tokens import PLACES
from async_grpo.time_by_cause import ENGINE_CAUSES, LEARNER_CAUSES
from async_grpo.trainer import Trainer
from tests.models import write_model

STEPS, BATCH = 6, 3

pytestmark = pytest.mark.timeout(280)


def settings(home: Path, model: str) -> Config:
    return Config.model_validate({
        "seed": 11, "run": {"name": "goodput", "dir": str(home / "run"), "total_steps": 2 * STEPS}, "model": {"path": model},
        "task": {"name": "tests.mixed_task:Mixed"},
        "rollout": {"rollout_batch_size": BATCH, "group_size": 4, "prompt_length": 32, "response_length": 80},
        "algorithm": {"adv_estimator": "remax", "use_kl_loss": False, "mask_truncated": True},
        "replay": {"max_staleness": 2, "filter_groups": {"enable": False}}, "learner": {"lr": 1e-6, "tokens_per_micro_batch": 4096},
        "evaluation": {"max_samples": 4}, "weight_sync": {"verify_every": 2}, "tracking": {"mlflow": False}, "checkpoint": {"every_steps": 4},
        "cluster": {"rollout_actors": {"min": 1, "max": 1}, "engine": {"max_num_seqs": 16}},
    })


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """One run that is stopped half way, while groups are ready or under way, with evaluations and a checkpoint."""
    home = tmp_path_factory.mktemp("goodput")
    config, told = settings(home, write_model(home / "model")), {}
    with open(home / "log.txt", "w") as log, Trainer(config, console=Console(log)) as trainer:
        trainer.start()
        began = time.monotonic()
        trainer.evaluate()
        trainer.train(steps=STEPS)
        trainer.evaluate()
        told["wall"] = time.monotonic() - began
        told["learner"] = asyncio.run_coroutine_threadsafe(_seconds(trainer), trainer._loop).result(timeout=60)
        system = trainer.system
        tell = system.queue.tell

        async def overhear(actor_id, report):
            told["report"], told["engine_wall"] = report, time.time() - report.began
            told["health"] = await system.actors.alive()[0].handle.health.remote()
            await tell(actor_id, report)

        system.queue.tell = overhear
        trainer.stop()
        told["engine_times"] = system.engine_times
    told["lines"] = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    told["history"] = read_history(home / "run" / "journal")
    yield told


async def _seconds(trainer: Trainer) -> dict[str, float]:
    return trainer.system.loop.time.seconds()


def places(line: dict) -> dict[str, int]:
    return {place: int(line[f"goodput/{place}"]) for place in PLACES}


def test_every_line_adds_up_to_the_token(story: dict) -> None:
    lines = [line for line in story["lines"] if "goodput/generated" in line]
    assert len(lines) == STEPS + 1, "one per step, and one at the end"
    for line in lines:
        assert sum(places(line).values()) == line["goodput/generated"] > 0
        assert line["goodput/share"] == pytest.approx(line["goodput/trained"] / line["goodput/generated"])


def test_what_the_engine_sampled_is_what_became_of_groups_probes_and_evaluations(story: dict) -> None:
    last, told = story["lines"][-1], story["report"].told
    found = places(last)
    assert told.sampled == last["goodput/generated"], "vLLM counted them one by one; the queue knows the groups that arrived"
    requests = {purpose: int(story["health"][f"sampled_{purpose}"]) for purpose in ("rollouts", "probes", "evaluated")}
    assert sum(requests.values()) == told.sampled, "the same, request by request, those that were aborted at the end too"
    assert (found["probes"], found["evaluated"]) == (told.probes, told.evaluated) and told.probes > 0 and told.evaluated > 0
    evaluated = [line for line in story["lines"] if "eval/problems" in line]
    assert len(evaluated) == 2
    history, in_groups = story["history"], {"trained": 0, "masked": 0, "baseline": 0, "unused": 0}
    for group_id, record in history.groups.items():
        meta = history.meta(group_id)
        for row in meta.rows if meta is not None else ():
            trained = "masked" if row.finish_reason == "length" else "trained"
            in_groups["baseline" if row.role == "baseline" else trained if record.state == State.TRAINED else "unused"] += row.length
    in_groups["unused"] += requests["rollouts"] - sum(in_groups.values())  # what was under way when the run was stopped, if anything was
    assert in_groups == {place: found[place] for place in in_groups}, "the groups in the journal, row by row"
    assert min(found[place] for place in ("trained", "masked", "baseline")) > 0
    assert {place for place, tokens in found.items() if tokens} <= {*in_groups, "probes", "evaluated"}, "nothing is held, lost or under way"


def test_the_seconds_of_learner_and_engine_add_up_to_the_time_that_passed(story: dict) -> None:
    learner = story["learner"]
    assert set(learner) == set(LEARNER_CAUSES)
    assert sum(learner.values()) == pytest.approx(story["wall"], rel=0.02)
    assert min(learner[cause] for cause in ("working", "starved", "publishing", "checkpointing", "evaluating")) > 0
    last = story["lines"][-1]
    engine = {cause: last[f"time/engine/{cause}"] for cause in ENGINE_CAUSES}
    assert story["engine_times"] == {"actor-0": engine}
    assert sum(engine.values()) == pytest.approx(story["engine_wall"], rel=0.02), "from the first evaluation to the last word"
    assert story["engine_wall"] == pytest.approx(story["wall"], rel=0.1)
    assert min(engine[cause] for cause in ("working", "paused", "evaluating")) > 0
