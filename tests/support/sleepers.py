"""One GPU that a learner and engines share in turns, with everything of ours around it: doubles of
vLLM that forget what its sleep forgets, of a learner rank, and of the GPU, whose memory ends.

Coordinator, loop, learner group, actor manager, remote and host engine, and `VllmEngine` are the
product's. Beginnings of vLLM's calls, and what each leaves, are those of its engine core: sleep of
level 1 keeps requests, drops every cache, copies the weights and unmaps all; waking maps what is
asked for, weights as they were, caches with nothing in them, and resumes once all is mapped.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from async_grpo.algo.metrics import MetricSums
from async_grpo.cluster.learner_group import LearnerGroup
from async_grpo.cluster.remote_engine import RemoteEngine
from async_grpo.cluster.rollout_actors import ActorManager
from async_grpo.config.schema import Config
from async_grpo.errors import LearnerLost
from async_grpo.learner.batching import RankPlan
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.rollout.host import EngineHost, Parts
from async_grpo.run.loop import Loop
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.shared_gpu import SharedGpu
from async_grpo.weights.transport import UNPUBLISHED, Announcement, Staged, TokenSequence
from async_grpo.wire.codec import Batch
from tests.support.listener import RecordingListener
from tests.support.loops import GROUPS, ROWS, WEIGHTS, batch_of
from tests.support.publishing import PROMPT, RESPONSE, logprobs_of

LEARNER, LENT, WEIGHTS_SIZE, CACHE, PROCESS, CARD = 60, 5, 20, 40, 3, 100
"""Memory of the parts, and of the GPU: engine or learner, not both."""
STEPS, TOKENS = 5, 6
"""Learner steps, and tokens that make a batch."""


def config(*, staleness: int, every: int = 1, verify_every: int = 2) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": STEPS},
            "model": {"path": "m"},
            "rollout": {
                "rollout_batch_size": GROUPS,
                "group_size": ROWS,
                "prompt_length": 8,
                "response_length": 16,
            },
            "learner": {"tokens_per_micro_batch": 24},
            "replay": {"max_staleness": staleness},
            "weight_sync": {
                "every_steps": every,
                "verify_every": verify_every,
                "deadlines": {"acknowledge_s": 3.0},
            },
            "cluster": {"engine": {"sleep": True}, "restart_budget": 100},
            "watchdog": {"step_timeout_s": 2.0},
        }
    )


class Wrong(Exception):
    """What must not happen, and did."""


class Card:
    """The GPU's memory."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}

    def map(self, what: str, size: int) -> None:
        self.used[what] = size
        if sum(self.used.values()) > CARD:
            raise Wrong(f"out of memory: {self.used}")

    def free(self, *parts: str) -> None:
        for one in [used for used in self.used if used.startswith(parts)]:
            del self.used[one]


class Core:
    """vLLM's front end and engine core, of a model whose weights are one number."""

    def __init__(self, name: str, life: Life) -> None:
        self._life, self._name = life, name
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states={})
        self.label, self.paused, self.dead = "", False, False
        self.asleep: set[str] = set()
        self.held: float | None = 0.0
        self.backup: float | None = None
        self.mapping = 0  # of the cache's memory: what was written in an earlier one is lost
        self.prefixes: dict[str, int] = {}
        self.requests: dict[str, int | None] = {}
        for part, size in (("process", PROCESS), ("weights", WEIGHTS_SIZE), ("kv_cache", CACHE)):
            life.card.map(f"{name}.{part}", size)

    # -- as the product calls it

    async def sleep_async(self, level: int, mode: str) -> None:
        await self.pause_scheduler_async(mode=mode, clear_cache=level >= 1)
        if level >= 1:
            self.unmap()

    def unmap(self) -> None:
        if "weights" in self.asleep:
            return
        self.backup, self.held = self.held, None
        self.mapping += 1
        self.asleep = {"weights", "kv_cache"}
        self._life.card.free(f"{self._name}.weights", f"{self._name}.kv_cache")

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        await self._alive()
        wanted = set(tags or self.asleep)
        if self.asleep and wanted <= self.asleep:
            if "weights" in wanted:
                self._life.card.map(f"{self._name}.weights", WEIGHTS_SIZE)
                self.held = self.backup
            if "kv_cache" in wanted:
                self._life.card.map(f"{self._name}.kv_cache", CACHE)
            self.asleep -= wanted
        if not self.asleep:
            self.paused = False
        return not self.asleep

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        if mode != "keep":
            raise Wrong(f"requests are dropped: {mode}")
        self.paused = True
        await self._alive()
        if clear_cache:
            self.prefixes.clear()
            self.requests = dict.fromkeys(self.requests)

    async def resume_generation(self) -> None:
        await self._alive()
        if self.asleep:
            raise Wrong("it is resumed while it sleeps")
        self.paused = False

    async def update_weight_version(self, label: str) -> None:
        await self._alive()
        self.label = label

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        await self._alive()
        if method == "cached_tokens":
            return [0]
        if method == "take_publication":
            if "weights" in self.asleep or not self.paused:
                raise Wrong("weights are loaded into memory that is not mapped, or in use")
            if self._life.tears and self._life.rng.random() < self._life.tears:
                self.held = None
                return [{"failure": "torn", "reason": "cut off"}]
            self.held = args[0]["weight"]
        return [{}]

    async def check_health(self) -> None:
        await self._alive()

    def shutdown(self) -> None:
        self.dead = True

    async def _alive(self) -> None:
        await asyncio.sleep(0)
        if self.dead:
            raise ray.exceptions.ActorDiedError()

    # -- as time goes on

    def step(self) -> None:
        """Sample a token of every request."""
        if self.paused or self.dead:
            return
        for name, computed in self.requests.items():
            if self.asleep or self.held is None:
                raise Wrong("a token is sampled while it sleeps, or with weights that are gone")
            if computed not in (None, self.mapping):
                raise Wrong("a cache is read that sleep has dropped")
            self.requests[name] = self.mapping
            self._life.sampled(self.label, self.held)
        if len(self.requests) > 3:
            del self.requests[next(iter(self.requests))]

    def ask(self, name: str, salt: str) -> None:
        """Take a request whose prompt another had before it."""
        found = self.prefixes.setdefault(salt, self.mapping)
        self.requests[name] = found


