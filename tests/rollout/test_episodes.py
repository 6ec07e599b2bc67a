"""Episodes as they are played: limits, faults of environments, and what of them is scored. The
engine says what it is told; environments are real ones, in children.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.config import schema
from async_grpo.config.schema import Config
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from async_grpo.rollout.engine.base import Completion, EngineError, Sampling
from async_grpo.rollout.episodes import (
    Episode,
    EpisodePlayer,
    GroupPlay,
    PlayerParts,
    PromptTooLong,
)
from async_grpo.rollout.evaluator import EngineEvaluator
from async_grpo.rollout.host import Parts as LoadedParts
from async_grpo.rollout.partial import FILE, PartialFile, Turn, encode, write_file
from async_grpo.rollout.posed import PosedTask
from async_grpo.rollout.producer import GroupProducer
from async_grpo.tasks.base import Problem
from async_grpo.wire.codec import GroupTicket, decode_group
from tests.support.environments import TaskOfTold
from tests.support.rollout_parts import Parts
from tests.support.scripted_policy import STOP, Letters, Saying

STEP_S = 1.0


def config_of(*, environment: dict[str, Any] | None = None, **rollout: Any) -> Config:
    limits = {"prompt_length": 20, "response_length": 60, "context_length": 100, "max_turns": 5}
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": "m"},
            "task": {"name": "tests.support.environments:TaskOfTold"},
            "rollout": limits | {"rollout_batch_size": 2, "group_size": 2} | rollout,
            "environment": {"workers": 1, "step_timeout_s": STEP_S} | (environment or {}),
        }
    )


@asynccontextmanager
async def player_of(
    engine: Any, config: Config, *, options: dict[str, Any] | None = None
) -> AsyncIterator[tuple[EpisodePlayer, EnvironmentPool, Counter[str]]]:
    task = schema.TaskConfig(name=config.task.name, options=options or {})
    pool = EnvironmentPool(task, config.environment, weights={"value": 1.0}, seed=0)
    counts: Counter[str] = Counter()
    await pool.start()
    parts = PlayerParts(config, engine, Letters(), counts)
    player = EpisodePlayer(parts, pool, weights={"value": 1.0})
    try:
        yield player, pool, counts
    finally:
        async with asyncio.timeout(10):  # those whose episode was cut off are being closed
            while pool.open_episodes:
                await asyncio.sleep(0.01)
        await pool.close()


SAMPLING = Sampling(n=1, max_tokens=0, temperature=1.0, seed=40)


def play(
    *turns: str | Exception,
    reference: Any = None,
    prompt: str = "ask ",
    seed: int = 7,
    environment: dict[str, Any] | None = None,
    **rollout: Any,
) -> tuple[Episode, Saying, Counter[str]]:
    """One episode in which the policy says these turns."""
    engine = Saying(*turns)

    async def main() -> tuple[Episode, Saying, Counter[str]]:
        config = config_of(environment=environment, **rollout)
        async with asyncio.timeout(60), player_of(engine, config) as (player, _, counts):
            episode = await player.play(Problem(prompt, reference), SAMPLING, seed=seed)
            return episode, engine, counts

    return asyncio.run(main())


def test_an_episode_turn_by_turn() -> None:
    episode, engine, counts = play("say a", "say bb", "end 2")
    assert [asked for asked, _ in engine.asked] == [
        "ask seed 7",
        "ask seed 7say a\x01a 1",
        "ask seed 7say a\x01a 1say bb\x01bb 2",
    ], "nothing is rendered again"
    [row] = episode.session.rows
    assert row.prompt == [*b"ask seed 7"]
    assert bytes(row.response_ids.tolist()) == b"say a\x01a 1say bb\x01bb 2end 2\x01"
    assert row.segments == [(0, 6), (3, 7), (4, 6)]
    assert [(span.policy_version, span.start, span.end) for span in row.versions] == [
        (0, 0, 6),
        (1, 6, 13),
        (2, 13, 19),
    ]
    assert row.behavior_logprobs.tolist() == [
        -float(at + turn) for turn, length in enumerate((6, 7, 6)) for at in range(length)
    ]
    assert (episode.rewards, episode.verdict, episode.finish_reason) == (
        {"value": 3.0},
        1.0,
        "env_done",
    )
    assert episode.turn_rewards == [{"value": 0.5}, {"value": 0.5}, {"value": 2.0}]
    assert (episode.first_token, episode.session.turns) == (1.0, 3)
    assert len({sampling.seed for _, sampling in engine.asked}) == 3, "a turn is no other's copy"
    counted = {name: counts[name] for name in ("turns", "episodes_env_done", "forks")}
    assert counted == {"turns": 3, "episodes_env_done": 1, "forks": 0}


class Caching(Saying):
    """Has so much of each prompt in its cache, under the salt of these weights."""

    def __init__(self, *turns: str, seen: list[tuple[int, str]]) -> None:
        super().__init__(*turns)
        self.seen = list(seen)

    async def generate(self, *arguments: Any, **options: Any) -> list[Completion]:
        [done] = await super().generate(*arguments, **options)
        cached, salt = self.seen.pop(0)
        return [replace(done, cached_tokens=cached, salt=salt)]


def test_tokens_that_are_computed_again_are_counted_by_cause() -> None:
    """Prompt 10 tokens; turns of 6, of which the engine has computed all but the last; answers of
    3. Before turn 2 it has computed 15, before turn 3 24, before turn 4 33.
    """
    engine = Caching(
        *["say a", "say b", "say c", "end 1"],
        seen=[(0, "v0.0"), (15, "v0.0"), (8, "v0.0"), (0, "v0.1")],
    )

    async def main() -> Counter[str]:
        async with player_of(engine, config_of()) as (player, _, counts):
            await player.play(Problem("ask ", None), SAMPLING, seed=7)
            return counts

    counts = asyncio.run(main())
    assert [counts[f"prefilled_{cause}"] for cause in ("fork", "cache", "weights")] == [0, 16, 33]
    assert counts["waited_ms"] >= 0


def test_a_turn_that_repeats_itself_ends_the_episode() -> None:
    class Repeats(Saying):
        async def generate(self, *arguments: Any, **options: Any) -> list[Completion]:
            [done] = await super().generate(*arguments, **options)
            return [replace(done, finish_reason="repetition")]

    async def main() -> Episode:
        async with player_of(Repeats("say a"), config_of()) as (player, _, _counts):
            return await player.play(Problem("ask ", None), SAMPLING, seed=7)

    episode = asyncio.run(main())
    assert (episode.finish_reason, episode.rewards) == ("repetition", {"value": 0.5})


@pytest.mark.parametrize(
    ("turns", "limits", "reason", "sampled"),
    [
        (["say a"] * 9, {"max_turns": 3}, "max_turns", 18),
        (["say a"] * 9, {"response_length": 15}, "length", 15),
        (["say a"] * 9, {"response_length": 18}, "length", 18),
        (["say a long turn"], {"turn_length": 8}, "length", 8),
        (["say a"] * 9, {"context_length": 24, "response_length": 24}, "context", 18),
        (["say a"] * 9, {"context_length": 30, "response_length": 30}, "context", 21),
        (["say " + "x" * 30], {"context_length": 66}, "context", 35),
        (["say " + "x" * 30, "end 1"], {"context_length": 80}, "env_done", 41),
    ],
)
def test_limits_end_an_episode_that_is_scored(
    turns: list[str], limits: dict[str, Any], reason: str, sampled: int
) -> None:
    episode, engine, counts = play(*turns, **limits)
    assert (episode.finish_reason, episode.session.sampled) == (reason, sampled)
    assert counts[f"episodes_{reason}"] == 1
    [row] = episode.session.rows
    config = config_of(**limits)
    assert len(row.response_ids) <= (config.rollout.context_length or 0)
    assert row.segments[-1][1] > 0 and len(row.response_ids) == sum(map(sum, row.segments))
    assert len(episode.turn_rewards) == episode.session.turns == len(engine.asked)


@pytest.mark.parametrize(("limit", "turns"), [(1, 1), (2, 2), (0, 5)])
def test_invalid_actions_in_a_row_end_an_episode(limit: int, turns: int) -> None:
    episode, *_ = play(*["invalid"] * 5, environment={"max_invalid": limit})
    assert episode.session.turns == turns
    assert episode.finish_reason == ("max_turns" if limit == 0 else "invalid_action")
    broken, *_ = play(
        "invalid", "say a", "invalid", "say b", "end 1", environment={"max_invalid": 2}
    )
    assert broken.finish_reason == "env_done", "only those in a row count"


def test_a_step_that_takes_too_long_is_scored_with_what_was_earned() -> None:
    episode, _, counts = play("say a", "sleep 600")
    assert (episode.finish_reason, episode.rewards) == ("env_timeout", {"value": 0.5})
    assert episode.turn_rewards == [{"value": 0.5}, {}] and counts["episodes_env_timeout"] == 1


@pytest.mark.parametrize(
    ("turns", "reference", "settings", "reason"),
    [
        (["say a", "sleep 600"], None, {"on_timeout": "fail_group"}, "timeout"),
        (["say a", "raise no"], None, {}, "exception"),
        (["crash"], None, {}, "crash"),
        (["eat 9000"], None, {"memory_mb": 3000}, "memory"),
        (["give text"], None, {}, "wrong_type"),
        (["give messages"], None, {}, "wrong_type"),
        ([], {"verb": "raise"}, {}, "exception"),
        ([], {"verb": "sleep", "argument": "600"}, {"reset_timeout_s": STEP_S}, "timeout"),
        ([], {"verb": "crash"}, {}, "crash"),
    ],
)
def test_what_the_policy_cannot_have_caused_is_never_scored(
    turns: list[str], reference: Any, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        play(*turns, reference=reference, environment=settings)
    assert caught.value.reason == reason


def test_a_prompt_that_is_too_long_with_what_the_environment_says_first() -> None:
    with pytest.raises(PromptTooLong, match=r"21 tokens, rollout\.prompt_length is 20"):
        play("end 1", prompt="x" * 15, seed=7)


def test_the_engines_error_closes_the_environment() -> None:
    with pytest.raises(EngineError):
        play("say a", EngineError("dead"))


def test_one_episode_that_hangs_is_the_only_one_it_harms() -> None:
    engine = Saying(*[f"say {number}" for number in range(7)], "sleep 600", *["end 1"] * 7)

    async def main() -> list[Episode]:
        async with asyncio.timeout(60), player_of(engine, config_of()) as (player, *_):
            group = GroupPlay(engine, TICKET, lambda generating: None)
            plays = [
                player.play(Problem("ask ", None), SAMPLING, seed=7, group=group) for _ in range(8)
            ]
            episodes = await group.all(plays)
            assert group.tokens == sum(one.session.sampled for one in episodes)
            return episodes

    reasons = Counter(one.finish_reason for one in asyncio.run(main()))
    assert reasons == {"env_done": 7, "env_timeout": 1}


class FailsWhileOneSpeaks(Saying):
    """Says its first turn once the third is under way, and the third never to its end."""

    def __init__(self, *turns: str) -> None:
        super().__init__(*turns)
        self._third = asyncio.Event()

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, name: str = "", purpose: str = "rollouts"
    ) -> list[Completion]:
        turn = len(self.asked)
        done = await super().generate(tokens, sampling, name=name, purpose=purpose)
        if turn == 2:
            self._third.set()
            await asyncio.Event().wait()
        if turn == 0:
            await self._third.wait()
        return done


def test_when_one_fails_the_others_are_cut_off_and_their_tokens_counted() -> None:
    engine = FailsWhileOneSpeaks("raise no", "say b", "say c")

    async def main() -> tuple[GroupPlay, int]:
        async with asyncio.timeout(60), player_of(engine, config_of()) as (player, pool, _):
            group = GroupPlay(engine, TICKET, lambda generating: None)
            plays = [
                player.play(Problem("ask ", None), SAMPLING, seed=7, group=group) for _ in range(2)
            ]
            with pytest.raises(EnvironmentFailed):
                await group.all(plays)
            return group, pool.open_episodes

    group, left = asyncio.run(main())
    assert left == 0 and group.tokens == 9 + 6 + 3, "two turns, and one that was cut off"


# ---- in an actor ----


def actor_of(engine: Saying, config: Config, queue: Parts, player: EpisodePlayer) -> GroupProducer:
    actor = GroupProducer(config, actor_id="a", queue=queue, model_dir="m", device="cpu", cores=())
    task = TaskOfTold(config.task, 0)
    posed = PosedTask(config, task, make_verifiers=lambda: queue, start_player=None)
    posed.player, posed.weights = player, {"value": 1.0}
    actor._parts = LoadedParts(
        engine=engine, tokenizer=Letters(), task=task, posed={"": posed}, evaluator=None
    )
    return actor


class Frames(Parts):
    """A queue that keeps whole frames."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    async def put(self, actor_id: str, frames: list[Any]) -> Any:
        self.kept += [decode_group(frame) for frame in frames]
        return await super().put(actor_id, frames)


