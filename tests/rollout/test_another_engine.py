"""Another engine behind the rest: a host and its producer answer tickets and take weights over it,
the trial of a model compares what it computes, and estimates count what it takes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from async_grpo.config.operation import EngineConfig
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.replay.actor_reports import ActorReport
from async_grpo.rollout import chat_format, host
from async_grpo.rollout.engine.base import (
    Completion,
    Engine,
    EngineError,
    EngineKind,
    Purpose,
    Sampling,
    TriedEngine,
)
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.producer import GroupProducer
from async_grpo.run.preflight import architecture, engine_trial, memory
from async_grpo.weights.ipc import IpcSender
from async_grpo.weights.transport import Announcement, Receipt, make_sender, parse_label
from async_grpo.wire.codec import GroupTicket
from tests.support.families import write_family
from tests.support.models import ModuleOwner
from tests.support.rollout_parts import Parts
from tests.support.wiring import tiny_model

TOKENS = 4


class PlainEngine:
    """Says the same to every prompt, under the label of its weights."""

    max_num_seqs, unfinished, speeds = 7, 0, {}

    def __init__(self, label: str, stop_token_ids: Sequence[int]) -> None:
        self.serving, self.stop_token_ids = label, list(stop_token_ids)
        self.sampled: Counter[str] = Counter()
        self.closed = self.paused = False

    @property
    def serving_version(self) -> int:
        return parse_label(self.serving).step

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        name: str = "",
        purpose: Purpose = "rollouts",
    ) -> list[Completion]:
        ids = np.arange(3, 3 + TOKENS, dtype=np.int32)
        self.sampled["total"] += TOKENS * sampling.n
        labels = [(self.serving, 0, TOKENS)]
        logprobs = np.full(TOKENS, -1.0, np.float32)
        return [Completion(ids, logprobs, labels, "stop", 0.0) for _ in range(sampling.n)]

    def so_far(self, name: str) -> dict[int, Completion]:
        return {}

    def cut_off(self, name: str) -> int:
        return 0

    async def classify(self, sequences: Sequence[list[int]]) -> list[float]:
        return [0.0] * len(sequences)

    async def score(
        self, sequences: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[list[str], np.ndarray]]:
        return [([self.serving], np.full(len(ids), -1.0, np.float32)) for _, ids in sequences]

    async def top_logprobs(
        self, sequences: Sequence[tuple[list[int], list[int]]], top_k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        lengths = [len(ids) for _, ids in sequences]
        return [
            (np.full((length, 1 + top_k), -1.0, np.float32), np.zeros((length, top_k), np.int32))
            for length in lengths
        ]

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        return Receipt(self.serving)

    async def receive(self, announcement: Announcement) -> Receipt:
        self.serving = announcement.label
        return Receipt(self.serving)

    async def sleep(self) -> int:
        return 0

    async def wake(self) -> None: ...

    async def attend(self, announcement: Announcement) -> Receipt:
        return Receipt(self.serving)

    async def check(self) -> None:
        if self.closed:
            raise EngineError("closed")

    def close(self) -> None:
        self.closed = True


class Tried:
    """A model of transformers. deaf: weight syncs do not arrive."""

    def __init__(self, directory: str, *, deaf: bool) -> None:
        self._hf, self._deaf = AutoModelForCausalLM.from_pretrained(directory).eval(), deaf

    def logprobs(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        return engine_trial.own_logprobs(self._hf)

    def publish(self, tensors: Mapping[str, Tensor]) -> None:
        if not self._deaf:
            self._hf.load_state_dict(dict(tensors), strict=False)


class PlainKind:
    """See `EngineKind`; `events` is what it was asked for."""

    name, gpu_bytes, deaf = "PlainEngine", 5 * 2**30, False
    packages: ClassVar = ("numpy",)

    def __init__(self) -> None:
        self.events: list[Any] = []

    def set_environment(self, device: str) -> None:
        self.events.append(device)

    def kv_cache_gb(self, config: Config, *, device: str, backend: str) -> float | None:
        return 2.0

    def max_num_seqs(self, config: Config, *, device: str) -> int | None:
        return 7

    def adapter_rank(self, rank: int) -> int:
        return 16

    def serving(self, settings: EngineConfig, *, scores: bool) -> EngineConfig:
        return settings

    def begin(self, device: str, *, cores: Collection[int] = ()) -> Any:
        self.events.append("begin")
        return "early"

    async def start(
        self,
        config: Config,
        *,
        model_dir: str,
        device: str,
        backend: str,
        stop_token_ids: Sequence[int],
        label: str,
        seed: int,
        early: Any = None,
    ) -> Engine:
        self.events.append((early, backend))
        return PlainEngine(label, stop_token_ids)

    def pushing_sender(self) -> type[IpcSender]:
        return IpcSender

    def parser_for(self, template: str) -> str | None:
        return "curly" if "{" in template else None

    def call_reader(
        self, parser: str, tokenizer: Any, tools: Sequence[dict[str, Any]]
    ) -> Callable[[str], tuple[str, list[dict[str, Any]], str]]:
        return lambda text: (text, [{"name": parser, "arguments": "{}"}], "")

    def trial_arguments(self, config: Config, *, model: str, device: str) -> dict[str, Any]:
        return {"model": model, "dtype": "float32", "trust_remote_code": False}

    def refusal(self, arguments: dict[str, Any], *, device: str) -> str:
        return ""

    def tried(self, arguments: dict[str, Any], *, directory: str, dtype: str) -> TriedEngine:
        return Tried(directory, deaf=self.deaf)

    def in_words(self, error: Exception) -> str:
        return str(error)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> PlainKind:
    made = PlainKind()
    for module in (host, chat_format, architecture, engine_trial, memory):
        monkeypatch.setattr(module, "ENGINE", made)
    return made


def config(model: str) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": model},
            "rollout": {
                "rollout_batch_size": 2,
                "group_size": 2,
                "prompt_length": 32,
                "response_length": 8,
            },
        }
    )


def members(protocol: type) -> set[str]:
    return {name for name in {*vars(protocol), *protocol.__annotations__} if name[0] != "_"}


@pytest.mark.parametrize(
    ("protocol", "made"),
    [
        (Engine, PlainEngine("v0.0", [1])),
        (EngineKind, PlainKind()),
        (EngineKind, ENGINE),
        (TriedEngine, Tried),
    ],
)
def test_an_engine_has_all_that_the_protocol_asks_for(protocol: type, made: Any) -> None:
    for name in members(protocol):
        wanted, found = getattr(protocol, name, None), getattr(made, name)
        if inspect.isfunction(wanted) and made is not Tried:
            parameters = inspect.signature(wanted).parameters
            asked = [one for one in parameters if one != "self"]
            assert list(inspect.signature(found).parameters) == asked, name


class Queue(Parts):
    """Also verifiers, which start and end."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def acquire(
        self,
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket] | None:
        given, self.tickets = self.tickets[:want], self.tickets[want:]
        return None if len(self.frames) == 2 else given


