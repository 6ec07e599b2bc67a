"""Episodes that workers play: leases, heartbeats, results, over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from async_grpo.agents.endpoint.player import ServedPlayer
from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.agents.endpoint.work import Work, WorkHost, announce
from async_grpo.agents.external import External
from async_grpo.config.schema import Config
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.base import EngineError, Sampling
from async_grpo.rollout.episodes import Episode
from async_grpo.tasks.base import Problem
from tests.support.programs import config_of, served_player
from tests.support.scripted_policy import Letters, Saying

pytestmark = pytest.mark.timeout(90)  # they wait for each other

WORKER = Path(__file__).parents[3] / "examples" / "workers" / "worker.py"
AGENT = WORKER.parents[1] / "openai_loop" / "agent.py"
WORTH = {"rewards": {"correct": 1.0}, "correct": 1}
ASK = {"model": "policy", "messages": [{"role": "user", "content": "2:7>"}]}


class Actor:
    """A rollout actor's endpoint, and a client of it."""

    def __init__(
        self, player: ServedPlayer, endpoint: Endpoint, work: Work, task: External
    ) -> None:
        self.player, self.endpoint, self.work = player, endpoint, work
        self.task, self.client = task, httpx.AsyncClient(timeout=20)

    def play(self, index: int = 0) -> asyncio.Task[Episode]:
        sampling = Sampling(n=1, max_tokens=60, temperature=1.0, seed=5)
        play = self.player.play(self.task.train(index), sampling, seed=3)
        return asyncio.ensure_future(play)

    async def post(self, path: str, key: str, body: Any = None) -> httpx.Response:
        head = {"Authorization": f"Bearer {key}".encode()}
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return await self.client.post(self.endpoint.url + path, content=content, headers=head)

    async def lease(self, wait_s: float = 10.0) -> dict[str, Any] | None:
        reply = await self.post("/work/lease", self.work.key, {"wait_s": wait_s})
        assert reply.status_code in (200, 204), reply.text
        return reply.json() if reply.content else None


def external(**options: Any) -> Config:
    environment = options.pop("environment", {})
    config = config_of(["-"], environment=environment)
    task = {"name": "external", "options": {"of": "chain", **options}}
    return Config.model_validate(config.model_dump() | {"task": task})


@asynccontextmanager
async def actor_of(engine: Any, config: Config) -> AsyncIterator[Actor]:
    task, counts, work = External(config.task, 0), Counter[str](), Work()
    endpoint = Endpoint(config.endpoint, words=Letters().decode, counts=counts, work=work)
    await endpoint.start()
    host = WorkHost(work, task, config.environment)
    player = served_player(config, engine, endpoint, host, weights=task.weights, counts=counts)
    actor = Actor(player, endpoint, work, task)
    try:
        yield actor
    finally:
        await actor.client.aclose()
        await endpoint.close()


async def test_a_worker_plays_an_episode() -> None:
    async with actor_of(Saying("g1"), external()) as actor:
        episode = actor.play()
        work = await actor.lease()
        assert work is not None and actor.player.open_episodes == 1
        assert work["problem"]["seed"] == 3 and work["problem"]["prompt"].endswith(">")
        assert (await actor.post("/chat/completions", work["api_key"], ASK)).status_code == 200
        assert (await actor.post("/work/result", work["work_key"], WORTH)).status_code == 200
        played = await episode
        assert (played.rewards, played.verdict) == ({"correct": 1.0}, 1.0)
        assert (played.finish_reason, played.session.sampled) == ("env_done", 3)
        assert actor.player.open_episodes == 0
        late = await actor.post("/work/heartbeat", work["work_key"])
        assert late.status_code == 401 and "has ended" in late.text


async def test_each_episode_is_leased_once_and_none_is_forgotten() -> None:
    async with actor_of(Saying(*["a1"] * 12), external()) as actor:
        waiting = [asyncio.ensure_future(actor.lease()) for _ in range(5)]
        await asyncio.sleep(0.1)
        episodes = [actor.play(index) for index in range(12)]
        leased = [await one for one in waiting] + [await actor.lease() for _ in range(7)]
        assert await actor.lease(0.05) is None
        keys = {work["api_key"] for work in leased if work}
        assert len(keys) == 12
        for work in leased:
            assert work is not None
            await actor.post("/chat/completions", work["api_key"], ASK)
            await actor.post("/work/result", work["work_key"], WORTH)
        assert [one.verdict for one in await asyncio.gather(*episodes)] == [1.0] * 12