def produce(engine: Saying, config: Config) -> tuple[Frames, GroupProducer]:
    queue = Frames()
    engine.sampled, engine.speeds = Counter(), {}

    async def main() -> GroupProducer:
        async with asyncio.timeout(60), player_of(engine, config) as (player, *_):
            actor = actor_of(engine, config, queue, player)
            actor._player = None
            await actor.run()
            return actor

    return queue, asyncio.run(main())


def test_an_actor_puts_groups_of_episodes() -> None:
    queue, _ = produce(Saying(*["end 1", "end 0"] * 2), config_of(prompt_length=40))
    assert sorted(group.group_id for group in queue.kept) == [0, 1] and not queue.failed
    for group in queue.kept:
        assert [bytes(prompt.tolist()).decode()[:17] for prompt in group.prompts] == [
            "do somethingseed "
        ]
        assert {row.finish_reason for row in group.rows} == {"env_done"}
        assert [row.episode for row in group.rows] == [None, None]
        ends = ["episode_0", "episode_1"]
        assert sorted(group.times) == ["done", *ends, "first_token", "queued", "scored"]
        assert all(len(row.turn_rewards) == 1 for row in group.rows)
    seeds = {bytes(group.prompts[0].tolist()).decode().split()[-1] for group in queue.kept}
    assert len(seeds) == 2, "every group has a seed of its own, and its episodes the same"


