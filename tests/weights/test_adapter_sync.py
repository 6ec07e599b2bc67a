"""Adapters reach a running engine: responses that began under different versions run at the same
time, and the log-probs of each are those of the learner's merged model of its version.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.config.schema import Config
from async_grpo.learner import adapters
from async_grpo.learner.weights import Published, PublishedFactors
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.names import file_shapes
from async_grpo.weights.shared_memory import SharedMemorySender
from async_grpo.weights.transport import UNPUBLISHED, Announcement, Receipt, Version
from tests.support.engine_weights import PROMPT, learner_logprobs
from tests.support.families import write_family

EXACT, VISIBLE, LATE_S = 1e-4, 1e-3, 60.0
TOKENS = 300
LONG_PROMPT = [3 + at % 90 for at in range(70)]
pytestmark = pytest.mark.timeout(200)


def config_of(directory: str, **lora: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {
                "path": directory,
                "dtype": "float32",
                "lora": {"rank": 4, "alpha": 12.0, **lora},
            },
            "rollout": {"prompt_length": 128, "response_length": TOKENS + 80},
            "replay": {"max_staleness": 1},
            "weight_sync": {"lora": "adapter"},
            "cluster": {"engine": {"max_num_seqs": 16}},
        }
    )


class Learner:
    """A model with adapters and the sender of its factors, without a backend."""

    def __init__(self, config: Config, directory: str, scratch: Path) -> None:
        self._directory = directory
        self.hf: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory).float().eval()
        adapters.restrict(self.hf, config.model, seed=1, base=directory)
        files = file_shapes(directory)
        self.published = Published(self.hf, files=files)
        self.sent = PublishedFactors(self.hf, files=files)
        key = f"test-{uuid.uuid4().hex[:8]}"
        self.sender = SharedMemorySender(self.sent, key=key, fallback=scratch)
        self.models: dict[str, PreTrainedModel] = {}

    def train(self, seed: int) -> None:
        """Move every factor, as far as steps would after a while."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in adapters.layers(self.hf).values():
                for factor, size in zip(adapters.factors(layer)[:2], (0.02, 0.05), strict=True):
                    factor.add_(size * torch.randn(factor.shape, generator=generator))

    def merged(self) -> PreTrainedModel:
        """A plain model with the weights that the learner has now."""
        plain = AutoModelForCausalLM.from_pretrained(self._directory).float().eval()
        weights = {name: one.clone() for name, one in self.published.named_weights()}
        assert not plain.load_state_dict(weights, strict=False).unexpected_keys
        return plain

    def stage(self, version: int) -> Announcement:
        label = Version(0, version).label
        self.models[label] = self.merged()
        return self.sender.stage(label, verify=True)


def largest(apart: np.ndarray) -> float:
    return float(np.abs(apart).max())


@dataclass
class Running:
    """An engine with its learner, inside one event loop."""

    engine: VllmEngine
    learner: Learner

    async def publish(self, version: int) -> Receipt:
        self.learner.train(version)
        return await self.engine.receive(self.learner.stage(version))

    def begin(self, name: str, *, n: int = 2) -> asyncio.Task[list[Completion]]:
        sampling = Sampling(n=n, max_tokens=TOKENS, temperature=0.8, ignore_eos=True)
        return asyncio.create_task(self.engine.generate(PROMPT, sampling, name=name))

    async def runs(self, name: str) -> None:
        """Wait until all responses of a request have tokens."""
        async with asyncio.timeout(LATE_S):
            while True:
                found = self.engine.so_far(name).values()
                if found and all(len(one.token_ids) for one in found):
                    return
                await asyncio.sleep(0.005)

    def check(self, completion: Completion, label: str) -> None:
        """Its version's log-probs, and those of no other."""
        assert completion.labels == [(label, 0, TOKENS)]
        for other, model in self.learner.models.items():
            expected = learner_logprobs(model, PROMPT, completion.token_ids, 0.8)
            apart = largest(completion.logprobs - expected)
            assert apart < EXACT if other == label else apart > VISIBLE, (label, other, apart)

    async def distance(self, model: torch.nn.Module, *, times: int = 3) -> float:
        """Between scores of the engine and of a model: several at once, of different lengths."""
        rows = [(PROMPT, list(range(20, 40 + 5 * number))) for number in range(times)]
        scored = await asyncio.wait_for(self.engine.score(rows), LATE_S)
        expected = [learner_logprobs(model, one, np.array(two), 1.0) for one, two in rows]
        pairs = zip(scored, expected, strict=True)
        return max(largest(values - wanted) for (_, values), wanted in pairs)


