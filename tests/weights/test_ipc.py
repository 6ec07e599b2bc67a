"""Publications over CUDA IPC: learner and engine on one GPU. Without a GPU there is nothing to run
here.
"""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.transport import Version
from tests.support.engine_weights import learner_logprobs, perturbed
from tests.support.models import ModuleOwner, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU"),
]
PROMPT = list(range(5, 17))


def test_an_engine_on_the_learners_gpu_reads_its_copy(tmp_path) -> None:
    from async_grpo.weights.ipc import IpcSender

    directory = write_model(tmp_path / "model", tied=True, ends=False)
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": directory, "dtype": "float32"},
            "rollout": {"prompt_length": 32, "response_length": 300},
            "cluster": {"engine": {"max_num_seqs": 8, "kv_cache_gb": 1.0, "enforce_eager": True}},
        }
    )
    base = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    models = {0: base, 1: perturbed(base, 1), 2: perturbed(base, 2)}
    owner = ModuleOwner(copy.deepcopy(base).to("cuda:0"))
    owner.device = "cuda:0"
    sender = IpcSender(owner)

    async def scenario() -> None:
        engine = await VllmEngine.start(
            config,
            model_dir=directory,
            device="cuda",
            backend="ipc",
            stop_token_ids=[],
            label=Version(0, 0).label,
            seed=1,
        )
        try:
            [payload] = sender.connect("127.0.0.1", [1])
            assert not (await engine.connect(payload)).failure
            running = asyncio.create_task(
                engine.generate(PROMPT, Sampling(n=4, max_tokens=250, temperature=0.8))
            )
            for version in (1, 2):
                await asyncio.sleep(0.2)
                owner.model = copy.deepcopy(models[version]).to("cuda:0")
                receipt = await engine.receive(sender.stage(Version(0, version).label, verify=True))
                assert receipt.serving == Version(0, version).label and not receipt.failure
            announcement = sender.stage(Version(0, 3).label, verify=True)
            sender._copy[1000] ^= 1
            torn = await engine.receive(announcement)
            assert torn.failure == "mismatch" and "bucket 1 of" in torn.reason
            assert not (
                await engine.receive(sender.stage(Version(0, 4).label, verify=True))
            ).failure
            for completion in [
                *await running,
                *await engine.generate(PROMPT, Sampling(n=2, max_tokens=60, temperature=0.8)),
            ]:
                for span in completion.versions:
                    expected = learner_logprobs(
                        models[min(span.policy_version, 2)], PROMPT, completion.token_ids, 0.8
                    )[span.start : span.end]
                    assert (
                        np.abs(completion.logprobs[span.start : span.end] - expected).mean() < 1e-3
                    ), "float32 on a GPU may use TF32"
        finally:
            engine.close()

    try:
        asyncio.run(scenario())
    finally:
        sender.close()
