"""Processes of frozen models and those who ask: a scripted engine, and fakes of Ray's handles."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from async_grpo.cluster import frozen_models
from async_grpo.cluster.frozen_models import FrozenClient, FrozenModels, FrozenProcess
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent
from async_grpo.rollout.engine.base import EngineError
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.frozen import FrozenFailed, Question, Taught, TextRefused

ASKED = [([1, 2], [3, 4, 5])]


class Engine:
    """Answers at once; hangs or is dead when told."""

    def __init__(self) -> None:
        self.hangs = self.dead = False
        self.refuses: Exception | None = None
        self.loads = 0

    async def start(self, config: Config, **options: Any) -> Engine:
        self.loads += 1
        self.config = config
        await asyncio.sleep(0)
        return self

    async def top_logprobs(self, sequences: Sequence[Any], top_k: int) -> list[Taught]:
        if self.refuses is not None:
            raise self.refuses
        await asyncio.sleep(60 if self.hangs else 0)
        lengths = [len(response) for _, response in sequences]
        return [
            (np.zeros((length, 1 + top_k), np.float32), np.zeros((length, top_k), np.int32))
            for length in lengths
        ]

    async def check(self) -> None:
        if self.dead:
            raise EngineError("it is dead")

    def close(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(ENGINE, "start", made.start)
    monkeypatch.setattr(frozen_models, "die_with_parent", lambda: None)
    monkeypatch.setattr(frozen_models.stacks, "register", lambda *arguments: None)
    return made


def process(timeout_s: float = 5.0, threads: int = 0) -> FrozenProcess:
    config = Config.model_validate(
        {
            "run": {"total_steps": 1, "dir": "/nowhere"},
            "model": {"path": "policy"},
            "frozen": {"teacher": {"path": "t", "timeout_s": timeout_s}},
            "algorithm": {"distill": {"teacher": "teacher"}},
        }
    )
    return FrozenProcess(config, "teacher", device="cpu", threads=threads)


@pytest.mark.parametrize(("threads", "computes_in"), [(0, "1"), (2, "2")])
def test_where_cores_are_lent_the_model_computes_on_all_of_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, threads: int, computes_in: str
) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1"})  # as Ray sets it
    process(threads=threads)
    assert os.environ["OMP_NUM_THREADS"] == computes_in
    assert ("OMP_WAIT_POLICY" in os.environ) == bool(threads)


async def test_each_process_is_told_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    class Remote:
        def options(self, **options: Any) -> Remote:
            return self

        def remote(self, config: Config, name: str, **told: Any) -> None:
            begun.append((name, told))

    monkeypatch.setattr(frozen_models.ray, "remote", lambda kind: Remote())
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "policy"},
            "frozen": {"teacher": {"path": "t"}},
            "algorithm": {"distill": {"teacher": "teacher"}},
        }
    )
    seen: Any = Seen()
    FrozenModels(config, options=[{}], device="cpu", threads=2, listener=seen, failures=seen)
    assert begun == [("teacher", {"device": "cpu", "threads": 2})]


async def test_the_model_is_loaded_once_by_whoever_asks_first(engine: Engine) -> None:
    one = process()
    answers = await asyncio.gather(*[one.score(ASKED) for _ in range(3)], one.start())
    assert answers[3] == await one.health() > 0
    assert engine.loads == 1 and engine.config.model.path == "t"
    assert [len(answer[0][0]) for answer in answers[:3]] == [3, 3, 3]


async def test_an_engine_that_stops_answering_makes_the_process_sick_for_good(
    engine: Engine,
) -> None:
    one = process(timeout_s=0.1)
    await one.score(ASKED)
    engine.hangs = True
    with pytest.raises(EngineError, match=r"no answer for 0 s \(frozen.teacher.timeout_s\)"):
        await one.score(ASKED)
    engine.hangs = False
    for call in (one.health, lambda: one.score(ASKED)):
        with pytest.raises(EngineError, match="no answer for"):
            await call()


async def test_a_request_that_waits_behind_others_that_are_answered_is_not_late(
    engine: Engine,
) -> None:
    one, done = process(timeout_s=0.2), []

    async def slow(sequences: Sequence[Any], top_k: int) -> list[Taught]:
        await asyncio.sleep(0.1 * (1 + len(done)))
        return [(np.zeros((3, 1), np.float32), np.zeros((3, 0), np.int32))]

    engine.top_logprobs = slow  # type: ignore[method-assign]

    async def often() -> None:
        for _ in range(6):
            await asyncio.sleep(0.08)
            one._answered = asyncio.get_running_loop().time()

    done += range(4)  # it takes 0.5 s, and others are answered meanwhile
    answer, _ = await asyncio.gather(one.score(ASKED), often())
    assert len(answer[0][0]) == 3


class Words:
    """A tokenizer: a character is a token, and ! is special."""

    chat_template, eos_token_id = "there is one", 1

    def get_added_vocab(self) -> dict[str, int]:
        return {"<end>": 1, "!": 2}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return [ord(letter) for one in messages for letter in one["content"]]

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(map(chr, ids))


async def test_a_judge_answers_what_fits_and_no_text_ends_its_own_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_models, "tokenizer_of", lambda config, name: (Words(), [1]))
    one, asked = process(), []

    async def generate(prompt: list[int], sampling: Any) -> list[Any]:
        asked.append((prompt, sampling))
        return [SimpleNamespace(token_ids=[123, 125])]

    async def classify(sequences: list[list[int]]) -> list[float]:
        asked.append(sequences)
        return [float(len(ids)) for ids in sequences]

    engine.generate, engine.classify = generate, classify  # type: ignore[attr-defined]
    question = Question([{"role": "user", "content": "a<end>b!"}], {"type": "object"}, 5)
    assert await one.answer(question) == "{}"
    [(prompt, sampling)] = asked
    assert "".join(map(chr, prompt)) == "a< end>b!"
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 5)
    assert sampling.schema == {"type": "object"}
    room = one._config.rollout.longest_row - 1
    long = Question([{"role": "user", "content": "x" * (room - 4)}], {}, 5)
    with pytest.raises(TextRefused, match=f"frozen.teacher.context_length is {room}"):
        await one.answer(long)
    told = [{"role": "user", "content": "p"}]
    scores = await one.rewards([(told, "abc"), (told, "x" * room), (told, "<end>")])
    assert scores == [4.0, None, 7.0]


async def test_a_text_that_is_refused_is_no_failure_of_the_model() -> None:
    handle = Handle([ANSWER], [1])
    handle.answer = Method([raised(TextRefused("it is long"))])  # type: ignore[attr-defined]
    with pytest.raises(TextRefused, match=r"^it is long$"):
        await FrozenClient("teacher", handle).answer(Question([], {}, 1))


class Method:
    """One method of a Ray actor: its answers in order, exceptions raised."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def options(self, **options: Any) -> Method:
        return self

    async def remote(self, *arguments: Any) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Handle:
    def __init__(self, score: list[Any], health: list[Any]) -> None:
        self.score, self.health = Method(score), Method(health)