async def test_a_producer_answers_tickets_and_takes_weights_over_it(
    kind: PlainKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, model = Queue(), tiny_model()
    monkeypatch.setattr(host, "VerifierPool", lambda *_, **__: queue)
    actor = GroupProducer(
        config(model), actor_id="a", queue=queue, model_dir=model, device="cpu", cores=()
    )
    assert await actor.start(backend="shared_memory", label="v0.0") == 7
    assert kind.events == ["begin", ("early", "shared_memory")]
    await actor.receive(Announcement("v0.3", "shared_memory"))
    async with asyncio.timeout(20):
        await actor.run()
    assert [[row.length for row in meta.rows] for meta in queue.frames] == [[TOKENS] * 2] * 2
    rows = [row for meta in queue.frames for row in meta.rows]
    assert [row.versions for row in rows] == [((3, TOKENS),)] * 4
    await actor.health()
    engine = actor.parts.engine
    engine.close()
    with pytest.raises(EngineError):
        await actor.health()


def test_the_trial_of_a_model_compares_what_it_computes(kind: PlainKind, tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    asked = architecture._question(config(str(tmp_path)), str(tmp_path), "cpu")
    assert engine_trial.answer(asked) == {"refused": "", "sure": True}
    kind.deaf = True
    assert "new weights do not arrive" in engine_trial.answer(asked)["refused"]


def test_its_part_of_a_gpu_is_counted(kind: PlainKind, tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    settings = config(str(tmp_path))
    shape = memory.shape_of(settings, AutoConfig.from_pretrained(tmp_path))
    need = memory.engine_memory(settings, shape, device="cuda", kv_cache_gb=2.0)
    assert need.rest == kind.gpu_bytes


def test_its_parsers_read_calls_and_its_sender_pushes(kind: PlainKind) -> None:
    class Tokenizer:
        chat_template = "{"

    tokenizer = Tokenizer()
    parser = chat_format.parser_of(tokenizer, "auto")
    said = chat_format.tool_call_reader(tokenizer, [], parser)("text")
    assert said.calls == [{"name": "curly", "arguments": {}}]
    Tokenizer.chat_template = ""
    with pytest.raises(SetupError, match="a parser of PlainEngine"):
        chat_format.parser_of(tokenizer, "auto")
    owner = ModuleOwner(torch.nn.Linear(3, 2))
    sender = make_sender("nccl", owner, config=config("m"), key="k", pushing=kind.pushing_sender)
    assert isinstance(sender, IpcSender)