def test_remax_plays_one_greedy_episode_more_in_an_environment_of_its_own() -> None:
    config = config_of(prompt_length=40)
    remax = config.algorithm.model_copy(update={"adv_estimator": "remax"})
    engine = Saying(*["end 1"] * 6)
    queue, _ = produce(engine, config.unchecked_copy(update={"algorithm": remax}))
    for group in queue.kept:
        assert [row.role for row in group.rows] == ["train", "train", "baseline"]
        assert len(group.prompts) == 1, "all begin with the same seed"
    assert Counter(sampling.temperature for _, sampling in engine.asked) == {1.0: 4, 0.0: 2}


def test_a_group_whose_environment_fails_is_failed_with_its_reason_and_tokens() -> None:
    queue, actor = produce(Saying(*["raise no"] * 4), config_of(prompt_length=40))
    assert set(queue.failed) == {0, 1} and not queue.kept
    assert all(
        "environment: exception: step(): ValueError: no" in why for why in queue.failed.values()
    )
    assert all(tokens >= 9 for tokens in queue.wasted.values())
    assert actor._groups == {}


# ---- held-out problems ----


def evaluate(engine: Saying, *, n: int) -> tuple[list[Any], list[dict[str, Any]], int]:
    """Two held-out problems, and how often a player was asked for."""
    config, made = config_of(), 0
    config = config.unchecked_copy(
        update={"evaluation": config.evaluation.unchecked_copy(update={"n": n, "temperature": 0.7})}
    )

    async def main() -> tuple[list[Any], list[dict[str, Any]]]:
        async with asyncio.timeout(60), player_of(engine, config) as (player, *_):

            async def one(settings: Any, task: Any) -> EpisodePlayer:
                nonlocal made
                made += 1
                return player

            task = TaskOfTold(config.task, 0)
            evaluator = EngineEvaluator(
                config,
                engine=engine,
                task=task,
                posed={"": PosedTask(config, task, make_verifiers=lambda: None, start_player=one)},
                pose=None,
                encode=None,
                text=None,
            )
            return await evaluator.answer(indices=[0, 1], total=2, label="v0.3", samples=2)

    return *asyncio.run(main()), made