class Host(EngineHost):
    """A rollout actor's process around the engine."""

    def __init__(self, settings: Config, name: str, life: Life) -> None:
        super().__init__(settings, actor_id=name, model_dir="", device="cuda", cores=[])
        self._life, self._held = life, settings
        self.core: Core

    async def load(self) -> None:
        self.core = Core(self.actor_id, self._life)
        engine = VllmEngine(
            self.core,
            stop_token_ids=[],
            kv_cache="auto",
            deadlines=self._held.weight_sync.deadlines,
        )
        await engine._set_label(UNPUBLISHED)
        self._parts = Parts(engine, None, None, None, None)

    async def call(self, method: str, *arguments: Any) -> Any:
        own = getattr(self, method, None)
        if method == "score":
            return await own(*arguments)
        return await getattr(self.parts.engine, method)(*arguments)

    async def run(self) -> None:
        """Ask for tokens, for ever."""
        for number in itertools.count():
            await asyncio.sleep(0.001)
            await self.parts.engine._steady.wait()
            self.core.ask(f"{number}", self.parts.engine.serving)

    async def score(self, sequences: Sequence[TokenSequence]) -> list[Any]:
        await self.parts.engine._steady.wait()
        if self.core.asleep or self.core.held is None:
            raise Wrong("it is asked while it sleeps")
        held, label = self.core.held, self.core.label
        await asyncio.sleep(0.001)
        return [([label], logprobs_of(held, response)) for _, response in sequences]

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        [(_, values)] = await self.score([(PROMPT, RESPONSE)])
        return [(PROMPT, RESPONSE, values)]

    async def examine(self) -> None:
        """Answer after some tokens."""
        for _ in range(5):
            await self.score([(PROMPT, RESPONSE)])

    async def close(self) -> None: ...


class Rank:
    """A learner rank, whose weights are the number of its steps."""

    def __init__(self, life: Life, weight: float) -> None:
        self._life, self.weight, self.dead = life, weight, False
        self.here = True
        life.card.map("learner.states", LEARNER)
        life.card.map("rest", LENT)

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def give_back(self) -> None:
        self.here = False
        self._life.card.free("learner.states")

    def take_back(self) -> None:
        self.here = True
        self._life.card.map("learner.states", LEARNER)

    def prepare(self, plan: RankPlan) -> dict:
        self._computes()
        return {}

    def train(self, *arguments: Any) -> dict[str, Any]:
        self._computes()
        if self._life.rng.random() < self._life.deaths:
            self.dead = True
            raise ray.exceptions.ActorDiedError()
        self.weight += 1.0
        return MetricSums().to_wire()

    def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        self._life.truth[label] = self.weight
        return self._staged(label, self.weight, sequences)

    def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        moved = self.weight + scale
        self._life.truth[label] = moved
        found, own = self._staged(label, moved, sequences), self.logprobs(sequences)
        return Staged(found.announcement, found.logprobs, own)

    def logprobs(self, sequences: list[TokenSequence], **_: Any) -> list[np.ndarray]:
        self._computes()
        return [logprobs_of(self.weight, response) for _, response in sequences]

    def write_checkpoint(self, directory: str, state: dict[str, Any]) -> float:
        self._computes()
        return self.weight

    def connect(self, sizes: list[int]) -> list[dict[str, Any]]:
        return [{} for _ in sizes]

    def rendezvous(self) -> str:
        return ""

    def release(self) -> None: ...

    def _staged(self, label: str, weight: float, sequences: list[TokenSequence]) -> Staged:
        self._computes()
        rows = [logprobs_of(weight, response) for _, response in sequences]
        return Staged(Announcement(label, "ipc", {"weight": weight}), rows)

    def _computes(self) -> None:
        if not self.here:
            raise Wrong("the learner computes while its memory is lent")


