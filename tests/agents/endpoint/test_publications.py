"""Weights reach a real engine while programs talk to it: every token that came through the endpoint
has the log-prob of the version that is stamped on it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.agents.endpoint.served import ServedEpisode
from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.config.schema import Config
from async_grpo.rollout.chat_format import PlainFormat
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.rollout.episodes import Episode
from async_grpo.rollout.session import Session
from async_grpo.weights.shared_memory import SharedMemorySender
from async_grpo.weights.transport import Version
from tests.support.engine_weights import learner_logprobs, perturbed
from tests.support.models import ModuleOwner, write_model

EPISODES, TURNS, TOKENS, TEMPERATURE = 6, 3, 280, 0.8
pytestmark = pytest.mark.timeout(200)


def config_of(directory: str) -> Config:
    length = TURNS * TOKENS
    rollout = {"prompt_length": 32, "response_length": length, "context_length": length + 100}
    return Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": directory, "dtype": "float32"},
            "task": {"name": "program", "options": {"command": "-", "of": "chain"}},
            "rollout": rollout | {"turn_length": TOKENS, "max_turns": 8},
            "weight_sync": {"kv_cache": "recompute"},
            "cluster": {"engine": {"max_num_seqs": 16}},
        }
    )


class Served:
    """Episodes at an endpoint in front of an engine, and clients that go through their turns
    together.
    """

    def __init__(self, config: Config, engine: VllmEngine, tokenizer: Any) -> None:
        self.config, self.engine = config, engine
        self.tokenizer, self.counts = tokenizer, Counter[str]()
        self.endpoint = Endpoint(config.endpoint, words=tokenizer.decode, counts=self.counts)
        self.names = count()
        self.open: list[str] = []

    def episode(self) -> ServedEpisode:
        async def sample(tokens: list[int], sampling: Sampling) -> Completion:
            name = f"request-{next(self.names)}"
            self.open.append(name)
            [done] = await self.engine.generate(tokens, sampling, name=name)
            self.open.remove(name)
            return done

        return ServedEpisode(
            self.config.rollout,
            Episode(Session(), {"correct": 0.0}),
            sample=sample,
            formats=lambda tools: PlainFormat(self.tokenizer),
            text=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False),
            sampling=Sampling(n=1, max_tokens=TOKENS, temperature=TEMPERATURE),
            counts=self.counts,
        )

    def all_have_begun(self) -> bool:
        """Whether every episode has a request of which a token is sampled."""
        begun = [self.engine.so_far(name).get(0) for name in self.open]
        return len([one for one in begun if one is not None and len(one.token_ids)]) == EPISODES

    async def converse(self, number: int, key: str, between: asyncio.Barrier) -> None:
        """Talk in turns; all wait for each other, and for the publication, before each."""
        messages: list[Any] = [{"role": "user", "content": f"{number}+1="}]
        async with httpx.AsyncClient(timeout=100) as client:
            await between.wait()
            for _ in range(TURNS):
                reply = await client.post(
                    self.endpoint.url + "/chat/completions",
                    headers={"Authorization": f"Bearer {key}"},
                    json={"model": "policy", "messages": messages},
                )
                assert reply.status_code == 200, reply.text
                messages += [reply.json()["choices"][0]["message"]]
                messages += [{"role": "user", "content": f"+{number}="}]
                await between.wait()
                await between.wait()


async def play(served: Served, publish: Any) -> list[Episode]:
    """Publish once while all turns are under way, and once between them, turn after turn."""
    await served.endpoint.start()
    async with AsyncExitStack() as stack:
        episodes = [served.episode() for _ in range(EPISODES)]
        keys = [await stack.enter_async_context(served.endpoint.serving(one)) for one in episodes]
        between = asyncio.Barrier(EPISODES + 1)
        clients = asyncio.gather(
            *[served.converse(number, key, between) for number, key in enumerate(keys)]
        )
        await between.wait()
        for _ in range(TURNS):
            while not served.all_have_begun():
                await asyncio.sleep(0.01)
            await publish()
            await between.wait()
            assert not served.open
            await publish()
            await between.wait()
        await clients
    await served.endpoint.close()
    return [one.episode for one in episodes]


def test_log_probs_are_those_of_the_stamped_versions(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", positions=1024, ends=False)
    base = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    models = [base, *[perturbed(base, seed) for seed in range(1, 2 * TURNS + 1)]]
    owner, config = ModuleOwner(base), config_of(directory)
    sender = SharedMemorySender(
        owner, key=f"test-{uuid.uuid4().hex[:8]}", fallback=tmp_path / "weights"
    )

    async def scenario() -> list[Episode]:
        engine = await VllmEngine.start(
            config,
            model_dir=directory,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label=Version(0, 0).label,
            seed=1,
        )
        newest = 0

        async def publish() -> None:
            nonlocal newest
            newest += 1
            owner.model = models[newest]
            receipt = await engine.receive(sender.stage(f"v0.{newest}", verify=False))
            assert receipt.serving == f"v0.{newest}" and not receipt.failure

        try:
            [payload] = sender.connect("127.0.0.1", [1])
            assert not (await engine.connect(payload)).failure
            tokenizer = AutoTokenizer.from_pretrained(directory)
            return await play(Served(config, engine, tokenizer), publish)
        finally:
            engine.close()

    episodes = asyncio.run(scenario())
    sender.close()
    assert len(episodes) == EPISODES
    for episode in episodes:
        [row] = episode.session.rows
        assert [count for _, count in row.segments] == [TOKENS] * TURNS
        check_row(row, models)


def check_row(row: Any, models: list[torch.nn.Module]) -> None:
    """All odd versions sampled within a request, the even ones before: 0, 1, 2 ..."""
    sampled = np.concatenate(
        [
            np.arange(end - count, end)
            for end, (_, count) in zip(
                np.cumsum([sum(pair) for pair in row.segments]), row.segments, strict=True
            )
        ]
    )
    assert [span.policy_version for span in row.versions] == list(range(2 * TURNS))
    known = [
        learner_logprobs(model, row.prompt, row.response_ids, TEMPERATURE)[sampled]
        for model in models
    ]
    for span in row.versions:
        recorded = row.behavior_logprobs[span.start : span.end]
        true = known[span.policy_version][span.start : span.end]
        assert np.abs(recorded - true).max() <= 1e-4
        other = known[span.policy_version + 1][span.start : span.end]
        assert np.abs(recorded - other).mean() > 1e-3