async def test_a_worker_that_goes_away_before_it_has_work_takes_none_with_it() -> None:
    async with actor_of(Saying("a1"), external()) as actor:
        gone = asyncio.ensure_future(actor.lease())
        await asyncio.sleep(0.2)
        gone.cancel()
        await asyncio.sleep(0.2)
        episode = actor.play()
        work = await actor.lease()
        assert work is not None
        await actor.post("/chat/completions", work["api_key"], ASK)
        await actor.post("/work/result", work["work_key"], WORTH)
        assert (await episode).verdict == 1.0


@pytest.mark.parametrize(
    ("alive", "lease_s"), [("silent", 0.6), ("heartbeat", 1.2), ("request", 1.2)]
)
async def test_a_lease_lapses_when_nothing_is_heard(alive: str, lease_s: float) -> None:
    async with actor_of(Saying("a1", slow_s=1.5), external(lease_s=lease_s)) as actor:
        episode = actor.play()
        work = await actor.lease()
        assert work is not None and work["lease_s"] == lease_s
        key = work["work_key"]
        if alive == "silent":
            with pytest.raises(EnvironmentFailed, match=r"lease: .*lease_s = 0\.6 s"):
                await episode
            assert (await actor.post("/work/result", key, WORTH)).status_code == 401
            return
        if alive == "heartbeat":
            for _ in range(4):
                await asyncio.sleep(0.4)
                assert (await actor.post("/work/heartbeat", key)).status_code == 200
        # takes longer than a lease, which begins anew with its answer
        await actor.post("/chat/completions", work["api_key"], ASK)
        await asyncio.sleep(0.3)
        await actor.post("/work/result", key, WORTH)
        assert (await episode).verdict == 1.0


async def test_an_episode_that_no_worker_asks_for_fails() -> None:
    async with actor_of(Saying("a1"), external(wait_s=0.2)) as actor:
        with pytest.raises(EnvironmentFailed, match=r"no_worker: .*wait_s = 0\.2"):
            await actor.play()
        assert await actor.lease(0.05) is None


async def test_a_result_without_a_key_is_refused_before_it_is_read() -> None:
    async with actor_of(Saying(), external()) as actor:
        host, port = actor.endpoint.url.split("//")[1].split("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/work/result HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n"
            b"Content-Length: 900000\r\n\r\n{"
        )
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


@pytest.mark.parametrize("on_timeout", ["score_zero", "fail_group"])
async def test_a_worker_that_takes_too_long(on_timeout: str) -> None:
    async def scenario(actor: Actor) -> None:
        episode = actor.play()
        work = await actor.lease()
        assert work is not None
        await actor.post("/chat/completions", work["api_key"], ASK)
        if on_timeout == "score_zero":
            assert ((await episode).finish_reason, (await episode).verdict) == ("env_timeout", 0.0)
        else:
            with pytest.raises(EnvironmentFailed, match="timeout"):
                await episode

    environment = {"step_timeout_s": 0.8, "on_timeout": on_timeout}
    async with actor_of(Saying("a1"), external(environment=environment)) as actor:
        await scenario(actor)


async def test_keys_open_what_they_are_for() -> None:
    async with actor_of(Saying("a1"), external()) as actor:
        episode = actor.play()
        work = await actor.lease()
        assert work is not None
        for path, key in [
            ("/work/lease", work["api_key"]),
            ("/work/lease", work["work_key"]),
            ("/work/heartbeat", work["api_key"]),
            ("/work/result", work["api_key"]),
            ("/chat/completions", work["work_key"]),
            ("/work/lease", "guessed"),
            ("/work/lease", "é"),
            ("/work/heartbeat", actor.work.key),
            ("/work/result", actor.work.key),
            ("/chat/completions", actor.work.key),
        ]:
            assert (await actor.post(path, key, ASK)).status_code == 401, (path, key)
        episode.cancel()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "the result"),
        (b"[]", 'must be JSON like {"rewards"'),
        (b'{"rewards": {}, "verdict": 1}', 'has the key "verdict", which is called "correct" now'),
        ({"rewards": {"other": 1.0}}, "other"),
        ({"rewards": {"correct": "1"}}, "must be a number"),
        (b'{"rewards": {"correct": NaN}}', "must be finite"),
        ({"rewards": {"correct": 1.0}, "metrics": [1]}, "metrics"),
        (b"[" * 100_000, "the result"),
        (b"\xff\xfe", "the result"),
    ],
)
async def test_a_result_that_is_none_is_refused_and_may_be_said_again(body: Any, says: str) -> None:
    async with actor_of(Saying("a1"), external()) as actor:
        episode = actor.play()
        work = await actor.lease()
        assert work is not None
        await actor.post("/chat/completions", work["api_key"], ASK)
        refused = await actor.post("/work/result", work["work_key"], body)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
        taken = await actor.post("/work/result", work["work_key"], WORTH)
        assert taken.status_code == 200 and (await episode).verdict == 1.0


