"""The load-path check with a real engine and a learner in bfloat16: honest publications pass,
faulty ones do not, also with noise added to what the engine answers.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.rollout.engine import Engine, Sampling
from async_grpo.weights.checks import Difference, LoadPathCheck, SelfCheckFailed, Tolerance
from async_grpo.weights.shared_memory import SharedMemorySender
from async_grpo.weights.transport import Announcement, Receipt, Staged, TokenSequence
from tests.support.engine_weights import learner_logprobs
from tests.support.models import ModuleOwner, write_model

START_S, ANSWER_S = 120.0, 60.0
PROMPTS, TOKENS = 16, 32
pytestmark = pytest.mark.timeout(550)
Weights = dict[str, Tensor]


def config(directory: str) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 9},
            "model": {"path": directory, "dtype": "bfloat16"},
            "rollout": {"prompt_length": 32, "response_length": TOKENS},
            "cluster": {"engine": {"max_num_seqs": 32}},
        }
    )


class Serving:
    """A real engine in bfloat16, as the check sees it. `noise`: standard deviation of what is added
    to its log-probs.
    """

    actor_id, tensor_parallel_size = "a0", 1

    def __init__(self, directory: str) -> None:
        self.loop, self.noise = asyncio.new_event_loop(), 0.0
        self.draws = np.random.default_rng(0)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.now(
            Engine.start(
                config(directory),
                model_dir=directory,
                device="cpu",
                backend="shared_memory",
                stop_token_ids=[],
                label="v0.0",
                seed=1,
            ),
            START_S,
        )

    def now(self, work: Coroutine[Any, Any, Any], seconds: float = ANSWER_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    async def receive(self, announcement: Announcement) -> Receipt:
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self.engine.receive(announcement), self.loop)
        )

    async def score(self, sequences: Sequence[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        scored = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self.engine.score(sequences), self.loop)
        )
        return [
            (labels, row + self.draws.normal(0, self.noise, len(row)).astype(np.float32))
            for labels, row in scored
        ]

    def sequences(self) -> list[TokenSequence]:
        """Sampled responses to random prompts."""
        draws, found = np.random.default_rng(1), []
        for _ in range(PROMPTS):
            prompt = draws.integers(3, 99, 12).tolist()
            [one] = self.now(
                self.engine.generate(prompt, Sampling(n=1, max_tokens=TOKENS, temperature=1.0))
            )
            found.append((prompt, one.token_ids.tolist()))
        return found


Fault = Callable[[Weights, Weights], Weights]
"""What arrives: of the weights that were sent, and those of before."""


def kept(part: str) -> Fault:
    """Tensors whose name has this part stay as they were."""
    return lambda sent, old: {
        name: old[name] if part in name else tensor for name, tensor in sent.items()
    }


def swapped(sent: Weights, old: Weights) -> Weights:
    """The first two layers' MLPs change places."""
    return {
        name: sent[name.replace("layers.0.mlp", "layers.1.mlp")]
        if "layers.0.mlp" in name
        else sent[name.replace("layers.1.mlp", "layers.0.mlp")]
        if "layers.1.mlp" in name
        else tensor
        for name, tensor in sent.items()
    }


def transposed(sent: Weights, old: Weights) -> Weights:
    """Square matrices arrive the other way round."""
    return {
        name: tensor.t().contiguous() if "o_proj" in name else tensor
        for name, tensor in sent.items()
    }


FAULTS: dict[str, Fault] = {
    "nothing arrives": lambda sent, old: old,
    "attention is kept": kept("self_attn"),
    "MLPs are kept": kept("mlp"),
    "the last layer is kept": kept("layers.1."),
    "the embedding is kept": kept("embed_tokens"),
    "layers are swapped": swapped,
    "matrices are transposed": transposed,
    "weights are halved": lambda sent, old: {name: one / 2 for name, one in sent.items()},
}