def test_held_out_problems_are_episodes_too() -> None:
    engine = Saying("end 2", "raise no", version=3)
    outcomes, rows, made = evaluate(engine, n=0)
    assert made == 1, "all problems share the environments"
    assert sorted((one.greedy, one.errors, one.greedy_tokens) for one in outcomes) == [
        (False, 1, 0),
        (True, 0, 6),
    ]
    failed, right = sorted(rows, key=lambda row: "rewards" in row)
    assert right["response"] == "end 2" and right["rewards"] == {"value": 2.0}
    assert "ValueError: no" in failed["error"]
    assert {sampling.temperature for _, sampling in engine.asked} == {0.0}
    assert all(asked.startswith("held out ") for asked, _ in engine.asked)


def test_samples_of_held_out_problems_are_episodes_of_their_own() -> None:
    engine = Saying(*["end 1"] * 6, version=3)
    outcomes, *_ = evaluate(engine, n=2)
    assert [(one.greedy, one.right, one.judged, one.sampled_tokens) for one in outcomes] == [
        (True, 2, 3, 12)
    ] * 2
    assert Counter(sampling.temperature for _, sampling in engine.asked) == {0.0: 2, 0.7: 4}


def test_an_evaluation_of_other_weights_is_refused() -> None:
    with pytest.raises(EngineError, match=r"evaluation of v0\.3 got tokens that v0\.4"):
        evaluate(Saying(*["end 1"] * 2, version=4), n=0)