async def versions_side_by_side(run: Running) -> None:
    """The base and three versions at once; a fourth waits until the responses of one have ended."""
    run.learner.models[UNPUBLISHED] = before = run.learner.merged()
    assert run.engine.serving == UNPUBLISHED and await run.distance(before) < EXACT
    requests = {UNPUBLISHED: run.begin("base")}
    await run.runs("base")
    for version in range(3):
        receipt = await run.publish(version)
        assert (receipt.failure, receipt.serving) == ("", f"v0.{version}")
        assert receipt.recomputed_tokens == receipt.kept_tokens == receipt.seconds["pause"] == 0
        assert not run.engine.paused
        requests[f"v0.{version}"] = run.begin(f"v0.{version}")
        await run.runs(f"v0.{version}")
    assert run.engine.unfinished == 8, "responses ended before the last version; make them longer"
    partial = run.engine.so_far("v0.0").values()
    assert {label for one in partial for label, _, _ in one.labels} == {"v0.0"}
    fourth = asyncio.create_task(run.publish(3))
    await asyncio.sleep(0)
    assert not fourth.done()
    await asyncio.wait({fourth}, timeout=LATE_S)
    assert fourth.result().serving == "v0.3"
    assert requests["v0.0"].done() or requests["v0.1"].done(), "an adapter in use was dropped"
    for label, request in requests.items():
        for completion in await asyncio.wait_for(request, LATE_S):
            run.check(completion, label)
    assert await run.distance(run.learner.models["v0.3"]) < EXACT


async def caches_of_versions_are_apart(run: Running) -> None:
    one = Sampling(n=1, max_tokens=1, temperature=0.0)
    [first] = await run.engine.generate(LONG_PROMPT, one)
    [again] = await run.engine.generate(LONG_PROMPT, one)
    assert first.cached_tokens == 0 < again.cached_tokens
    await run.publish(4)
    [new] = await run.engine.generate(LONG_PROMPT, one)
    assert new.cached_tokens == 0 and new.labels == [("v0.4", 0, 1)]


async def failures_leave_what_was_served(run: Running) -> None:
    announcement = run.learner.stage(5)
    sequence = announcement.payload["sequence"]
    stale = replace(announcement, payload=announcement.payload | {"sequence": sequence + 2})
    assert (await run.engine.receive(stale)).failure == "torn"
    checksums = [one ^ 1 for one in announcement.payload["checksums"]]
    wrong = replace(announcement, payload=announcement.payload | {"checksums": checksums})
    assert (await run.engine.receive(wrong)).failure == "mismatch"
    assert run.engine.serving == "v0.4" and not run.engine.paused
    assert await run.distance(run.learner.models["v0.4"]) < EXACT
    factor = ["base_model.model.model.norm.lora_A.weight", [4, 64], "float32"]
    receipt = await run.engine.connect({"metadata": [factor]})
    assert receipt.failure == "names" and "model.norm" in receipt.reason


async def perturbed_adapters_arrive(run: Running) -> None:
    """As the self-check publishes them: several times under one label."""
    sent = run.learner.sent
    for scale in (0.05, 0.4):
        with sent.perturbed(scale=scale, seed=2):
            announcement = run.learner.sender.stage("self-check", verify=True, apart=True)
            moved = run.learner.merged()
        assert not (await run.engine.receive(announcement)).failure
        assert await run.distance(moved) < EXACT
        assert await run.distance(run.learner.merged()) > VISIBLE


async def adapters_outlive_a_sleep(run: Running) -> None:
    """As far as vLLM's sleep goes on CPU."""
    await run.publish(6)
    task = run.begin("sleeps")
    await run.runs("sleeps")
    await run.engine.sleep()
    receipt = await run.publish(7)
    assert receipt.serving == "v0.7" and not run.engine.paused
    for completion in await asyncio.wait_for(task, LATE_S):
        run.check(completion, "v0.6")
    assert await run.distance(run.learner.models["v0.7"]) < EXACT


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {}),  # of which vLLM would wrap embeddings and head
        pytest.param(
            "qwen2_tied", {"target_modules": ["q_proj", "mlp.down_proj"]}, marks=pytest.mark.slow
        ),
    ],
)
def test_versions_of_adapters_side_by_side(
    tmp_path: Path, family: str, lora: dict[str, Any]
) -> None:
    directory = str(tmp_path / "model")
    write_family(family, Path(directory))
    config = config_of(directory, **lora)
    learner = Learner(config, directory, tmp_path / "weights")

    async def scenario() -> None:
        engine = await VllmEngine.start(
            config,
            model_dir=directory,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label=UNPUBLISHED,
            seed=1,
        )
        try:
            [payload] = learner.sender.connect("127.0.0.1", [1])
            assert not (await engine.connect(payload)).failure
            run = Running(engine, learner)
            await versions_side_by_side(run)
            await caches_of_versions_are_apart(run)
            await failures_leave_what_was_served(run)
            await perturbed_adapters_arrive(run)
            await adapters_outlive_a_sleep(run)
        finally:
            engine.close()

    try:
        asyncio.run(scenario())
    finally:
        learner.sender.close()
