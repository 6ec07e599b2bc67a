"""The settings of a run's processes: the whole start of a run on a Ray that starts nothing, places
for every kind of cluster, and what the driver's parts ask of each other.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray

from async_grpo.algo.metrics import MetricSums
from async_grpo.cluster import rollout_actors
from async_grpo.cluster.evaluation import Evaluations
from async_grpo.cluster.placement import Node, Placement, PlacementError, place
from async_grpo.cluster.samples import TrainingSamples
from async_grpo.config.frozen import FrozenModel
from async_grpo.config.schema import Config
from async_grpo.errors import RunError
from async_grpo.observe.throughput import ThroughputSettings
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.loop import Loop
from async_grpo.run.partial_rollouts import PartialCollector
from async_grpo.run.system import StartFacts, System, reserve
from async_grpo.tasks.mixture import ProblemOrder
from async_grpo.weights.shared_gpu import Apart
from async_grpo.weights.transport import Announcement, Staged
from async_grpo.wire.codec import Batch, GroupTicket, decode_meta
from tests.support.frames import frame_of
from tests.support.listener import RecordingListener
from tests.support.wiring import Wire, recorded_waits, tiny_model, workplace

CPUS = [Node("a", "a", cpus=8, gpus=0, cores=tuple(range(8))), Node("b", "b", cpus=4, gpus=0)]
GPUS = [Node("a", "a", cpus=16, gpus=4), Node("b", "b", cpus=16, gpus=2)]
ANSWERS = {"progress": {"steps": 0, "run_epoch": 0}, "address": ("127.0.0.1", 1), "health": {}}
"""What the processes answer to calls by name; others get None."""
SETTING_UP = ("setup", "start")
"""Calls whose arguments say what a process is to be."""


class Handle:
    """An actor of Ray that answers at once; `seen` are the calls."""

    def __init__(self, kind: str, seen: list[Any]) -> None:
        self._kind, self._seen = kind, seen

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **options: Any) -> asyncio.Future[Any]:
            if method in SETTING_UP:
                given = [_plain(one) for one in (*arguments, *sorted(options.items()))]
                self._seen.append((self._kind, method, given))
            answer = asyncio.get_running_loop().create_future()
            if method != "run":
                answer.set_result(ANSWERS.get(method))
            return answer

        return SimpleNamespace(remote=call)


class Ray:
    """Ray without processes. `seen`: which were started, how, and what they were asked."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def remote(self, *arguments: Any, **options: Any) -> Any:
        if not arguments:
            return lambda kind: self.remote(kind, **options)
        return self._made(arguments[0].__name__, options)

    def _made(self, kind: str, given: dict[str, Any]) -> Any:
        def start(*arguments: Any, **options: Any) -> Handle:
            values = [_plain(one) for one in (*arguments, *sorted(options.items()))]
            self.seen.append((kind, sorted(given.items(), key=str), values))
            return Handle(kind, self.seen)

        return SimpleNamespace(
            remote=start, options=lambda **options: self._made(kind, given | options)
        )


def _plain(value: Any) -> Any:
    """What a process is given, without the configuration itself and what is new in every run."""
    if isinstance(value, Config | Handle):
        return None
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if dataclasses.is_dataclass(value):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {name: _plain(one) for name, one in fields.items() if name != "problem"}
    return value


class Session:
    """A Ray connection with two machines. `asked`: what was reserved, and with which deadline."""

    def __init__(self, nodes: list[Node], asked: list[Any]) -> None:
        self._nodes, self._asked = nodes, asked

    def nodes(self) -> list[Node]:
        return self._nodes

    async def wait_for_room(self, config: Config) -> Placement:
        return place(config, self._nodes)

    async def reserve(self, slots: Any, **options: Any) -> list[dict[str, Any]]:
        self._asked.append(("reserve", len(slots), options))
        return [{} for _ in slots]

    async def check_shared_storage(self, directory: str, used: set[str], **options: Any) -> None:
        self._asked.append(("storage", Path(directory).name, options))

    def on_node(self, node_id: str) -> dict[str, Any]:
        return {}

    def start_here(self, process: type, *arguments: Any, **options: Any) -> Any:
        return ray.remote(process).options(**options).remote(*arguments)

    def end(self, handle: Any) -> None: ...

    def close(self) -> None: ...