class Stopping(Saying):
    """Says the turns, the first two at the same time, and stays in the third after two tokens."""

    def __init__(self, *turns: str) -> None:
        super().__init__(*turns)
        self.growing: dict[str, Completion] = {}
        self.stopped, self.both = asyncio.Event(), asyncio.Barrier(2)

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, name: str = "", purpose: str = "rollouts"
    ) -> list[Completion]:
        if not self.turns:
            await asyncio.Event().wait()
        last = len(self.turns) == 1
        [done] = await super().generate(tokens, sampling, name=name, purpose=purpose)
        if not last:
            await self.both.wait()
            return [done]
        self.growing[name] = Completion(
            done.token_ids[:2], done.logprobs[:2], [(done.labels[0][0], 0, 2)], "", 0.0
        )
        self.stopped.set()
        await asyncio.Event().wait()
        raise AssertionError

    def so_far(self, name: str) -> dict[int, Completion]:
        return {0: self.growing[name]} if name in self.growing else {}


TICKET = GroupTicket(3, 1, 0)


def interrupted(tmp_path: Path, *turns: str) -> list[list[Turn]]:
    """What a checkpoint has of a group of two, which is interrupted in the last of these turns."""

    async def main() -> None:
        engine = Stopping(*turns)
        async with player_of(engine, config_of()) as (player, _, _counts):
            group = GroupPlay(engine, TICKET, lambda generating: None)
            plays = [
                player.play(Problem("ask ", None), SAMPLING, seed=7, group=group) for _ in range(2)
            ]
            playing = asyncio.ensure_future(group.all(plays))
            await asyncio.wait_for(engine.stopped.wait(), 20)
            encoded = encode(group, max_bytes=2**20)
            assert encoded is not None and encoded[0].responses == 1
            write_file(tmp_path, [encoded])
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(main())
    counts: Counter[str] = Counter()
    file = PartialFile(tmp_path / FILE)
    assert file.take_turns(GroupTicket(3, 2, 0), 2, counts) == [], "another attempt"
    found = file.take_turns(TICKET, 2, counts)
    assert counts["continued_tokens"] == sum(
        len(turn.said.token_ids) for turns in found for turn in turns
    )
    assert file.take_turns(TICKET, 2, counts) == [], "once"
    file.close()
    return found


