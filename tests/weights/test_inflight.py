"""Publications reach a running engine: one response lives through several, and every token's stamp
and log-prob are true.
"""

from __future__ import annotations

import asyncio
import uuid

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.shared_memory import SEGMENT_DIR, SharedMemorySender, segment_path
from async_grpo.weights.transport import TornTransfer, Version
from tests.support.engine_weights import PROMPT, learner_logprobs, perturbed
from tests.support.models import ModuleOwner, write_model


async def generate_through_publications(
    engine: VllmEngine, sender: SharedMemorySender, owner: ModuleOwner, models: list
) -> list:
    """Start long responses, publish models 1 and 2 while they run, return them."""
    sampling = Sampling(n=6, max_tokens=600, temperature=0.8)
    task = asyncio.create_task(engine.generate(PROMPT, sampling))
    for version in (1, 2):
        await asyncio.sleep(0.4)
        assert not task.done(), "the responses ended before the publication; make them longer"
        owner.model = models[version]
        receipt = await engine.receive(sender.stage(Version(0, version).label, verify=version == 1))
        assert (
            receipt.serving == f"v0.{version}"
            and not receipt.failure
            and receipt.recomputed_tokens > 0
        )
    return await asyncio.wait_for(task, 60)


@pytest.mark.timeout(150)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_response_lives_through_two_publications(tmp_path, tied):
    directory = write_model(tmp_path / "model", tied=tied, positions=1024, ends=False)
    base = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    models = [base, perturbed(base, 1), perturbed(base, 2)]
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": directory},
            "rollout": {"prompt_length": 32, "response_length": 700},
            "weight_sync": {"kv_cache": "recompute"},
            "cluster": {"engine": {"max_num_seqs": 8}},
        }
    )
    owner, key = ModuleOwner(base), f"test-{uuid.uuid4().hex[:8]}"
    sender = SharedMemorySender(owner, key=key, fallback=tmp_path / "weights")

    async def scenario():
        engine = await VllmEngine.start(
            config,
            model_dir=directory,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label=Version(0, 0).label,
            seed=1,
        )
        try:
            [payload] = sender.connect("127.0.0.1", [1])
            assert not (await engine.connect(payload)).failure
            completions = await generate_through_publications(engine, sender, owner, models)
            stale = sender.stage("v0.3", verify=False)
            sender.stage("v0.4", verify=False)
            newest = sender.stage("v0.5", verify=True)
            torn = await engine.receive(stale)
            assert (
                torn.failure == "torn"
                and "announcement is for write" in torn.reason
                and torn.serving == "v0.2"
            )
            assert (await engine.receive(newest)).serving == "v0.5"
            with pytest.raises(
                ValueError, match=r"v0.3 was announced to an engine that serves v0.5"
            ):
                await engine.receive(stale)
            [(labels, scored)] = await engine.score(
                [(PROMPT, completions[0].token_ids[:50].tolist())]
            )
            assert set(labels) == {"v0.5"}
            assert (
                np.abs(
                    scored - learner_logprobs(models[2], PROMPT, completions[0].token_ids[:50], 1.0)
                ).max()
                < 1e-4
            )
            return completions
        finally:
            engine.close()

    completions = asyncio.run(scenario())
    sender.close()
    assert not list(SEGMENT_DIR.glob(f"*{key}*"))
    spanning = 0
    for completion in completions:
        versions = [span.policy_version for span in completion.versions]
        assert versions == sorted(versions) and completion.versions[-1].end == len(
            completion.token_ids
        )
        spanning += len(set(versions)) >= 3
        by_version = [
            learner_logprobs(model, PROMPT, completion.token_ids, 0.8) for model in models
        ]
        for span in completion.versions:
            recorded = completion.logprobs[span.start : span.end]
            assert (
                np.abs(recorded - by_version[span.policy_version][span.start : span.end]).max()
                < 1e-4
            )
            if span.policy_version > 0 and span.end - span.start > 20:
                before = by_version[span.policy_version - 1][span.start : span.end]
                assert np.abs(recorded - before).mean() > 1e-3
    assert spanning >= 1


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_seeded_prompts_that_exceed_a_batch_together_are_answered(tmp_path):
    """vLLM on CPU dies where it computes a seeded prompt in several parts."""
    directory = write_model(tmp_path / "model", positions=1024, ends=False)
    rollout = {"prompt_length": 1000, "response_length": 20}
    run, model = {"total_steps": 1}, {"path": directory}
    config = Config.model_validate({"run": run, "model": model, "rollout": rollout})

    async def scenario():
        engine = await VllmEngine.start(
            config,
            model_dir=directory,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label="v0.0",
            seed=1,
        )
        try:
            one = Sampling(n=1, max_tokens=20, temperature=1.0, seed=3)
            prompts = [[3 + (start + at) % 90 for at in range(1000)] for start in range(8)]
            return await asyncio.gather(*[engine.generate(prompt, one) for prompt in prompts])
        finally:
            engine.close()

    answers = asyncio.run(scenario())
    assert [len(answer.token_ids) for [answer] in answers] == [20] * 8


def test_a_torn_segment_is_refused(tmp_path):
    from async_grpo.weights.shared_memory import SegmentReader

    owner = ModuleOwner(torch.nn.Linear(4, 3))
    sender = SharedMemorySender(owner, key=f"test-{uuid.uuid4().hex[:8]}", fallback=tmp_path)
    try:
        [payload] = sender.connect("127.0.0.1", [1])
        reader = SegmentReader(payload["metadata"])
        first = sender.stage("v0.1", verify=True).payload
        got = dict(reader.tensors(**first))
        assert torch.equal(got["weight"], owner.model.weight) and torch.equal(
            got["bias"], owner.model.bias
        )
        sender.stage("v0.2", verify=False)
        sender.stage("check", verify=False, apart=True)
        reader.check(first["path"], first["sequence"])
        sender.stage("v0.3", verify=False)
        with pytest.raises(TornTransfer):
            reader.check(first["path"], first["sequence"])
        assert segment_path(SEGMENT_DIR, sender._key, 0).stat().st_mode & 0o777 == 0o600
    finally:
        sender.close()
