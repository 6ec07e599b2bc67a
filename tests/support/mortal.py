"""A whole run whose processes are plain objects that die when they are told to: every part of the
driver is real, and Ray starts nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import ray

from async_grpo.algo.accuracy import ProblemOutcome
from async_grpo.algo.metrics import MetricSums
from async_grpo.cluster import restart_budget, rollout_actors
from async_grpo.cluster.placement import Node, Placement, Slot
from async_grpo.config.schema import Config
from async_grpo.replay.actor_reports import QueueMetrics
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.system import Places, StartFacts, System
from async_grpo.runtime.storage import Written
from async_grpo.tasks.mixture import ProblemOrder
from async_grpo.weights.files import ChainPart
from async_grpo.weights.transport import Announcement, Staged, TokenSequence
from tests.support.listener import RecordingListener
from tests.support.loops import GROUPS, LIMIT, ROWS, batch_of
from tests.support.publishing import FakeEngine, logprobs_of, until

NODES = [Node("a", "10.0.0.1", cpus=2, gpus=0), Node("b", "10.0.0.2", cpus=1, gpus=0)]
"""Full with a learner rank and two engines."""
OUTCOME = ProblemOutcome(
    greedy=True, right=1, judged=2, errors=0, greedy_tokens=3, sampled_tokens=3
)


def settings(directory: Path, *, budget: int = 3, least: int = 1, ranks: int = 1) -> Config:
    """Two steps with two engines, one on each node, and an evaluation."""
    return Config.model_validate(
        {
            "run": {"total_steps": 2, "dir": str(directory)},
            "model": {"path": "m"},
            "rollout": {
                "rollout_batch_size": GROUPS,
                "group_size": ROWS,
                "prompt_length": 8,
                "response_length": LIMIT,
            },
            "learner": {"ranks": ranks, "tokens_per_micro_batch": 24},
            "tracking": {"sample_rows": 0},
            "cluster": {
                "restart_budget": budget,
                "rollout_actors": {"min": least, "max": 2},
                "resources_timeout_s": 1,
            },
        }
    )


class EngineProcess(FakeEngine):
    """A rollout actor that produces nothing."""

    async def start(self, *, backend: str, label: str) -> int:
        return 4

    async def health(self) -> None: ...

    async def close(self) -> None: ...

    async def final_report(self) -> None: ...

    async def evaluate(self, *, indices: list[int], **options: Any) -> Any:
        return [OUTCOME] * len(indices), []


class RankProcess:
    """A learner rank whose weights are one number."""

    def __init__(self) -> None:
        self.sequence = 0

    async def address(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        return [{"group": 1} for _ in tensor_parallel_sizes]

    async def rendezvous(self) -> str:
        return ""

    async def note(self) -> str:
        return ""

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        return self._staged(label, 1.0, sequences)

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        staged = self._staged(label, 1.0 + scale, sequences)
        staged.before.extend(logprobs_of(1.0, response) for _, response in sequences)
        return staged

    def _staged(self, label: str, weight: float, sequences: list[TokenSequence]) -> Staged:
        self.sequence += 1
        payload = {"weight": weight, "path": "segment", "sequence": self.sequence}
        return Staged(
            Announcement(label, "shared_memory", payload, nbytes=8),
            [logprobs_of(weight, response) for _, response in sequences],
            [],
        )

    async def write_checkpoint(self, directory: str, state: dict[str, Any]) -> Written:
        return Written(nbytes=1, in_memory=False, note="", updates=1)

    async def train(self, *_: Any) -> dict[str, Any]:
        return MetricSums().to_wire()

    async def prepare(self, plan: Any) -> dict[Any, float]:
        return {}

    async def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]:
        return [logprobs_of(1.0, response) for _, response in sequences]


class QueueWork:
    """A queue that always has a batch."""

    async def progress(self) -> dict[str, int]:
        return {"steps": 0, "training": 0, "run_epoch": 0}

    async def next_batch(self, step: int) -> Any:
        return batch_of(step)

    async def full_metrics(self) -> QueueMetrics:
        return QueueMetrics({}, {})

    async def obstacle(self, after: int, until: int) -> str:
        return ""

    async def digests(self) -> dict[int, str]:
        return {}

    async def is_over(self) -> bool:
        return False

    async def snapshot(self) -> dict[str, Any]:
        return {}


class RelayWork:
    """A relay."""

    async def offer(self, source: Any, nbytes: int, base: Any, version: bool) -> list[ChainPart]:
        return [ChainPart(source, nbytes, nbytes)]

    async def write(self, chain: list[ChainPart], data: Any, seconds: float) -> Any:
        return ("copy", 2), 1, ""


class Mortal:
    """A Ray handle. What it is asked is answered by `work`, or by None."""

    def __init__(self, world: World, kind: str, work: Any) -> None:
        self.world, self.kind, self.work = world, kind, work
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any, **options: Any) -> Any:
            name, given = (arguments[0], arguments[1:]) if method == "call" else (method, arguments)
            answer = asyncio.ensure_future(self._answer(name, given, options))
            return [answer, None] if name == "offer" else answer  # Ray's two references

        return SimpleNamespace(remote=remote)

    def die(self, error: BaseException) -> None:
        """Raise this in every call, those under way too."""
        if not self.end.done():
            self.end.set_exception(error)
            self.end.exception()

    async def _answer(self, name: str, given: Any, options: Any) -> Any:
        await asyncio.sleep(0)
        if not self.end.done() and (error := self.world.struck(self.kind, name)) is not None:
            if isinstance(error, ray.exceptions.ActorUnavailableError) or self.kind == "relay":
                raise error  # and lives, or is started again by Ray
            self.die(error)
        if self.end.done() or name == "run":
            return await asyncio.shield(self.end)
        work = getattr(self.work, name, None)
        return None if work is None else await work(*given, **options)


class World:
    """A run, and who dies of what in which call: `death` is (kind, method, number of the call from
    1, error).
    """

    def __init__(self, config: Config, death: tuple[str, str, int, BaseException] | None) -> None:
        self.config, self.death, self.calls, self.strikes = config, death, 0, 0
        self.listener, self.lost_nodes = RecordingListener(), set[str]()
        self.at_death: Callable[[], None] = lambda: None

    def struck(self, kind: str, method: str) -> BaseException | None:
        """Count the call, and return what it dies of."""
        if self.death is None or self.death[:2] != (kind, method):
            return None
        self.calls += 1
        if self.calls != self.death[2]:
            return None
        self.strikes += 1
        self.at_death()
        return self.death[3]

    def remote(self, *arguments: Any, **options: Any) -> Any:
        """As `ray.remote`."""
        if not arguments:
            return self.remote
        kind = arguments[0].__name__.removesuffix("Process").lower()

        def start(*given: Any, **options: Any) -> Mortal:
            works = {
                "rollout": lambda: EngineProcess(options["actor_id"], []),
                "learner": RankProcess,
                "queue": QueueWork,
                "relay": RelayWork,
            }
            return Mortal(self, kind, works[kind]())

        return SimpleNamespace(remote=start, options=lambda **_: SimpleNamespace(remote=start))

    # ---- the session ----

    def nodes(self) -> list[Node]:
        return [node for node in NODES if node.node_id not in self.lost_nodes]

    async def node_serves(self, node_id: str, *, timeout_s: float) -> bool:
        return node_id not in self.lost_nodes

    async def reserved_again(self, option: Any, *, timeout_s: float) -> bool:
        return True

    def release(self, option: Any) -> None: ...

    def on_node(self, node_id: str) -> dict[str, Any]:
        return {}

    def start_here(self, process: type, *arguments: Any, **options: Any) -> Any:
        return self.remote(process).remote(*arguments)

    def end(self, handle: Any) -> None: ...

    def system(self) -> System:
        """The parts of the run, before anything is started."""
        places = Placement(
            device="cpu",
            learners=tuple(Slot("a", 1.0, 0.0) for _ in range(self.config.learner.ranks)),
            engines=(Slot("a", 1.0, 0.0), Slot("b", 1.0, 0.0)),
            colocated=False,
        )
        facts = StartFacts(
            total_steps=2,
            weights={"correct": 1.0, "format": 0.5},
            order=ProblemOrder(0, (("", "f", 9),)),
            fingerprint="f",
            model_dir=str(self.config.model.path),
            origin=Origin(None, 0),
            key="mortal",
        )
        ranks = [{} for _ in places.learners]
        return System(
            self.config,
            facts,
            places=Places(self, places, "shared_memory", ranks, [{}, {}]),
            listener=self.listener,
            saver=SimpleNamespace(wait=functools.partial(asyncio.sleep, 0)),
        )

    async def phases(self, system: System) -> None:
        """A run from its start to its end."""
        await system.start()
        await system.open_weights()
        await system.evaluate(4)
        await system.step()
        await system.settle()
        if self.death is not None and self.death[1] == "health":  # in its own time
            lives = isinstance(self.death[3], ray.exceptions.ActorUnavailableError)
            await until(lambda: self.strikes and (lives or system.actors.deaths))
        await self.settled(system)
        await system.step()
        await system.save(Path(self.config.run.dir))
        await system.evaluate(4)
        await self.settled(system)

    async def settled(self, system: System) -> None:
        """Wait until whoever died is replaced, or given up and the run knows."""

        def done() -> bool:
            slots, alive = system.actors._slots.all(), system.actors.alive()
            enough = len(alive) >= self.config.cluster.rollout_actors.min
            return system.loop.failed or (enough and len(slots) == len(alive))

        await until(done)

    @contextmanager
    def without_ray(self) -> Iterator[None]:
        """Ray is this world."""

        def kill(handle: Mortal) -> None:
            handle.die(ray.exceptions.ActorDiedError())

        with ExitStack() as patches:
            for target, name, value in (
                (ray, "remote", self.remote),
                (ray, "kill", kill),
                (ray, "cancel", lambda call: None),
                (restart_budget, "back_off_s", lambda deaths: 0.0),
                (rollout_actors, "PROBE_INTERVAL_S", 0.01),
                (rollout_actors, "SURVEY_INTERVAL_S", 0.01),
            ):
                patches.enter_context(mock.patch.object(target, name, value))
            yield


def run(world: World) -> tuple[BaseException | None, BaseException | None]:
    """What ended the run, and what its end itself raised."""

    async def whole() -> tuple[BaseException | None, BaseException | None]:
        with world.without_ray():
            system, ended, at_stop = world.system(), None, None
            world.running = system
            try:
                async with asyncio.timeout(20):
                    await world.phases(system)
            except Exception as error:  # noqa: BLE001 - told
                ended = error
            try:
                await system.stop(orderly=ended is None)
            except Exception as error:  # noqa: BLE001 - told
                at_stop = error
            return ended, at_stop

    return asyncio.run(whole())