class GoingOn(Saying):
    """Completes the turn that was cut off, and ends what comes after it."""

    async def generate(self, tokens: list[int], *more: Any, **options: Any) -> list[Completion]:
        self.turns = ["y d" if bytes(tokens).endswith(b"sa") else "end 1"]
        return await super().generate(tokens, *more, **options)


def resumed(begun: list[list[Turn]]) -> tuple[list[Episode], Saying]:
    async def main() -> tuple[list[Episode], Saying]:
        engine = GoingOn(version=9)
        async with player_of(engine, config_of()) as (player, _, _counts):
            group = GroupPlay(engine, TICKET, lambda generating: None, begun)
            plays = [
                player.play(Problem("ask ", None), SAMPLING, seed=7, group=group) for _ in range(2)
            ]
            return await group.all(plays), engine

    return asyncio.run(main())


def test_episodes_of_a_checkpoint_go_on_where_they_were(tmp_path: Path) -> None:
    begun = interrupted(tmp_path, "say a", "say b", "say c")
    assert [[len(turn.said.token_ids) for turn in turns] for turns in begun] in (
        [[6, 2], [6]],
        [[6], [6, 2]],
    )
    [at] = [number for number, turns in enumerate(begun) if len(turns) == 2]
    episodes, engine = resumed(begun)
    texts = [
        bytes(row.response_ids.tolist()) for episode in episodes for row in episode.session.rows
    ]
    assert texts[at][:6] in (b"say a\x01", b"say b\x01")
    assert texts[at][9:] == b"say d\x01d 2end 1\x01" and texts[1 - at][9:] == b"end 1\x01"
    assert len(engine.asked) == 3, "what had been said is not said again"
    [row] = episodes[at].session.rows
    versions = [(span.policy_version, span.end) for span in row.versions]
    assert versions[-2:] == [(2, 8), (9, 18)], "two tokens of the turn are older than its rest"
    assert [episode.rewards["value"] for episode in episodes] == (
        [2.0, 1.5] if at == 0 else [1.5, 2.0]
    )


def test_an_environment_that_says_something_else_fails_the_group(tmp_path: Path) -> None:
    begun = interrupted(tmp_path, "say a", "say b", "say c")
    wrong = [[Turn(b"12345678", turn.said) for turn in turns] for turns in begun]
    with pytest.raises(EnvironmentFailed, match="did not say again"):
        resumed(wrong)


def test_an_environment_that_ends_earlier_than_it_did_fails_the_group(tmp_path: Path) -> None:
    begun = interrupted(tmp_path, "say a", "say b", "say c")
    said = np.array([*b"end 1", STOP], np.int32)
    end = Completion(said, np.zeros(6, np.float32), [("v0.0", 0, 6)], "stop", 0.0)
    early = [[replace(turns[0], said=end), *turns] for turns in begun]
    with pytest.raises(EnvironmentFailed, match="ended before it had"):
        resumed(early)