class Handle:
    """Ray's, of an object here: every call takes a moment, and none ends once it is dead."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: self._ask(name, args, kwargs))

    def _ask(self, name: str, args: tuple, kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._answer(name, args, kwargs))

    async def _answer(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        if self.target.dead:
            raise ray.exceptions.ActorDiedError()
        try:
            found = getattr(self.target, name)(*args, **kwargs)
            return await found if asyncio.iscoroutine(found) else found
        except Exception:
            if self.target.dead:
                raise ray.exceptions.ActorDiedError() from None
            raise


class Group(LearnerGroup):
    """The learner's ranks, here."""

    def __init__(self, life: Life, **arguments: Any) -> None:
        super().__init__(life.config, **arguments)
        self._life = life

    async def _start(self, checkpoint: str | None) -> None:
        await asyncio.sleep(0.002)
        rank = Rank(self._life, float(self._life.loop.steps_done))
        self._handles = [Handle(rank)]
        self._serves.set()


class Slots:
    """One slot, whose process is here."""

    def __init__(self, life: Life) -> None:
        self._life, self._numbers = life, itertools.count()
        self._running: list[RemoteEngine] = []
        self._slot = SimpleNamespace(
            index=0, engine=None, node_id="n", leaving=False, filling=None, incarnations=1
        )

    def all(self) -> list[Any]:
        return [self._slot]

    def get(self, index: int) -> Any:
        return self._slot

    def processes(self) -> Sequence[RemoteEngine]:
        return tuple(self._running)

    def begin(self, slot: Any) -> RemoteEngine:
        host = Host(self._life.config, f"a{next(self._numbers)}", self._life)
        host.dead = False
        slot.engine = RemoteEngine(host.actor_id, 0, "h", 1, Handle(host), self._same)
        self._running.append(slot.engine)
        return slot.engine

    async def _same(self, announcement: Announcement) -> Announcement:
        return announcement

    async def load(self, engine: RemoteEngine) -> None:
        await engine.handle.load.remote()
        engine.max_num_seqs = 4

    def kill(self, engine: RemoteEngine) -> None:
        engine.give_up(RuntimeError("killed"))
        host = engine.handle.target
        host.dead = True
        if hasattr(host, "core"):
            host.core.dead = True
        self._life.card.free(f"{host.actor_id}.")
        if engine in self._running:
            self._running.remove(engine)

    async def nodes(self) -> list[Any]:
        return []

    def lost_nodes(self, nodes: Any) -> set[str]:
        return set()

    def free_room(self, nodes: Any) -> None:
        return None

    async def node_serves(self, slot: Any) -> bool:
        return True

    async def reserved_again(self, slot: Any) -> bool:
        return True

    async def close(self, asked: Any) -> None:
        for engine in self.processes():
            self.kill(engine)


