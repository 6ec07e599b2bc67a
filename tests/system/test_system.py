"""The whole system with its real parts: two engines and two learner ranks on GSM8K, a killed
rollout actor, a resumed checkpoint.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.replay.queue import ReplayQueue
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer
from tests.support.machine_speed import slowness
from tests.support.models import write_model
from tests.support.waiting import ask, wait_until

DATA = Path(__file__).parents[1] / "data"
STEPS, SAVED = 6, 2
PROBES = [([5, 6, 7, 8], [20, 21, 22]), ([9, 10], [30, 31, 32, 33])]

pytestmark = pytest.mark.timeout(560)  # a whole run, beside other tests


def settings(directory: Path, model: str, *, steps: int = STEPS, **changes) -> Config:
    """GSM8K on a random tied model: nothing to learn, everything to go through."""
    values = {
        "seed": 3,
        "run": {"name": "system", "dir": str(directory), "total_steps": steps},
        "model": {"path": model},
        "task": {
            "name": "gsm8k",
            "train": str(DATA / "gsm8k_train.jsonl"),
            "eval": str(DATA / "gsm8k_test.jsonl"),
            "options": {"style": "plain"},
        },
        "rollout": {
            "rollout_batch_size": 4,
            "group_size": 4,
            "prompt_length": 1400,
            "response_length": 144,  # long enough to be caught at it
        },
        "algorithm": {
            "clip_schedule": "harmonic",
            "use_kl_loss": True,
            "overlong_buffer": {"enable": True, "len": 16},
        },
        "learner": {
            "ranks": 2,
            "zero_stage": 2,
            "lr": 1e-4,
            "ppo_epochs": 2,
            "ppo_mini_batch_size": 2,
            "tokens_per_micro_batch": 4096,
        },
        "evaluation": {"max_samples": 6},
        "tracking": {"report": False},
        "cluster": {"rollout_actors": {"min": 2, "max": 2}, "engine": {"max_num_seqs": 8}},
        "checkpoint": {"resume": "auto", "every_steps": 4, "keep": 4},
    }
    return Config.model_validate(values | changes)


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Iterator[dict]:
    """One run, told once: train, save, kill an actor in mid-generation, train on, end; then resume
    from the saved checkpoint.
    """
    home = tmp_path_factory.mktemp("system")
    model = write_model(home / "model", tied=True, positions=2048)
    told: dict = {"dir": home / "run", "model": model}
    with (
        open(home / "log.txt", "w") as log,
        Trainer(settings(home / "run", model), console=Console(log)) as trainer,
    ):
        trainer.start()
        told["before"] = trainer.evaluate()
        told["metrics"] = [trainer.train(steps=1) for _ in range(SAVED)]
        told["saved"] = trainer.save()
        told["refused"] = refused(home / "run", model)
        told["probes"] = ask(trainer, trainer.system.learner.logprobs(PROBES))
        victim = trainer.system.actors.alive()[0]
        pid = ask(trainer, victim.handle.pid.remote())
        with ThreadPoolExecutor(1) as thread:
            training = thread.submit(trainer.train)
            told["in_flight"] = wait_until(
                lambda: caught_at_work(trainer, victim.actor_id, pid),
                60,
                "catching the victim at work",
            )
            os.kill(pid, signal.SIGKILL)
            told["metrics"].append(training.result(timeout=400 * slowness()))
        told["history"] = ask(
            trainer,
            trainer.system.queue.call(
                ReplayQueue.history, [group_id for group_id, _ in told["in_flight"]]
            ),
        )
        told["all"] = ask(
            trainer, trainer.system.queue.call(ReplayQueue.history, range(STEPS * 4 + 32))
        )
        told["counts"] = ask(trainer, trainer.system.queue.call(ReplayQueue.counts))
        told["deaths"] = list(trainer.system.actors.deaths)
        told["keys"] = [trainer._running.connection.key]
        told["pids"] = [*ask(trainer, trainer.system.learner.pids()), pid]
        told["uri"], told["run_id"] = trainer.tracker.uri, trainer.tracker.run_id
        told["last"] = trainer.save()
        told["scraped"] = wait_until(
            lambda: scraped("ray_async_grpo_replay_trained"),
            60,
            "the run's metrics on Ray's endpoint",
        )
        told["manifests"] = {
            step: checkpoint.verify(checkpoint.path_for(home / "run", step))
            for step in checkpoint.steps(home / "run")
        }
    alone = {
        "rollout_actors": {"min": 1, "max": 1},
        "engine": {"max_num_seqs": 8},
    }  # how many there are is nothing that a resume must keep
    saved = {"resume": str(told["saved"])}
    again = settings(home / "run", model, steps=STEPS + 2, checkpoint=saved, cluster=alone)
    with open(home / "log2.txt", "w") as log, Trainer(again, console=Console(log)) as trainer:
        trainer.start()
        told["keys"].append(trainer._running.connection.key)
        told["resumed_at"] = trainer.steps_done
        told["resumed_probes"] = ask(trainer, trainer.system.learner.logprobs(PROBES))
        told["resumed_metrics"] = trainer.train(steps=3)  # beyond the groups that were restored
        told["resumed_history"] = ask(
            trainer, trainer.system.queue.call(ReplayQueue.history, range(STEPS * 4 + 32))
        )
    told["log"], told["log2"] = (home / "log.txt").read_text(), (home / "log2.txt").read_text()
    yield told


def refused(directory: Path, model: str) -> list[str]:
    """What a second run in this directory, and a replay into it, are told."""
    said = []
    for begin in (Trainer.start, lambda trainer: trainer.replay(directory.parent / "another")):
        second = Trainer(settings(directory, model), console=Console(io.StringIO()))
        with pytest.raises(SetupError) as error:
            begin(second)
        second.stop("FAILED")
        said.append(str(error.value))
    return said


def scraped(name: str) -> dict[str, float]:
    """The run's gauges on the metrics endpoint of the test's Ray node, once this one is there with
    what was counted; Ray passes them on late.
    """
    import ray

    [node] = ray.nodes()
    with urllib.request.urlopen(
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10
    ) as answer:
        lines = [
            line
            for line in answer.read().decode().splitlines()
            if line.startswith("ray_async_grpo_") and 'run="system"' in line
        ]
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    return found if found.get(name) else {}


def caught_at_work(trainer: Trainer, actor_id: str, pid: int) -> list[tuple[int, int]]:
    """Stop the actor's process while it holds groups; what it has in flight then, or [] and it goes
    on. One that holds none is left alone: stopped again and again, it would never get any.
    """
    if not ask(trainer, trainer.system.queue.call(ReplayQueue.held)).get(actor_id):
        return []
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)  # what it has sent before arrives
    if held := ask(trainer, trainer.system.queue.call(ReplayQueue.held)).get(actor_id):
        return held
    os.kill(pid, signal.SIGCONT)
    return []


def test_every_step_trains_a_full_batch_within_the_bound(story):
    lines = [json.loads(line) for line in (story["dir"] / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line][:STEPS]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert 0 <= line["train/staleness_mean"] <= line["train/staleness_max"] <= 1
        assert np.isfinite(line["train/grad_norm"]) and line["rollout/response_tokens"] > 0
        assert (
            "rollout/reward/correct" in line
            and "rollout/reward/format" in line
            and "train/kl" in line
        )


def test_the_groups_of_a_killed_actor_are_trained_once_with_attempt_2(story):
    assert story["in_flight"], "the victim held nothing; the test shows nothing"
    assert story["deaths"]
    for group_id, attempt in story["in_flight"]:
        entry = story["history"][group_id]
        assert (attempt, entry["attempt"], entry["state"]) == (1, 2, "trained"), (
            f"group {group_id}: {entry}"
        )
    trained = {
        group_id: entry["step"]
        for group_id, entry in story["all"].items()
        if entry["state"] == "trained"
    }
    assert len(trained) == STEPS * 4
    per_step = {
        step: sum(1 for value in trained.values() if value == step) for step in range(1, STEPS + 1)
    }
    assert per_step == dict.fromkeys(range(1, STEPS + 1), 4)
    assert story["counts"]["trained"] == STEPS * 4 and story["counts"]["forfeited"] >= 1


def test_the_replacement_serves_and_the_run_says_so(story):
    assert "died" in story["log"] and "replaces it" in story["log"]


def test_a_resumed_run_continues_from_the_same_weights(story):
    assert story["resumed_at"] == SAVED
    for now, then in zip(story["resumed_probes"], story["probes"], strict=True):
        assert np.array_equal(now, then)
    assert story["resumed_metrics"]["train/staleness_max"] <= 1
    steps = [
        entry["step"]
        for entry in story["resumed_history"].values()
        if entry["state"] in ("trained", "training")
    ]
    assert steps.count(SAVED + 1) == 4
    assert f"resumed {story['saved']} at step {SAVED}" in story["log2"]
    assert "completed groups restored" in story["log2"] and "is set aside" in story["log2"]


def test_mlflow_holds_the_run(story):
    from mlflow import MlflowClient

    client = MlflowClient(story["uri"])
    run = client.get_run(story["run_id"])
    assert run.info.status == "FINISHED"
    assert (
        run.data.params["rollout.group_size"] == "4"
        and run.data.params["algorithm.clip_schedule"] == "harmonic"
    )
    assert {
        point.step for point in client.get_metric_history(story["run_id"], "train/loss")
    } >= set(range(1, STEPS + 1))
    names = {artifact.path for artifact in client.list_artifacts(story["run_id"])}
    assert {"config.yaml", "samples.json", "code.json"} <= names
    assert run.data.tags["run_epoch"] == "1" and run.data.tags["packages.torch"], (
        "the second start discarded steps"
    )


def test_rays_endpoint_has_the_metrics_of_queue_learner_and_engines(story):
    found = story["scraped"]
    names = {
        f"ray_async_grpo_{name}"
        for name in (
            "step",
            "replay_trained",
            "train_grad_norm",
            "rollout_score",
            "cluster_rollout_actors",
            "time_learner_idle",
        )
    }
    assert names <= set(found) and not [name for name in found if "_lag_0_" in name]
    assert (
        0 < found["ray_async_grpo_replay_trained"] <= STEPS * 4
        and 0 < found["ray_async_grpo_step"] <= STEPS
    )


def test_the_exported_model_is_the_trained_one(story):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(story["saved"] / "hf").float()
    first = AutoModelForCausalLM.from_pretrained(story["model"]).float()
    assert not torch.equal(saved.model.embed_tokens.weight, first.model.embed_tokens.weight)
    assert AutoTokenizer.from_pretrained(story["saved"] / "hf")("a+b")["input_ids"]
    for (prompt, response), expected in zip(PROBES, story["probes"], strict=True):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logprobs = (
                saved(ids)
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
                .gather(1, ids[0, len(prompt) :, None])[:, 0]
            )
        assert np.abs(logprobs.numpy() - expected).max() < 1e-4


def test_checkpoints_are_completed_beside_training(story):
    manifests = story["manifests"]
    assert list(manifests) == [SAVED, 4, STEPS]
    for step, manifest in manifests.items():
        assert (manifest["policy_version"], manifest["updates"], manifest["ranks"]) == (
            step,
            4 * step,
            2,
        )
        assert {f"learner/rank_{rank}.pt" for rank in (0, 1)} | {
            "hf/config.json",
            "hf/tokenizer.json",
            "queue.json",
        } <= set(manifest["files"])
    assert len({manifest["tokenizer_fingerprint"] for manifest in manifests.values()}) == 1
    lines = [json.loads(line) for line in (story["dir"] / "metrics.jsonl").read_text().splitlines()]
    saved = [line for line in lines if "time/checkpoint_stall_s" in line][: len(manifests)]
    assert [(line["step"], line["checkpoint/failures"]) for line in saved] == [
        (step, 0) for step in manifests
    ]
    assert story["log"].count("training waited") == 2, "the two that were waited for"
    assert "room for" not in story["log"]


def test_a_run_prints_a_line_per_event(story):
    """A start, an evaluation, six steps, checkpoints and a death: no line per engine and weight
    sync.
    """
    lines = story["log"].splitlines()
    slow = re.compile(r"step |bottleneck|.* s so far$|.* waits for .*, \d+ s$")  # by the machine
    assert sum(not slow.match(line) for line in lines) <= 18, story["log"]
    assert sum("KV caches" in line for line in lines) <= 1
    assert [line.split()[1] for line in lines if line.startswith("step ")][-1] == f"{STEPS}/{STEPS}"


def test_a_second_run_in_the_directory_is_refused_before_it_starts_anything(story):
    process = f"process {os.getpid()} on {socket.gethostname()}"
    assert len(story["refused"]) == 2
    for said in story["refused"]:
        assert said.startswith(f"another run uses {story['dir']}: {process}, since ")
    assert not (story["dir"] / "lock.json").exists(), "both runs have ended"


def test_nothing_is_left_behind(story):
    def gone() -> bool:
        return not any(os.path.exists(f"/proc/{pid}") for pid in story["pids"])

    wait_until(gone, 15, "the end of the run's processes")
    left = os.listdir("/dev/shm")
    assert not [name for name in left for key in story["keys"] if key in name]