class Learner:
    """The learner's side: its model, and what becomes of the weights on their way."""

    def __init__(
        self, serving: Serving, directory: Path, fault: Fault | None, *, seed: int
    ) -> None:
        self._fault, self._seed = fault, seed
        self.model = copy.deepcopy(serving.model)
        self._owner = ModuleOwner(self.model)
        self.sender = SharedMemorySender(
            self._owner, key=f"test-{uuid.uuid4().hex[:8]}", fallback=directory
        )

    def _logprobs(self, model: torch.nn.Module, rows: list[TokenSequence]) -> list[np.ndarray]:
        return [
            learner_logprobs(model, prompt, np.array(response), 1.0) for prompt, response in rows
        ]

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        before = self._logprobs(self.model, sequences)
        changed = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(self._seed)
        with torch.no_grad():
            for one in changed.parameters():
                draw = (
                    torch.randn(one.shape, generator=generator) * one.float().pow(2).mean() ** 0.5
                )
                one.add_((scale * draw).to(one.dtype))
        sent = {name: one.detach() for name, one in changed.named_parameters()}
        if self._fault is not None and scale:
            old = {name: one.detach() for name, one in self.model.named_parameters()}
            sent = self._fault(sent, old)
        self._owner.named_weights = lambda: iter(sent.items())  # type: ignore[method-assign]
        announcement = self.sender.stage(label, verify=True, apart=True)
        return Staged(announcement, self._logprobs(changed, sequences), before)

    async def release(self) -> None: ...


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = write_model(tmp_path_factory.mktemp("model"), tied=False, ends=False)
    serving = Serving(directory)
    yield serving
    serving.engine.close()
    serving.loop.call_soon_threadsafe(serving.loop.stop)


epochs = iter(range(1, 10_000))


def objects(
    serving: Serving,
    sequences: list[TokenSequence],
    directory: Path,
    *,
    fault: Fault | None,
    noise: float,
    seed: int,
) -> bool:
    """Whether the check ends the run."""
    serving.noise, serving.draws = noise, np.random.default_rng(seed)
    learner = Learner(serving, directory, fault, seed=seed)
    try:
        [payload] = learner.sender.connect("127.0.0.1", [1])
        assert not serving.now(serving.engine.connect(payload)).failure

        async def deliver(engines: Sequence[Any], announcement: Announcement) -> None:
            receipt = await serving.receive(announcement)
            assert not receipt.failure, receipt

        check = LoadPathCheck(
            config("m"),
            learner=learner,
            tolerance=Tolerance(exact=False),
            backend="shared_memory",
            deliver=deliver,
        )
        check.sequences = sequences
        try:
            asyncio.run(check.load_path([serving]))
        except SelfCheckFailed:
            return True
        return False
    finally:
        learner.sender.close()


@pytest.fixture(scope="module")
def sequences(serving: Serving) -> list[TokenSequence]:
    return serving.sequences()


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_honest_weights_pass(
    serving: Serving, sequences: list[TokenSequence], tmp_path: Path, noise: float
) -> None:
    assert not objects(serving, sequences, tmp_path, fault=None, noise=noise, seed=0)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(
    serving: Serving, sequences: list[TokenSequence], tmp_path: Path, name: str
) -> None:
    assert objects(serving, sequences, tmp_path, fault=FAULTS[name], noise=0.02, seed=1)


def test_weights_that_changed_behind_the_back_are_found(
    serving: Serving, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    """What a drift probe compares, in bfloat16: an honest engine is within the tolerance, one that
    took other weights than it says is not.
    """
    serving.noise, tolerance = 0.0, Tolerance(exact=False)
    differences = []
    for scale in (0.0, 0.05):
        learner = Learner(serving, tmp_path, None, seed=3)
        try:
            [payload] = learner.sender.connect("127.0.0.1", [1])
            assert not serving.now(serving.engine.connect(payload)).failure
            staged = asyncio.run(
                learner.stage_perturbed("self-check", scale=scale, sequences=sequences)
            )
            receipt = asyncio.run(serving.receive(staged.announcement))
            assert not receipt.failure
            scored = [row for _, row in asyncio.run(serving.score(sequences))]
            differences.append(Difference.of(scored, staged.before))
        finally:
            learner.sender.close()
    honest, changed = differences
    assert tolerance.measure(honest) == "" and tolerance.objection(honest) == ""
    assert "log-probs differ by" in tolerance.objection(changed)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05, 0.1])
def test_alarms_by_noise(
    serving: Serving, sequences: list[TokenSequence], tmp_path: Path, noise: float
) -> None:
    """The table of docs/gpu.md: false and missed alarms of ten draws each."""
    seeds = range(10)
    false = sum(
        objects(serving, sequences, tmp_path, fault=None, noise=noise, seed=seed) for seed in seeds
    )
    missed = {
        name: sum(
            not objects(serving, sequences, tmp_path, fault=fault, noise=noise, seed=seed)
            for seed in seeds
        )
        for name, fault in FAULTS.items()
    }
    print(f"noise {noise}: {false} of {len(seeds)} false alarms; missed {missed}", flush=True)
    assert false == 0 and sum(missed.values()) == 0