def started(config: Config, nodes: list[Node] = CPUS) -> Any:
    """Everything that a start asks for: processes with their options and arguments, reservations
    and deadlines; and what the learner's and the actors' watchers ask then.
    """
    return asyncio.run(_started(config, nodes))


async def _started(config: Config, nodes: list[Node]) -> Any:
    fake, asked = Ray(), list[Any]()
    directory = Path(config.run.dir)
    directory.mkdir(parents=True)
    facts = StartFacts(
        total_steps=6,
        weights={"correct": 1.0},
        order=ProblemOrder(0, (("", "f", 9),)),
        fingerprint="f",
        model_dir="directory",
        origin=Origin(None, 0),
        key="wires",
    )
    with (
        mock.patch.object(ray, "remote", fake.remote),
        mock.patch.object(ray, "kill", lambda handle: None),
        mock.patch.object(rollout_actors, "PROBE_INTERVAL_S", 0.0),
        recorded_waits() as waits,
    ):
        try:
            system = System(
                config,
                facts,
                places=await reserve(config, Session(nodes, asked)),
                listener=RecordingListener(asked),
                saver=SimpleNamespace(wait=_nothing),
            )
            await system.start()
        except RunError as error:
            return str(error)
        system.actors.begin(SimpleNamespace(join=_nothing, between_publications=nullcontext))
        system.actors.produce()
        await asyncio.sleep(0.01)
        await system.learner.train({}, 0.0, 1.0)
        await _stage(system)
        engines = [engine.actor_id for engine in system.actors.alive()]
        await system.actors.stop()
    text = repr([fake.seen, asked, engines]).replace(str(directory), "RUN")
    return text, sorted(waits)


async def _stage(system: System) -> None:
    """What the learner is asked for a publication, which gives no weights here."""
    with mock.patch.dict(ANSWERS, stage=Staged(Announcement("v0.1", "nccl"))):
        await system.learner.stage("v0.1", verify=False, sequences=[])


async def _nothing(*_: Any, **__: Any) -> None: ...


def placed(config: Config) -> list[Any]:
    """Where the processes go on machines without and with GPUs."""
    found = []
    for nodes in (CPUS, GPUS, GPUS[:1], [Node("c", "c", cpus=8, gpus=1)]):
        try:
            found.append(place(config, nodes))
        except PlacementError as error:
            found.append(str(error))
    return found


def _batch(step: int) -> Batch:
    metas = [decode_meta(frame_of(GroupTicket(group, 1, step - 1))) for group in range(4)]
    return Batch(step, tuple(metas))


