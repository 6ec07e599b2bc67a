"""Tasks whose `score` is a coroutine: how many at a time, and what one bad response does to those
beside it; variables of the environment that their code gets, and that no error shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from async_grpo.config import schema
from async_grpo.errors import SetupError
from async_grpo.run.preflight.run_check import check_run
from async_grpo.runtime.variables import hide, keep_secret, variables
from async_grpo.tasks import verifier
from async_grpo.tasks.base import Problem, Score, TaskError
from async_grpo.tasks.registry import check_concurrency, create_task
from async_grpo.tasks.verifier import VerifierError, VerifierPool
from tests.support.waiting import wait_until_gone

pytestmark = pytest.mark.asyncio
SECRET = "s3cret-of-a-service"


class Waits:
    """Does what the response says, while others wait."""

    weights: ClassVar[dict[str, float]] = {"value": 1.0}
    fingerprint = "waits"

    def __init__(self, settings: Any, seed: int) -> None:
        if settings.options.get("leak"):
            raise ValueError(f"no access with {os.environ['A_KEY']}")
        self._inside, self._most = 0, 0

    def __len__(self) -> int:
        return 1

    def train(self, index: int) -> Problem:
        return Problem("do something", None)

    def evaluation(self, n: int) -> list[Problem]:
        return []

    async def score(self, response: str, reference: Any) -> Any:
        self._inside += 1
        self._most = max(self._most, self._inside)
        try:
            verb, _, argument = response.partition(" ")
            value = await getattr(self, verb)(argument)
            return value if verb == "give" else Score({"value": value}, None)
        finally:
            self._inside -= 1

    async def echo(self, argument: str) -> float:
        return float(argument)

    async def together(self, argument: str) -> float:
        """Most that were ever inside, once that many have come or a second has passed."""
        deadline = time.monotonic() + 1
        while self._most < int(argument) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return float(self._most)

    async def sleep(self, argument: str) -> float:
        await asyncio.sleep(float(argument))
        return 1.0

    async def block(self, argument: str) -> float:
        time.sleep(float(argument))
        return 1.0

    async def pid(self, argument: str) -> float:
        return float(os.getpid())

    async def crash(self, argument: str) -> float:
        os._exit(3)

    async def bomb(self, argument: str) -> float:
        return float(len(bytearray(2**36)))

    async def own_timeout(self, argument: str) -> float:
        raise TimeoutError("the service said no")

    async def cancelled(self, argument: str) -> float:
        raise asyncio.CancelledError

    async def leave(self, argument: str) -> float:
        sys.exit(0)

    async def refuse_to_end(self, argument: str) -> float:
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(60)

    async def thread(self, argument: str) -> float:
        await asyncio.to_thread(time.sleep, float(argument))
        return 1.0

    async def most(self, argument: str) -> float:
        return float(self._most)

    async def leak(self, argument: str) -> float:
        key = os.environ["A_KEY"]
        raise RuntimeError(f"401 for {key!r}" if argument else f"401 for {key}")

    async def known(self, argument: str) -> float:
        return float(os.environ.get(argument) == SECRET)

    async def give(self, argument: str) -> Any:
        return {"nothing": None, "nan": Score({"value": float("nan")}, None)}[argument]


class Plain(Waits):
    def score(self, response: str, reference: Any) -> Any:
        return Score({"value": 1.0}, None)


def config_of(task: schema.TaskConfig, **more: Any) -> schema.Config:
    given = {"run": {"total_steps": 1}, "model": {"path": "m/m"}, "task": task.model_dump()}
    return schema.Config.model_validate(given | more)


def settings(*, options: Any = None, name: str = "Waits", **given: Any) -> schema.TaskConfig:
    env_vars = given.pop("env_vars", [])
    limits = schema.Verifier(**({"timeout_s": 30.0, "concurrency": 8} | given))
    name, options = f"{__name__}:{name}", options or {}
    return schema.TaskConfig(name=name, options=options, env_vars=env_vars, verifier=limits)


@asynccontextmanager
async def pool_of(**given: Any) -> AsyncIterator[VerifierPool]:
    pool = VerifierPool(settings(**given), seed=0)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def outcomes(pool: VerifierPool, responses: Sequence[str]) -> list[Any]:
    """Values, or reasons of those that failed."""
    scores = await pool.score_many([(response, None) for response in responses])
    return [
        one.reason if isinstance(one, VerifierError) else one.rewards["value"] for one in scores
    ]


@pytest.mark.parametrize(("workers", "concurrency"), [(1, 8), (2, 3), (1, 1)])
async def test_a_child_scores_as_many_at_a_time_as_it_may(workers: int, concurrency: int) -> None:
    async with pool_of(workers=workers, concurrency=concurrency) as pool:
        groups = [[f"together {concurrency}"] * 4 for _ in range(6)]  # of several groups, too
        found = await asyncio.gather(*[outcomes(pool, group) for group in groups])
        assert {value for group in found for value in group} == {concurrency}
        assert pool.spent["verified"] == 24 and pool.spent["verifying_s"] > 0


async def test_answers_come_back_in_order_and_a_failure_is_its_own() -> None:
    expected = {
        "sleep 0.2": 1.0,
        "echo 1": 1.0,
        "own_timeout": "exception",
        "cancelled": "exception",
        "leave": "exception",
        "give nothing": "wrong_type",
        "echo 2": 2.0,
        "give nan": "non_finite",
        "sleep 99": "timeout",
    }
    async with pool_of(timeout_s=1.0) as pool:
        pid = await outcomes(pool, ["pid"])
        assert await outcomes(pool, list(expected)) == list(expected.values())
        assert pool.errors == {"exception": 3, "wrong_type": 1, "non_finite": 1, "timeout": 1}
        assert await outcomes(pool, ["pid"]) == pid  # nothing of this needs another process


@pytest.mark.parametrize(
    ("how", "reason"), [("crash", "crash"), ("bomb", "memory"), ("thread 600", "timeout")]
)
async def test_a_child_that_is_lost_takes_what_it_had(how: str, reason: str) -> None:
    async with pool_of(timeout_s=1.5) as pool:
        [pid] = await outcomes(pool, ["pid"])
        beside = asyncio.create_task(outcomes(pool, ["sleep 0.5"] * 3))
        await asyncio.sleep(0.2)
        assert await outcomes(pool, [how]) == [reason]
        # a child without memory, or with a thread that hangs, finishes what it has begun
        assert set(await beside) == ({"crash"} if how == "crash" else {1.0})
        assert await outcomes(pool, ["echo 5"]) == [5.0] and await outcomes(pool, ["pid"]) != [pid]
        await asyncio.to_thread(wait_until_gone, [int(pid)])


async def test_a_coroutine_that_nothing_ends_is_ended_with_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier, "SILENCE_S", 0.5)
    async with pool_of(timeout_s=1.0) as pool:
        asked = [["block 600", "echo 1"], ["refuse_to_end"]]
        for responses in asked:
            assert await outcomes(pool, responses) == ["crash"] * len(responses)
            assert pool.busy() == [] and await outcomes(pool, ["echo 1"]) == [1.0]


async def test_busy_children_are_named_and_closing_ends_what_they_do() -> None:
    async with pool_of() as pool:
        [pid] = await outcomes(pool, ["pid"])
        assert pool.busy() == []
        running = asyncio.create_task(outcomes(pool, ["sleep 600"] * 3))
        await asyncio.sleep(0.2)
        [(busy, since)] = pool.busy()
        assert busy == pid and since > 0
    assert await asyncio.wait_for(running, 30) == ["closed"] * 3


async def test_cancelled_scoring_leaves_no_answer_behind() -> None:
    async with pool_of(concurrency=2) as pool:
        scoring = asyncio.create_task(outcomes(pool, ["sleep 0.5", "sleep 0.5", "echo 7"]))
        await asyncio.sleep(0.2)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        # what is under way in the child still counts
        assert await outcomes(pool, ["echo 8", "echo 9", "most"]) == [8.0, 9.0, 2.0]


async def test_a_child_without_memory_is_ended_also_where_nobody_waits_for_it() -> None:
    async with pool_of() as pool:
        [pid] = await outcomes(pool, ["pid"])
        scoring = asyncio.create_task(outcomes(pool, ["bomb"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scoring.cancel()
        await asyncio.to_thread(wait_until_gone, [int(pid)])
        assert await outcomes(pool, ["echo 1"]) == [1.0]


async def test_variables_reach_the_code_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    monkeypatch.setenv("ANOTHER", SECRET)
    async with pool_of(env_vars=["A_KEY"]) as pool:
        assert await outcomes(pool, ["known A_KEY", "known ANOTHER"]) == [1.0, 0.0]
        for response in ("leak", "leak as_python_shows_it"):
            with pytest.raises(VerifierError, match=r"RuntimeError: 401 for '?\*\*\*'?$"):
                await pool.score(response, None)
    with pytest.raises(VerifierError, match=r"no access with \*\*\*"):
        async with pool_of(env_vars=["A_KEY"], options={"leak": True}):
            pass


async def test_a_variable_that_is_not_set_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    monkeypatch.setenv("EMPTY", "")
    assert variables(["A_KEY"], "task.env_vars") == {"A_KEY": SECRET}
    for name in ("EMPTY", "NOT_THERE"):
        with pytest.raises(SetupError, match=f"task.env_vars is {name}, which is not set"):
            variables(["A_KEY", name], "task.env_vars")
    with pytest.raises(SetupError, match=r"task.env_vars is NOT_THERE, which is not set"):
        check_run(config_of(settings(env_vars=["NOT_THERE"])), notes=[])


async def test_no_form_of_a_value_is_shown() -> None:
    keep_secret(["abcd1234", "abcd1234-admin", "with a line\n", "1"])
    assert hide("abcd1234-admin, abcd1234, 1") == "***, ***, 1"
    assert hide(f"Illegal header value {b'Bearer with a line' + bytes([10])!r}") == (
        "Illegal header value b'Bearer ***'"
    )


async def test_several_at_a_time_are_refused_where_no_task_can() -> None:
    plain, waits = settings(name="Plain"), settings()
    elsewhere = {"evaluation": {"task": {"name": waits.name}}}
    for task, more in (waits, {}), (plain, elsewhere), (settings(name="Plain", concurrency=1), {}):
        check_concurrency(config_of(task, **more), [create_task(task, 0)])
    with pytest.raises(TaskError, match=r"concurrency is 8, which is for tasks with an `async"):
        check_concurrency(config_of(plain), [create_task(plain, 0)])