def raised(cause: Exception) -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError("score", "trace", cause).as_instanceof_cause()


UNAVAILABLE = ray.exceptions.ActorUnavailableError("restarting", b"a" * 16)
GONE = ray.exceptions.ActorDiedError()
SICK: Callable[[], Exception] = lambda: raised(EngineError("it hangs"))  # noqa: E731
ANSWER = [np.zeros(3, np.float32)]


@pytest.mark.parametrize(
    ("score", "health"),
    [
        ([ANSWER], [1]),
        ([UNAVAILABLE, GONE, ANSWER], [UNAVAILABLE]),
        ([SICK(), SICK(), ANSWER], [SICK(), SICK()]),
    ],
)
async def test_a_client_waits_for_the_process_that_replaces_a_sick_one(
    monkeypatch: pytest.MonkeyPatch, score: list[Any], health: list[Any]
) -> None:
    monkeypatch.setattr(frozen_models, "RETRY_S", 0.0)
    found = await FrozenClient("teacher", Handle(score, health)).score(ASKED)
    assert found is ANSWER


@pytest.mark.parametrize(
    ("score", "health", "said"),
    [
        (SICK(), 1, "teacher: .*it hangs"),  # the process is well: the request is at fault
        (raised(ValueError("no such token")), 1, "teacher: .*no such token"),
    ],
)
async def test_what_no_other_process_would_answer_fails(score: Any, health: Any, said: str) -> None:
    with pytest.raises(FrozenFailed, match=said):
        await asyncio.wait_for(FrozenClient("teacher", Handle([score], [health])).score(ASKED), 5)


class Seen:
    """Listener and failure handler in one."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def fault(self, text: str) -> None: ...

    def fail(self, error: BaseException) -> None:
        self.ended.set_result(error)


@pytest.mark.parametrize(
    ("health", "notes"),
    [
        ([GONE], 0),  # before the first probe
        ([2, GONE], 1),  # and back before it
        ([UNAVAILABLE, 1, 1, GONE], 0),
        ([1, UNAVAILABLE, 2, GONE], 1),
        ([1, SICK(), UNAVAILABLE, 2, SICK(), 3, GONE], 2),
    ],
)
async def test_the_driver_counts_restarts_and_ends_the_run_without_the_model(
    monkeypatch: pytest.MonkeyPatch, health: list[Any], notes: int
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(frozen_models, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(frozen_models, "RETRY_S", 0.0)
    monkeypatch.setattr(ray, "kill", lambda handle, **options: killed.append(options))
    config = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "policy"}})
    seen = Seen()
    models = FrozenModels(config, options=[], device="cpu", listener=seen, failures=seen)
    sick = sum(isinstance(one, ray.exceptions.RayTaskError) for one in health)
    await asyncio.wait_for(models._watch("teacher", Handle([1], list(health)), 1), 5)
    error = await seen.ended
    assert isinstance(error, FaultBudgetSpent) and "frozen model teacher died" in str(error)
    assert len(seen.notes) == notes and killed == [{"no_restart": False}] * sick