class Parts:
    """Queue, learner and publisher of a loop, and what they were asked."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def get_batch(self, step: int) -> Batch:
        return _batch(step)

    async def payload(self, step: int, group_ids: list[int]) -> Any:
        self.seen.append(("sampled", step))
        raise RuntimeError("no payload here")

    async def metrics(self) -> dict[str, float]:
        return {}

    async def publish(self, version: int) -> float:
        self.seen.append(("published", version))
        return 0.0

    def weight_metrics(self) -> dict[str, float]:
        return {}

    async def refresh(self, version: int) -> None: ...

    async def settle(self) -> None: ...


def looped(config: Config) -> list[Any]:
    """Six learner steps: which versions are published, and of which steps samples are shown."""
    return asyncio.run(_looped(config))


async def _looped(config: Config) -> list[Any]:
    parts = Parts()

    async def trained(loop: Loop, batch: Batch) -> tuple[MetricSums, dict[str, float]]:
        return MetricSums(), {"rollout/response_tokens": 8.0, "rollout/score": 0.5}

    samples = TrainingSamples(
        config,
        queue=parts,
        model_dir=tiny_model(),
        total_steps=60,
        weights={},
        listener=RecordingListener(),
    )
    with mock.patch.object(Loop, "_train", trained):
        loop = Loop(
            config,
            queue=parts,
            learner=parts,
            publisher=parts,
            weights={},
            total_steps=6,
            steps_done=0,
            listener=RecordingListener(),
            samples=samples,
        )
        for _ in range(6):
            await loop.step()
        await samples.finish()
    return parts.seen


def evaluated(config: Config) -> list[Any]:
    """The metrics of an evaluation on one engine, and its deadlines."""
    return asyncio.run(_evaluated(config))


async def _evaluated(config: Config) -> list[Any]:
    from async_grpo.algo.accuracy import ProblemOutcome

    outcome = ProblemOutcome(
        greedy=True,
        right=1,
        judged=1 + config.evaluation.n,
        errors=0,
        greedy_tokens=3,
        sampled_tokens=4,
    )

    async def answer() -> Any:
        return [outcome], []

    handle = SimpleNamespace(evaluate=SimpleNamespace(remote=lambda **_: answer()))
    engine = SimpleNamespace(handle=handle, acknowledged="v0.0", actor_id="a")
    evaluations = Evaluations(
        config,
        coordinator=SimpleNamespace(serving=lambda: [engine]),
        actors=SimpleNamespace(died=_nothing, gpu=Apart()),
        epochs=SimpleNamespace(run_epoch=0),
        listener=RecordingListener(),
        failures=RecordingListener(),
        total_steps=6,
        tell=_nothing,
    )
    with recorded_waits() as waits:
        found, _ = await evaluations.everywhere(1, step=0, alone=_nothing)
    return [sorted(found), sorted(waits)]


def gathered(config: Config) -> list[str]:
    """Whom a checkpoint asks for responses under way."""
    asked: list[str] = []

    class Engine:
        actor_id = "a"

        async def partials(self) -> list[Any]:
            asked.append(self.actor_id)
            return []

    async def gather() -> None:
        collector = PartialCollector(config, None, RecordingListener())
        collector.begin([Engine()], {"ledger": {"groups": []}})
        await collector.write(workplace())

    asyncio.run(gather())
    return asked


def modelled(config: Config) -> ThroughputSettings:
    """What the diagnosis of the bottleneck knows of the configuration."""
    return ThroughputSettings.configured(config, max_num_seqs=16)


def _wires(probe: Callable[[Config], Any], table: list[tuple[Any, ...]]) -> list[Wire]:
    """(key, value, what else is given)."""
    return [Wire(key, value, probe, *given) for key, value, *given in table]


on_gpus = partial(started, nodes=GPUS)
on_gpus.__name__ = "started on GPUs"
SPLIT = {"cluster.layout": "split"}
WIRES = [
    *_wires(
        started,
        [
            ("seed", 5),
            ("model.dtype", "bfloat16"),
            ("rollout.group_timeout_s", 91.0),
            ("wire.max_frame_bytes", 2**17),
            ("replay.journal.enable", False),
            ("replay.journal.fsync", "never"),
            ("learner.ranks", 2),
            ("learner.ppo_epochs", 2),
            ("checkpoint.resume", "never"),
            ("checkpoint.on_lost_steps", "discard"),
            ("watchdog.start_timeout_s", 901.0),
            ("watchdog.step_timeout_s", 1801.0),
            ("watchdog.probe_timeout_s", 31.0),
            ("weight_sync.deadlines.stage_s", 123.0),
            ("cluster.restart_budget", 5),
            ("cluster.resources_timeout_s", 121.0),
            ("cluster.rollout_actors.max", 1),
            ("cluster.cores", "shared"),
        ],
    ),
    *_wires(
        placed,
        [
            ("cluster.device", "cpu"),
            ("cluster.layout", "colocated", {"cluster.rollout_actors.min": 1}),
            ("cluster.rollout_actors.min", 5),
            ("cluster.rollout_actors.max", 1),
            ("cluster.engine.tensor_parallel_size", 2),
            ("weight_sync.backend", "nccl"),
        ],
    ),
    Wire("frozen", {"teacher": FrozenModel(path="t/t")}, placed, unchecked=True),
    Wire("weight_sync.backend", "shared_memory", on_gpus, SPLIT),
    Wire("weight_sync.every_steps", 2, looped),
    Wire("tracking.sample_rows", 0, looped),
    Wire("evaluation.timeout_s", 601.0, evaluated),
    Wire("evaluation.n", 4, evaluated),
    Wire("checkpoint.partial_rollouts", True, gathered, {"rollout.seeded": "off"}),
    Wire("learner.sequence_parallel", 2, modelled, {"learner.ranks": 2}),
    Wire("task.verifier.workers", 3, modelled),
    Wire("task.verifier.concurrency", 3, modelled),
]
