"""Programs that play episodes over HTTP, with a scripted engine."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.schema import Config
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from async_grpo.environments.program import Program
from async_grpo.rollout.chat_format import PlainFormat
from async_grpo.rollout.endpoint.player import ProgramPlayer
from async_grpo.rollout.engine import Sampling
from async_grpo.rollout.episodes import Episode, EpisodePlayer
from tests.support.scripted_policy import Letters, Saying

AGENTS = Path(__file__).parent / "agents"


def config_of(command: list[str], *, endpoint: dict[str, Any] | None = None, **more: Any) -> Config:
    environment = {"workers": 1, "step_timeout_s": 30.0} | more.pop("environment", {})
    limits = {"prompt_length": 20, "response_length": 60, "context_length": 100, "max_turns": 6}
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": "m"},
            "task": {
                "name": "program",
                "options": {"command": command, "of": "chain", **more.pop("options", {})},
            },
            "rollout": limits | {"rollout_batch_size": 2, "group_size": 2} | more,
            "environment": environment,
            "endpoint": endpoint or {},
        }
    )


@asynccontextmanager
async def playing(
    engine: Any, config: Config
) -> AsyncIterator[tuple[ProgramPlayer, Program, Counter[str]]]:
    task, counts = Program(config.task, 0), Counter[str]()
    pool = EnvironmentPool(config.task, config.environment, weights=task.weights, seed=0)
    await pool.start()
    player = ProgramPlayer(
        config,
        engine=engine,
        pool=pool,
        tokenizer=Letters(),
        weights=task.weights,
        counts=counts,
        formats=lambda tools: PlainFormat(Letters()),
    )
    await player.start()
    try:
        yield player, task, counts
    finally:
        await player.close()
        await pool.close()


def script(name: str) -> list[str]:
    return [sys.executable, str(AGENTS / f"{name}.py")]


def play(
    engine: Any, config: Config, *, index: int = 0
) -> tuple[Episode | EnvironmentFailed, Counter[str]]:
    async def scenario() -> tuple[Episode | EnvironmentFailed, Counter[str]]:
        async with playing(engine, config) as (player, task, counts):
            sampling = Sampling(n=1, max_tokens=60, temperature=1.0, seed=5)
            try:
                return await player.play(task.train(index), sampling, seed=3), counts
            except EnvironmentFailed as error:
                return error, counts

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_openai_loop_is_the_python_environment() -> None:
    """The same engine, the same turns: the same rows, rewards and finish reason."""
    from async_grpo.config import schema
    from async_grpo.environments.chain import Chain

    chain = Chain(schema.TaskConfig(name="chain"), 0)
    said = [chain.train(index).solution or () for index in range(99)]
    index = next(at for at, one in enumerate(said) if len(one) >= 5)
    turns = said[index][::2]
    engine = Saying(*turns, version=1)
    found, counts = play(engine, config_of(script("openai_chain")), index=index)
    assert isinstance(found, Episode), found

    async def plain() -> Episode:
        config = config_of([])
        settings = schema.TaskConfig(name="chain")
        pool = EnvironmentPool(settings, config.environment, weights=chain.weights, seed=0)
        await pool.start()
        player = EpisodePlayer(
            config,
            engine=Saying(*turns, version=1),  # type: ignore[arg-type]
            pool=pool,
            tokenizer=Letters(),
            weights=chain.weights,
            counts=Counter(),
        )
        sampling = Sampling(n=1, max_tokens=60, temperature=1.0, seed=5)
        try:
            return await player.play(chain.train(index), sampling, seed=3)
        finally:
            await pool.close()

    known = asyncio.run(plain())
    [row], [other] = found.session.rows, known.session.rows
    assert row.prompt == other.prompt and row.ids == other.ids
    assert row.segments == other.segments and row.versions == other.versions
    assert (row.behavior_logprobs == other.behavior_logprobs).all()
    assert found.rewards == known.rewards == {"correct": 1.0}
    assert found.verdict == known.verdict == 1.0
    assert found.finish_reason == known.finish_reason == "env_done"
    assert [one.seed for _, one in engine.asked] == [6 + at for at in range(len(turns))]
    assert counts["requests_answered"] == counts["turns"] == len(turns)


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("exits", "exception", "exit status 3: Boom"),
        ("says_nothing", "exception", "must be JSON"),
        ("never_asks", "silent", "without asking"),
        ("prints_much", "exception", "output_mb"),
        ("kills_itself", "exception", "signal 9"),
        ("unknown_reward", "wrong_type", "other"),
    ],
)
def test_what_the_policy_cannot_have_caused_is_no_score(name: str, reason: str, says: str) -> None:
    config = config_of([*script("failing"), name], options={"output_mb": 1.0})
    found, counts = play(Saying("a1", "a2"), config)
    assert isinstance(found, EnvironmentFailed)
    assert found.reason == reason and says in str(found)
    assert counts[f"environment_{reason}"] == 1


@pytest.mark.parametrize("on_timeout", ["score_zero", "fail_group"])
def test_a_program_that_hangs_ends_at_its_deadline(on_timeout: str) -> None:
    environment = {"step_timeout_s": 1.5, "on_timeout": on_timeout}
    config = config_of([*script("failing"), "hangs"], environment=environment)
    found, _ = play(Saying("a1"), config)
    if on_timeout == "fail_group":
        assert isinstance(found, EnvironmentFailed) and found.reason == "timeout"
    else:
        assert isinstance(found, Episode)
        assert (found.finish_reason, found.rewards) == ("env_timeout", {"correct": 0.0})


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 2}, "max_turns"), ({"response_length": 6, "context_length": 40}, "length")],
)
def test_an_episode_that_has_used_up_its_room_is_worth_nothing(
    limits: dict[str, int], reason: str
) -> None:
    config = config_of([*script("failing"), "asks_for_ever"], **limits)
    found, _ = play(Saying(*["g1"] * 20), config)
    assert isinstance(found, Episode), found
    assert (found.finish_reason, found.rewards) == (reason, {"correct": 0.0})
    assert found.session.sampled == 6


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    config = config_of([*script("failing"), "leaves", str(pids)])
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, Episode), found
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 8 and not any(Path(f"/proc/{pid}").exists() for pid in left)