async def test_a_failure_is_never_scored_and_a_second_result_is_refused() -> None:
    async with actor_of(Saying("a1"), external()) as actor:
        episode = actor.play()
        work = await actor.lease()
        assert work is not None
        first, second = await asyncio.gather(
            actor.post("/work/result", work["work_key"], {"failure": "the sandbox is full"}),
            actor.post("/work/result", work["work_key"], WORTH),
        )
        assert first.status_code == 200 and second.status_code in (401, 409)
        with pytest.raises(EnvironmentFailed, match="exception: its worker says: the sandbox"):
            await episode


@pytest.mark.parametrize(
    "body", [b"{", b"[]", {"wait_s": "soon"}, {"wait_s": -1}, b'{"wait_s": NaN}']
)
async def test_a_wait_that_is_none_is_refused(body: Any) -> None:
    async with actor_of(Saying(), external()) as actor:
        assert (await actor.post("/work/lease", actor.work.key, body)).status_code == 400


def test_where_workers_find_an_actor_is_for_this_user_alone(tmp_path: Path) -> None:
    for key in ("first", "second"):  # an actor that was killed has left its file
        path = announce(tmp_path, "actor-0", url="http://here/v1", key=key)
    assert path == tmp_path / "workers" / "actor-0.json" and path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"url": "http://here/v1", "key": "second"}
    announce(tmp_path, "actor-1.0", url="http://here/v1", key="k")
    announce(tmp_path, "actor-1.2", url="http://here/v1", key="k")
    assert sorted(one.name for one in path.parent.iterdir()) == ["actor-0.json", "actor-1.2.json"]


@pytest.mark.slow
async def test_the_worker_of_the_examples_plays_the_agent_of_the_examples(tmp_path: Path) -> None:
    """Two slots, six episodes, and one whose command fails."""

    async def scenario(actor: Actor) -> None:
        announce(tmp_path, "actor-0", url=actor.endpoint.url, key=actor.work.key)
        command = [sys.executable, str(WORKER), str(tmp_path), "--slots", "2", "--"]
        agent = [sys.executable, str(AGENT)]
        worker = subprocess.Popen([*command, *agent])
        try:
            episodes = await asyncio.gather(*[actor.play(index) for index in range(6)])
        finally:
            worker.kill()
            worker.wait()
        assert [one.session.sampled for one in episodes] == [3] * 6
        assert sum(one.verdict or 0.0 for one in episodes) < 6

    async def fails(actor: Actor) -> None:
        announce(tmp_path, "actor-0", url=actor.endpoint.url, key=actor.work.key)
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), "--slots", "1", "false"]
        )
        try:
            with pytest.raises(EnvironmentFailed, match="exit status 1"):
                await actor.play()
            with pytest.raises(EnvironmentFailed, match="exit status 1"):
                await actor.play()  # the slot goes on
        finally:
            worker.kill()
            worker.wait()

    async with actor_of(Saying(*["a1"] * 6), external()) as actor:
        await scenario(actor)
    async with actor_of(Saying(), external()) as actor:
        await fails(actor)


async def test_a_problem_that_cannot_be_sent_is_said() -> None:
    async with actor_of(Saying(), external()) as actor:
        sampling = Sampling(n=1, max_tokens=60, temperature=1.0)
        posed = Problem("2:7>", {"prompt": "2:7>", "reference": {1, 2}})
        with pytest.raises(EnvironmentFailed, match="not_sendable: the problem is no JSON"):
            await actor.player.play(posed, sampling, seed=0)


async def test_an_engine_that_fails_is_no_score_of_the_episode() -> None:
    """Whatever the worker says about it afterwards."""
    async with actor_of(Saying(EngineError("it is gone")), external()) as actor:
        episode = actor.play()
        work = await actor.lease()
        assert work is not None
        asked = await actor.post("/chat/completions", work["api_key"], ASK)
        assert asked.status_code == 503
        await actor.post("/work/result", work["work_key"], WORTH)
        with pytest.raises(EngineError, match="it is gone"):
            await episode


def test_a_wait_that_no_group_survives_is_refused_before_a_run() -> None:
    config = external(wait_s=600.0)
    with pytest.raises(SetupError, match="wait_s is 600 s, and a group ends after"):
        list(External(config.task, 0).notes(config))
    config = external()
    [note] = External(config.task, 0).notes(config)
    assert "played by workers" in note
