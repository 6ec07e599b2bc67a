"""The load-path check with a real engine and a plain model as learner, and what may happen to
weights on their way.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.config.schema import Config
from async_grpo.learner.weights import Published
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.checks import LoadPathCheck, SelfCheckFailed, Tolerance
from async_grpo.weights.shared_gpu import Apart
from async_grpo.weights.shared_memory import SharedMemorySender
from async_grpo.weights.transport import Announcement, Receipt, Staged, TokenSequence
from tests.support.engine_weights import learner_logprobs
from tests.support.models import ModuleOwner

START_S, ANSWER_S = 180.0, 90.0
TOKENS = 32
Weights = dict[str, Tensor]
Fault = Callable[[Weights, Weights], Weights]
"""What arrives: of the weights that were sent, and those of before."""


def config(directory: str, dtype: str = "bfloat16") -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 9},
            "model": {"path": directory, "dtype": dtype},
            "rollout": {"prompt_length": 64, "response_length": TOKENS},
            "cluster": {"engine": {"max_num_seqs": 32}},
        }
    )


class Serving:
    """A real engine, as the check sees it. `noise`: standard deviation of what is added to its
    log-probs.
    """

    actor_id, tensor_parallel_size = "a0", 1

    def __init__(self, directory: str, dtype: str = "bfloat16") -> None:
        self.loop, self.noise, self.dtype = asyncio.new_event_loop(), 0.0, dtype
        self.draws = np.random.default_rng(0)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self.before: list[np.ndarray] = []
        """The learner's log-probs of the sequences, once they have been asked for."""
        self.known: dict[tuple[int, float], list[np.ndarray]] = {}
        """Those under perturbed weights, by seed and scale."""
        self.sampled: dict[str, list[TokenSequence]] = {}
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.now(
            VllmEngine.start(
                config(directory, dtype),
                model_dir=directory,
                device="cpu",
                backend="shared_memory",
                stop_token_ids=[],
                label="v0.0",
                seed=1,
            ),
            START_S,
        )

    def close(self) -> None:
        self.engine.close()
        self.loop.call_soon_threadsafe(self.loop.stop)

    def takes(self, kind: str) -> list[TokenSequence]:
        """Sequences of this kind; the learner's log-probs of others are forgotten."""
        self.before = []
        self.known.clear()
        return self.sampled[kind]

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

    def sequences(self, prompts: Sequence[list[int]]) -> list[TokenSequence]:
        """Sampled responses to prompts, as a run's check has them."""
        found = []
        for prompt in prompts:
            sampling = Sampling(n=1, max_tokens=TOKENS, temperature=1.0, seed=1, ignore_eos=True)
            [one] = self.now(self.engine.generate(prompt, sampling))
            found.append((prompt, one.token_ids.tolist()))
        return found


def random_prompts(count: int) -> list[list[int]]:
    draws = np.random.default_rng(1)
    return [draws.integers(3, 99, 12).tolist() for _ in range(count)]


def text_prompts(directory: str, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not chat:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts
    ]


def kept(*parts: str) -> Fault:
    """Tensors whose name has one of these parts stay as they were."""
    return lambda sent, old: {
        name: old[name] if any(part in name for part in parts) else tensor
        for name, tensor in sent.items()
    }


def swapped(part: str, other: str) -> Fault:
    """Tensors of two modules change places."""

    def arrives(sent: Weights, old: Weights) -> Weights:
        return {
            name: sent[name.replace(part, other)]
            if part in name
            else sent[name.replace(other, part)]
            if other in name
            else tensor
            for name, tensor in sent.items()
        }

    return arrives


def transposed(sent: Weights, old: Weights) -> Weights:
    """Square matrices arrive the other way round."""
    return {
        name: tensor.t().contiguous() if "o_proj" in name else tensor
        for name, tensor in sent.items()
    }


def times(factor: float) -> Fault:
    return lambda sent, old: {name: one * factor for name, one in sent.items()}


def faults(layers: int) -> dict[str, Fault]:
    """The eight faults, for a model of so many layers."""
    return {
        "nothing arrives": lambda sent, old: old,
        "attention is kept": kept("self_attn"),
        "MLPs are kept": kept("mlp"),
        "the last layer is kept": kept(f"layers.{layers - 1}."),
        "the embedding is kept": kept("embed_tokens"),
        "layers are swapped": swapped("layers.0.mlp", "layers.1.mlp"),
        "matrices are transposed": transposed,
        "weights are halved": times(0.5),
    }


class Learner:
    """The learner's side: its model, and what becomes of the weights on their way."""

    def __init__(
        self, serving: Serving, directory: Path, fault: Fault | None, *, seed: int
    ) -> None:
        self._serving, self._fault, self._seed = serving, fault, seed
        self.model = serving.model
        self._owner = ModuleOwner(self.model)
        self._published = Published(self.model)
        self.sender = SharedMemorySender(
            self._owner, key=f"test-{uuid.uuid4().hex[:8]}", fallback=directory
        )

    def _logprobs(self, rows: list[TokenSequence]) -> list[np.ndarray]:
        return [
            learner_logprobs(self.model, prompt, np.array(response), 1.0)
            for prompt, response in rows
        ]

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        serving = self._serving
        serving.before = serving.before or self._logprobs(sequences)
        old = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        with self._published.perturbed(scale=scale, seed=self._seed):
            sent = {name: one.detach() for name, one in self.model.named_parameters()}
            if self._fault is not None and scale:
                sent = self._fault(sent, old)
            self._owner.named_weights = lambda: iter(sent.items())  # type: ignore[method-assign]
            announcement = self.sender.stage(label, verify=True, apart=True)
            place = (self._seed, scale)
            if place not in serving.known:
                serving.known[place] = self._logprobs(sequences)
        return Staged(announcement, serving.known[place], serving.before)

    async def release(self) -> None: ...


def alarm(
    serving: Serving,
    sequences: list[TokenSequence],
    directory: Path,
    *,
    fault: Fault | None,
    noise: float,
    seed: int,
) -> tuple[str, dict[str, float]]:
    """What ends the run, or "", and what was measured."""
    serving.noise, serving.draws = noise, np.random.default_rng(seed)
    learner = Learner(serving, directory, fault, seed=seed)
    tolerance = Tolerance(exact=serving.dtype == "float32")
    try:
        [payload] = learner.sender.connect("127.0.0.1", [1])
        assert not serving.now(serving.engine.connect(payload)).failure

        async def deliver(engines: Sequence[Any], announcement: Announcement) -> None:
            receipt = await serving.receive(announcement)
            assert not receipt.failure, receipt

        check = LoadPathCheck(
            config("m", serving.dtype),
            learner=learner,
            tolerance=tolerance,
            backend="shared_memory",
            deliver=deliver,
            gpu=Apart(),
        )
        check.sequences = sequences
        try:
            measured = asyncio.run(check.load_path([serving]))
        except SelfCheckFailed as error:
            return str(error), {"noise": tolerance.noise}
        return "", measured | {"noise": tolerance.noise}
    finally:
        learner.sender.close()