class Life:
    """A run of a few steps in which things happen at random. deaths, tears: how often a learner
    dies in a step, and a load is cut off.
    """

    def __init__(
        self, seed: int, *, staleness: int, every: int = 1, deaths: float = 0.0, tears: float = 0.0
    ) -> None:
        self.rng, self.deaths, self.tears = random.Random(seed), deaths, 0.0
        self._tears, self.config = tears, config(staleness=staleness, every=every)
        self.card, self.truth = Card(), {UNPUBLISHED: 0.0}
        self.wrong: list[BaseException] = []
        self.tokens: dict[str, int] = {}
        self._taken = 0
        self.listener, self.lived = RecordingListener(), list[int]()
        gpu = SharedGpu()
        placement = SimpleNamespace(device="cuda", learners=())
        self.group = Group(
            self,
            placement=placement,
            options=[],
            queue=None,
            model_dir="",
            backend="ipc",
            key="",
            total_updates=9,
            gpu=gpu,
        )
        self.slots = Slots(self)
        self.manager = ActorManager(
            self.config,
            slots=self.slots,
            client=self,
            listener=self.listener,
            failures=self,
            gpu=gpu,
        )
        gpu.between(
            take=lambda: self.group.take_back(),
            give=lambda: self.group.give_back(),
            sleep=lambda: self.manager.sleep(),
            wake=lambda: self.manager.wake(),
        )
        self.gpu = gpu
        self.coordinator = Coordinator(
            self.config,
            learner=self.group,
            engines=self.manager,
            backend="ipc",
            live=self.live,
            exact=True,
            listener=self.listener,
            gpu=gpu,
        )
        self.loop = Loop(
            self.config,
            queue=self,
            learner=self.group,
            publisher=self.coordinator,
            weights=WEIGHTS,
            total_steps=STEPS,
            steps_done=0,
            listener=self.listener,
        )

    # -- what the parts ask for

    async def get_batch(self, step: int) -> Batch | None:
        await asyncio.sleep(0)
        total = sum(self.tokens.values())
        waits = self.config.replay.max_staleness == 0 or self.rng.random() < 0.7
        if waits and total - self._taken < TOKENS:
            return None
        self._taken = total
        return batch_of(step)

    async def metrics(self) -> dict[str, float]:
        return {}

    async def call(self, method: Callable[..., Any], *arguments: Any) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        self.wrong.append(error)
        self.loop.fail(error)

    async def live(self, version: int, digest: str) -> None:
        self.lived.append(version)

    def sampled(self, label: str, weight: float) -> None:
        """Every token comes from the weights whose label it has."""
        if self.truth[label] != weight:
            raise Wrong(f"a token of {label} is sampled with {weight}, not {self.truth[label]}")
        self.tokens[label] = self.tokens.get(label, 0) + 1

    # -- what happens

    async def go(self) -> None:
        """Start, train, end. Raises what went wrong."""
        time_goes_on = asyncio.create_task(self._time())
        beside: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(4):
                await asyncio.gather(self.manager.start(), self.group.start(None))
                await self.coordinator.start(0)
                self.manager.begin(self.coordinator)
                self.manager.produce()
                self.tears = self._tears
                while self.loop.steps_done < STEPS:
                    beside += [asyncio.create_task(one) for one in self._happenings()]
                    await self._surviving(self.loop.step)
                await self._surviving(self.loop.finish)
                await asyncio.gather(*beside)
                before = sum(self.tokens.values())
                while sum(self.tokens.values()) == before:  # after all of it it still generates
                    await self._surviving(lambda: self.coordinator.refresh(STEPS))
                    await asyncio.sleep(0)
                newest = f"v0.{self.loop.steps_done}"
                served = {one.handle.target.core.label for one in self.coordinator.serving()}
                assert served == {newest}, f"{served} serve, {newest} was published"
        except BaseException:
            if self.wrong:
                raise self.wrong[0] from None
            raise
        finally:
            for task in [time_goes_on, *beside]:
                task.cancel()
            await asyncio.gather(time_goes_on, *beside, return_exceptions=True)
            await self.coordinator.close()
            await self.manager.stop()
        if self.wrong:
            raise self.wrong[0]

    async def _surviving(self, work: Callable[[], Any]) -> None:
        lost = False
        while True:
            try:
                if lost:
                    async with self.coordinator.without_learner():
                        await self.group.start(None)
                        await self.coordinator.relink(self.loop.steps_done, run_epoch=0)
                    lost = False
                await work()
                return
            except LearnerLost:  # also while it is brought back
                lost = True
                self.group.kill()

    def _happenings(self) -> list[Any]:
        ways = [self._evaluate, self._ask_learner, self._checkpoint, self._kill_engine]
        return [way() for way in ways if self.rng.random() < 0.3]

    async def _evaluate(self) -> None:
        await asyncio.sleep(self.rng.random() / 50)
        try:
            async with self.coordinator.pinned(), self.gpu.turn("engines"):
                for engine in self.coordinator.serving():
                    await engine.handle.examine.remote()
        except ray.exceptions.RayError:
            pass  # its engine died

    async def _ask_learner(self) -> None:
        await asyncio.sleep(self.rng.random() / 50)
        try:
            await self.group.logprobs([(PROMPT, RESPONSE)])
        except LearnerLost as error:
            self.coordinator.learner_lost(error)

    async def _checkpoint(self) -> None:
        await asyncio.sleep(self.rng.random() / 50)
        try:
            await self.group.write_checkpoint("d", {})
        except LearnerLost as error:
            self.coordinator.learner_lost(error)

    async def _kill_engine(self) -> None:
        """At any time, asleep or not."""
        await asyncio.sleep(self.rng.random() / 50)
        for engine in self.slots.processes():
            engine.handle.target.dead = True
            self.card.free(f"{engine.actor_id}.")
            if hasattr(engine.handle.target, "core"):
                engine.handle.target.core.dead = True

    async def _time(self) -> None:
        while True:
            await asyncio.sleep(0)
            try:
                for engine in self.slots.processes():
                    if hasattr(engine.handle.target, "core"):
                        engine.handle.target.core.step()
            except Wrong as error:
                self.fail(error)
                return
