"""Publications over the nccl double while engines, the sender and the group fail: the others go on
with exactly the announced weights.

Coordinator, learner group and process, sender, `VllmEngine` and the workers' half are the
product's. Stand-ins are Ray's calls, vLLM's front end, and the models: the learner's is a few
tensors, an engine's keeps what it is given.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from async_grpo.cluster.learner_group import LearnerGroup, LearnerProcess, RankParts
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, RunError, Stalled, TransferMismatch
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights import fan_out
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.transport import Announcement, Receipt, Staged, TokenSequence
from tests.support import forkserver, nccl_over_gloo
from tests.support.listener import RecordingListener
from tests.support.machine_speed import slowness
from tests.support.models import ModuleOwner
from tests.support.nccl_over_gloo import Control
from tests.support.nccl_sides import GPUS, MixedModel, bit_equal, make_sender

forkserver.import_engines()

BUCKET_S, GRACE_S = 0.6, 0.5
RENDEZVOUS_S, ACKNOWLEDGE_S, LATE_S = (seconds * slowness() for seconds in (2.5, 6.0, 10.0))
attempt_s = 3 * BUCKET_S + GRACE_S + RENDEZVOUS_S + BUCKET_S
"""No publication may take longer than its deadlines allow, plus this."""
BUCKETS = 3
"""Of MixedModel in packs of the size that `make_sender` chooses."""
VICTIM, VICTIM_RANK = "a1", 2
PROBE: list[TokenSequence] = [([1], [2, 3, 4, 5, 6])]
Weights = dict[str, torch.Tensor]
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(GPUS > 0, reason="faults are injected by the doubles"),
]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with nccl_over_gloo.installed(tmp_path_factory.mktemp("nccl")) as control:
        yield control


@pytest.fixture(autouse=True)
def _clean(control: Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No faults at the start; at the end no thread that would block the exit of a process."""
    from vllm.distributed.weight_transfer import packed_tensor

    control.clear()
    # a sender that was stuck leaves a stream that never ends
    packed_tensor._get_streams.cache_clear()
    monkeypatch.setattr(fan_out, "GRACE_S", GRACE_S)
    before = set(threading.enumerate())
    yield
    assert [
        thread.name for thread in set(threading.enumerate()) - before if not thread.daemon
    ] == []


class Remote:
    """Like a handle of an actor with one thread: calls run in order, and go on when nobody waits
    for them any more.
    """

    def __init__(self, target: Any, *, device: int = 0) -> None:
        self._target, self._calls = target, queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(device,), name="actor", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: self._call(name, args, kwargs))

    def _call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> asyncio.Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()
        self._calls.put((future, lambda: getattr(self._target, name)(*args, **kwargs)))
        return asyncio.wrap_future(future)

    def _serve(self, device: int) -> None:
        torch.accelerator.set_device_index(device)
        while True:
            future, work = self._calls.get()
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)


class Worker:
    """An engine's worker with the product's extension and transfer engine; `loaded`: what its model
    holds.
    """

    def __init__(self, directory: str) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig

        from async_grpo.rollout.engine.vllm.worker import NcclEngine, WorkerExtension

        self._calls, self.loaded, self.hang_at = WorkerExtension, {}, -1
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        hf = SimpleNamespace(tie_word_embeddings=False)
        model = SimpleNamespace(model=directory, revision=None, hf_config=hf, hf_text_config=hf)
        settings = SimpleNamespace(parallel_config=parallel, model_config=model)
        self.weight_transfer_engine = self._engine = NcclEngine(
            WeightTransferConfig(backend="nccl"), settings, torch.device("cpu"), self
        )

    def run(self, method: str, *args: Any) -> Any:
        return getattr(self._calls, method)(self, *args)

    def contents(self) -> Weights:
        return self.loaded

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        self._loads = 0

    def update_weights(self, info: dict[str, Any]) -> None:
        self._engine.update_weights(info)

    def finish_weight_update(self) -> None:
        """Nothing is packed or fused here."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._loads == self.hang_at:
            time.sleep(nccl_over_gloo.LIMIT_S)
        self._loads += 1
        for name, tensor in weights:
            self.loaded.pop(name, None)
            self.loaded[name] = tensor.clone()


def serve_child(pipe: Any, directory: str) -> None:
    """A worker in a process of its own."""
    nccl_over_gloo.install()
    worker = Worker(directory)
    while True:
        method, args = pipe.recv()
        result = getattr(worker, method)(*args)
        pipe.send(
            {name: (t.dtype, t.view(torch.uint8).numpy(), t.shape) for name, t in result.items()}
            if method == "contents"
            else result
        )


class ChildWorker:
    """`Worker`, in a child process that may die."""

    def __init__(self, directory: str) -> None:
        context = forkserver.context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=forkserver.InThisEnvironment(serve_child), args=(theirs, directory), daemon=True
        )
        self.process.start()
        theirs.close()

    def run(self, method: str, *args: Any) -> Any:
        self._pipe.send(("run", (method, *args)))
        return self._pipe.recv()

    def contents(self) -> Weights:
        self._pipe.send(("contents", ()))
        return {
            name: torch.from_numpy(data).view(dtype).view(shape)
            for name, (dtype, data, shape) in self._pipe.recv().items()
        }


class FrontEnd:
    """vLLM's AsyncLLM as `Engine` uses it. `stops_at`: the phase that never ends. Tokens may only
    flow under complete announced weights.
    """

    def __init__(self, run: Run, worker: Worker | ChildWorker, *, device: int) -> None:
        self._run, self.worker, self._remote = run, worker, Remote(worker, device=device)
        self.paused, self.label, self.stops_at, self.engine_core = False, "", "", self
        self.output_processor = SimpleNamespace(request_states={})

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        await self._phase("pause")
        assert mode == "keep"
        self.paused = True

    async def resume_generation(self) -> None:
        await self._phase("resume")
        assert bit_equal(await self.contents(), self._run.truth[self.label]), (
            f"an engine goes on with other weights than {self.label}"
        )
        self.paused = False

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        if method == "cached_tokens":
            return [0]
        assert self.paused or method in ("connect_weights", "attend_publication"), (
            "weights are loaded under running responses"
        )
        try:
            return [await self._remote.run.remote(method, *args)]
        except (EOFError, OSError):
            return await asyncio.Event().wait()  # vLLM leaves such a call without an answer

    async def contents(self) -> Weights:
        return await self._remote.contents.remote()

    async def update_weight_version(self, label: str) -> None:
        self.label = label

    async def check_health(self) -> None:
        if isinstance(self.worker, ChildWorker) and not self.worker.process.is_alive():
            raise RuntimeError("EngineCore died")

    async def _phase(self, name: str) -> None:
        if self.stops_at == name:
            await asyncio.Event().wait()


class Handle:
    """An engine as the driver sees it."""

    host, tensor_parallel_size = "h", 1

    def __init__(self, run: Run, actor_id: str, *, child: bool = False) -> None:
        self.actor_id = actor_id
        self.front = FrontEnd(
            run, (ChildWorker if child else Worker)(run.directory), device=next(run.devices)
        )
        self.engine = VllmEngine(
            self.front,
            stop_token_ids=[],
            kv_cache="recompute",
            deadlines=run.config.weight_sync.deadlines,
        )
        self.connect: Callable[[dict[str, Any]], Any] = self.engine.connect

    async def attend(self, announcement: Announcement) -> Receipt:
        return await self.engine.attend(announcement)

    async def receive(self, announcement: Announcement) -> Receipt:
        return await self.engine.receive(announcement)

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return [
            (prompt, response, np.zeros(len(response), np.float32)) for prompt, response in PROBE
        ]

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        weights = await self.front.contents()
        return [([self.front.label], logprobs(weights, response)) for _, response in sequences]


def logprobs(weights: Weights, response: list[int]) -> np.ndarray:
    """A number per token of the response that depends on all weights."""
    return (
        -sum(weight.double().abs().mean().item() for weight in weights.values())
        * np.arange(1, len(response) + 1, dtype=np.float32)
        / 100
    )


class Model(ModuleOwner):
    """The learner's model."""

    share = 1.0
    """Of the weights, how many a change reaches."""

    def logprobs(self, sequences: list[TokenSequence], *, temperature: float) -> list[np.ndarray]:
        return [logprobs(dict(self.named_weights()), response) for _, response in sequences]

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                moved = torch.rand(parameter.shape, generator=generator) < self.share
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((noise * moved).to(parameter.dtype))


class Learner(LearnerProcess):
    """The one learner rank, which keeps what it staged and, for every group that it forms, has the
    next faults injected.
    """

    def __init__(self, run: Run, owner: Model, *, overlap: bool) -> None:
        super().__init__(run.config, rank=0, cores=[], queue=None)
        deadlines = run.config.weight_sync.deadlines
        delta = run.config.weight_sync.delta
        sender = make_sender(owner, overlap=overlap, delta=delta, deadlines=deadlines)
        self._run, self._parts = run, RankParts(owner, sender, saving=None)

    def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        self._run.groups.append(len(tensor_parallel_sizes))
        self._run.control.inject(*(self._run.plan.pop(0) if self._run.plan else []))
        return super().connect(tensor_parallel_sizes)

    def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        self._run.truth[label] = {
            name: tensor.clone() for name, tensor in self._parts.learner.named_weights()
        }
        staged = super().stage(label, verify=verify, sequences=sequences)
        self._run.announced[label] = staged.announcement.payload
        return staged


class Run:
    """A coordinator with everything around it. groups: sizes of the groups formed. plan: faults for
    the groups to come.
    """

    devices = itertools.count(1)  # ranks of one process need different ones

    def __init__(
        self,
        control: Control,
        directory: Path,
        *,
        overlap: bool,
        verify: bool = False,
        delta: str = "off",
        engines: int = 3,
        children: Iterable[str] = (),
    ) -> None:
        deadlines = {
            "bucket_s": BUCKET_S,
            "rendezvous_s": RENDEZVOUS_S,
            "acknowledge_s": ACKNOWLEDGE_S,
            "pause_s": 0.5,
            "resume_s": 0.5,
            "stage_s": 10.0,
        }
        self.config = Config.model_validate(
            {
                "run": {"total_steps": 9, "dir": str(directory)},
                "model": {"path": "m"},
                "weight_sync": {
                    "self_check": False,
                    "overlap": overlap,
                    "verify_every": int(verify),
                    "delta": delta,
                    "deadlines": deadlines,
                },
                "watchdog": {"step_timeout_s": 30.0},
            }
        )
        self.control, self.directory = control, str(directory)
        self.groups: list[int] = []
        self.plan: list[list[dict[str, Any]]] = []
        self.truth: dict[str, Weights] = {}
        self.announced: dict[str, dict[str, Any]] = {}
        self.lived: list[int] = []
        self.dropped: dict[str, str] = {}
        torch.manual_seed(0)
        self.owner = Model(MixedModel())
        save_file(self.owner.model.state_dict(), directory / "model.safetensors")
        self.members = [
            Handle(self, f"a{index}", child=f"a{index}" in children) for index in range(engines)
        ]
        self.process = Learner(self, self.owner, overlap=overlap)
        group = LearnerGroup(
            self.config,
            placement=SimpleNamespace(device="cpu", learners=()),
            options=[],
            queue=None,
            model_dir="m",
            backend="nccl",
            key="",
            total_updates=9,
        )
        group._handles, group._address = (
            [Remote(self.process)],
            "127.0.0.1",
        )  # as if it had been started
        self.notes: list[str] = []
        self.coordinator = Coordinator(
            self.config,
            learner=group,
            engines=self,
            backend="nccl",
            live=self.live,
            exact=True,
            listener=RecordingListener(self.notes),
        )

    def alive(self) -> tuple[Handle, ...]:
        return tuple(self.members)

    async def drop(self, actor_id: str, error: BaseException) -> None:
        self.members = [engine for engine in self.members if engine.actor_id != actor_id]
        self.dropped[actor_id] = str(error)

    async def live(self, version: int, digest: str) -> None:
        """Everyone who may be given tickets serves exactly what was announced."""
        for engine in self.coordinator.serving():
            assert engine.engine.serving == f"v0.{version}" and not engine.front.paused, (
                f"{engine.actor_id} does not serve {version}"
            )
            assert bit_equal(await engine.front.contents(), self.truth[f"v0.{version}"]), (
                f"{engine.actor_id} holds other bytes"
            )
        self.lived.append(version)

    async def publish(self, version: int, *plan: list[dict[str, Any]]) -> float:
        """One learner step and its publication, with these faults in this group and in those formed
        again. Returns seconds.
        """
        started = time.monotonic()
        self.owner.change(version)
        if plan:
            self.control.inject(*plan[0])
            self.plan = list(plan[1:])
        await self.coordinator.publish(version)
        self.owner.change(
            1000 + version
        )  # the next step: with overlap it must not reach what is being sent
        await self.coordinator.wait()
        return time.monotonic() - started

    async def goes_on(self, version: int) -> None:
        """The next publication is like any other."""
        repeated = self.count("repeated")
        self.control.inject()
        await self.publish(version)
        assert (
            self.lived[-1] == version
            and self.count("repeated") == repeated
            and self.groups[-1] == len(self.members)
        )

    def count(self, name: str) -> float:
        return self.coordinator.weight_metrics()[f"weights/{name}"]


@pytest.fixture
def start(control: Control, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Builds a run that serves version 0; at the end its sender is closed and its children are
    gone.
    """
    runs: list[Run] = []
    members: list[Handle] = []

    async def build(**settings: Any) -> Run:
        runs.append(run := Run(control, tmp_path, **settings))
        members.extend(run.members)
        await run.coordinator.start(0)
        return run

    yield build
    control.inject()
    for run in runs:
        if run.process._parts.sender._engine is not None:
            run.process._parts.sender._engine.shutdown()
    for engine in members:
        if isinstance(engine.front.worker, ChildWorker):
            engine.front.worker.process.kill()
            engine.front.worker.process.join(10)


def fault(kind: str, rank: int = VICTIM_RANK, **details: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, **details}


slow = pytest.mark.slow


def cases(fast: list[tuple], *ranges: Iterable[Any]) -> list[Any]:
    """All combinations; those that are not `fast` are left to the long run."""
    return [
        pytest.param(*case, marks=[] if case in fast else slow)
        for case in itertools.product(*ranges)
    ]


@pytest.mark.parametrize(
    ("overlap", "rank", "kind", "bucket"),
    cases(
        [
            (True, VICTIM_RANK, "hang", 1),
            (False, VICTIM_RANK, "slow", 1),
            (True, 0, "hang", 1),
            (False, 0, "hang", 0),
        ],
        [True, False],
        [0, VICTIM_RANK],
        ["hang", "slow"],
        range(BUCKETS),
    ),
)
async def test_what_can_be_aborted_costs_a_repetition_and_nobody_is_dropped(
    start, overlap: bool, rank: int, kind: str, bucket: int
) -> None:
    run = await start(overlap=overlap)
    took = await run.publish(1, [fault(kind, rank, bucket=bucket, seconds=3 * BUCKET_S)])
    assert any(
        "weight sync v0.1 was cut off and is repeated" in note and "no bucket moved for" in note
        for note in run.notes
    )
    assert run.lived == [0, 1] and not run.dropped
    assert run.groups == [3, 3] and run.count("repeated") == 1, (
        "one torn, all torn: a new group, everything again"
    )
    assert took < attempt_s + LATE_S
    await run.goes_on(2)


@pytest.mark.parametrize(
    ("overlap", "bucket"), cases([(True, 1), (False, 0)], [True, False], range(BUCKETS))
)
async def test_a_worker_that_cannot_be_aborted_is_dropped_by_name(
    start, overlap: bool, bucket: int
) -> None:
    run = await start(overlap=overlap)
    took = await run.publish(1, [fault("stuck", bucket=bucket)])
    assert (
        list(run.dropped) == [VICTIM]
        and "a1 did not answer weight sync v0.1 within its deadline" in run.dropped[VICTIM]
    )
    assert run.lived == [0, 1] and run.groups == [3, 2] and run.count("dropped_engines") == 1
    assert took < attempt_s + LATE_S
    await run.goes_on(2)


@pytest.mark.parametrize(
    ("share", "rank", "verify"),
    [(0.4, 0, True), (0.4, VICTIM_RANK, False), pytest.param(0.7, VICTIM_RANK, False, marks=slow)],
)
async def test_slow_buckets_within_the_deadline_are_no_fault(
    start, share: float, rank: int, verify: bool
) -> None:
    run = await start(overlap=True, verify=verify)
    seconds = share * BUCKET_S / (2 if verify else 1)  # a checksum is a broadcast of its own
    took = await run.publish(1, [fault("slow", rank, seconds=seconds)])
    assert took > BUCKETS * share * BUCKET_S > BUCKET_S, (
        "together they take longer than one may, or this shows nothing"
    )
    assert (
        run.groups == [3] and run.count("repeated") == 0 and not run.dropped and run.lived == [0, 1]
    )


@pytest.mark.parametrize(
    ("overlap", "bucket"), cases([(False, 0), (True, BUCKETS - 1)], [True, False], range(BUCKETS))
)
async def test_a_process_that_dies_in_a_bucket_is_dropped_and_the_others_take_all_again(
    start, overlap: bool, bucket: int
) -> None:
    run = await start(overlap=overlap, children=[VICTIM])
    took = await run.publish(1, [fault("exit", bucket=bucket)])
    assert run.dropped == {VICTIM: "the engine is not healthy: EngineCore died"}
    assert run.lived == [0, 1] and run.groups == [3, 2] and took < attempt_s + LATE_S
    await run.goes_on(2)


@pytest.mark.parametrize(("overlap", "load"), cases([(True, 0)], [True, False], range(BUCKETS)))
async def test_a_receiver_that_hangs_outside_of_the_group_is_dropped(
    start, overlap: bool, load: int
) -> None:
    run = await start(overlap=overlap)
    run.members[1].front.worker.hang_at = load
    took = await run.publish(1)
    assert (
        list(run.dropped) == [VICTIM] and "did not answer weight sync v0.1" in run.dropped[VICTIM]
    )
    assert (
        run.lived == [0, 1]
        and run.groups == ([3, 2] if load < BUCKETS - 1 else [3])
        and took < ACKNOWLEDGE_S + attempt_s + LATE_S
    )
    await run.goes_on(2)


@pytest.mark.parametrize(
    ("overlap", "phase"),
    cases([(False, "pause"), (True, "resume")], [True, False], ["pause", "resume"]),
)
async def test_an_engine_that_never_pauses_or_never_resumes_is_dropped(
    start, overlap: bool, phase: str
) -> None:
    run = await start(overlap=overlap)
    run.members[1].front.stops_at = phase
    took = await run.publish(1)
    assert run.dropped == {
        VICTIM: f"the engine's {phase} took longer than weight_sync.deadlines.{phase}_s = 0.5 s"
    }
    assert run.lived == [0, 1] and took < attempt_s + LATE_S
    await run.goes_on(2)


@pytest.mark.parametrize(("broadcast",), cases([(1,), (4,)], range(2 * BUCKETS)))
async def test_a_wrong_byte_or_checksum_ends_the_run_and_is_not_served(
    start, broadcast: int
) -> None:
    """Even broadcasts are buckets, odd ones their checksums."""
    run = await start(overlap=True, verify=True)
    started = time.monotonic()
    with pytest.raises(
        TransferMismatch,
        match=f"engine {VICTIM}: bucket {broadcast // 2 + 1} of the weights .* it holds w",
    ) as raised:
        await run.publish(1, [fault("corrupt", bucket=broadcast)])
    assert raised.value.exit_code == 6 and run.lived == [0] and run.groups == [3]
    assert time.monotonic() - started < attempt_s + LATE_S
    assert run.members[1].engine.serving == "v0.0" and run.members[1].front.paused
    for engine in run.members:
        assert engine.front.paused or bit_equal(
            await engine.front.contents(), run.truth[engine.engine.serving]
        )


async def test_without_checksums_the_comparison_of_these_tests_finds_a_wrong_byte(start) -> None:
    run = await start(overlap=True)
    with pytest.raises(
        AssertionError, match=r"an engine goes on with other weights than v0.1|holds other bytes"
    ):
        await run.publish(1, [fault("corrupt", bucket=1)])
        assert not run.dropped, run.dropped


async def test_an_engine_that_dies_in_the_rendezvous_is_dropped(start) -> None:
    run = await start(overlap=True, children=[VICTIM])
    run.members.pop(0)  # so that a new group is needed
    victim = run.members[0]

    async def die(payload: dict[str, Any]) -> Receipt:
        victim.front.worker.process.kill()
        return await victim.engine.connect(payload)

    victim.connect = die
    took = await run.publish(1)
    assert run.dropped == {VICTIM: "the engine is not healthy: EngineCore died"}
    assert run.groups == [3, 2, 1] and run.lived == [0, 1] and took < 2 * attempt_s + LATE_S
    await run.goes_on(2)


@pytest.mark.parametrize(("overlap",), cases([(True,)], [True, False]))
async def test_a_second_fault_in_the_repetition_is_met_like_the_first(start, overlap: bool) -> None:
    run = await start(overlap=overlap)
    took = await run.publish(1, [fault("hang", bucket=1)], [fault("stuck", 3, bucket=1)])
    assert (
        list(run.dropped) == ["a2"]
        and run.groups == [3, 3, 2]
        and run.lived == [0, 1]
        and run.count("repeated") == 2
    )
    assert took < 2 * attempt_s + LATE_S


@pytest.mark.parametrize(("overlap",), cases([(False,)], [True, False]))
async def test_after_three_faults_the_run_ends_and_nobody_goes_on_with_a_part(
    start, overlap: bool
) -> None:
    run = await start(overlap=overlap)
    with pytest.raises(
        Stalled, match=r"weight sync v0\.1 was cut off 3 times: .*no bucket moved"
    ) as raised:
        await run.publish(1, *[[fault("hang", bucket=1)]] * 3)
    assert raised.value.exit_code == 5 and run.lived == [0]
    assert all(engine.front.paused for engine in run.members)


@slow
@pytest.mark.parametrize("overlap", [True, False])
async def test_a_sender_that_cannot_be_aborted_ends_the_run_within_its_deadline(
    start, overlap: bool
) -> None:
    run = await start(overlap=overlap)
    started = time.monotonic()
    with pytest.raises(RunError) as raised:
        await run.publish(1, [fault("stuck", 0, bucket=1)])
    assert isinstance(raised.value, FaultBudgetSpent), raised.value
    assert time.monotonic() - started < ACKNOWLEDGE_S + attempt_s + LATE_S and run.lived == [0]


@pytest.mark.parametrize(("overlap",), cases([(True,)], [True, False]))
async def test_a_newcomer_during_a_torn_publication_waits_for_its_group(
    start, overlap: bool
) -> None:
    run = await start(overlap=overlap)
    newcomer = Handle(run, "b0")
    publishing = asyncio.create_task(run.publish(1, [fault("hang", bucket=1)]))
    await asyncio.sleep(0.5)
    await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    await publishing
    assert run.lived == [0, 1] and not run.dropped
    assert newcomer not in run.coordinator.serving() and newcomer.engine.serving == ""
    run.owner.change(2)
    await run.coordinator.refresh(1)
    assert (
        newcomer in run.coordinator.serving()
        and newcomer.engine.serving == "v0.1"
        and run.lived == [0, 1, 1]
    )
    await run.goes_on(2)
    assert newcomer.engine.serving == "v0.2"


async def test_when_the_last_engine_dies_one_that_joins_late_takes_the_weights(start) -> None:
    run = await start(overlap=True, engines=1, children=["a0"])
    await run.publish(1, [fault("exit", 1, bucket=0)])
    assert list(run.dropped) == ["a0"] and not run.members
    late = Handle(run, "b0")
    await run.coordinator.join(late, lambda: run.members.append(late))
    await run.publish(2)
    assert late.engine.serving == "v0.2" and run.lived[-1] == 2


@slow
@pytest.mark.timeout(1200)
async def test_random_faults_never_leave_a_mixture_nor_wait_for_ever(start) -> None:
    """A hundred weight syncs with zero to two faults of random kinds, ranks and buckets; the dead
    are replaced.
    """
    rng, names = random.Random(time.time_ns()), (f"b{number}" for number in itertools.count())
    run = await start(overlap=True, verify=True)
    for version in range(1, 101):
        size = len(run.members)
        plan = [
            [
                fault(
                    rng.choice(["hang", "stuck", "slow"]),
                    rng.randint(1, size),
                    bucket=rng.randrange(2 * BUCKETS),
                    seconds=rng.choice([0.2, 3.0]),
                )
            ]
            for _ in range(rng.randrange(3))
        ]
        took = await run.publish(version, *plan, [])
        assert run.lived[-1] == version and took < 2 * attempt_s + LATE_S, plan
        while len(run.members) < 3:
            newcomer = Handle(run, next(names))
            await run.coordinator.join(
                newcomer, lambda newcomer=newcomer: run.members.append(newcomer)
            )
        await run.coordinator.refresh(version)
        assert all(engine.engine.serving == f"v0.{version}" for engine in run.members), plan


async def test_an_engine_that_is_away_takes_part_and_keeps_its_weights(start) -> None:
    """Real transfer engines: the broadcast needs it, and it serves the first one after its
    return.
    """
    run = await start(overlap=True)
    formed = len(run.groups)
    async with run.coordinator.pinned() as pin:
        away = pin.engine
        before = await away.front.contents()
        await run.publish(1)
        assert away.engine.serving == "v0.0" and not away.front.paused
        assert bit_equal(await away.front.contents(), before)
    run.owner.change(2)
    await run.publish(2)
    assert away.engine.serving == "v0.2" and len(run.groups) == formed
    assert bit_equal(await away.front.contents(), run.truth["v0.2"])


async def test_deltas_bring_every_bit_while_engines_come_go_are_away_and_are_cut_off(start) -> None:
    """Every engine that goes on is compared bit for bit (`FrontEnd`, `Run.live`); all weights are
    sent to new groups only.
    """
    run = await start(overlap=True, verify=True, delta="always")
    run.owner.share = 0.01
    formed = {0}
    for version in range(1, 41):
        cut_off = version in (8, 29)
        if version in (5, 20):
            newcomer = Handle(run, f"b{version}")
            await run.coordinator.join(newcomer, lambda one=newcomer: run.members.append(one))
            formed.add(version)
        if version == 13:
            await run.drop("a0", RuntimeError("preempted"))
            formed.add(version)
        if version == 25:
            pinned = run.coordinator.pinned()
            away = (await pinned.__aenter__()).engine
            before = await away.front.contents()
        took = await run.publish(version, *([[fault("hang", bucket=0)], []] if cut_off else []))
        assert run.lived[-1] == version and took < attempt_s + LATE_S
        if version == 33:
            assert bit_equal(await away.front.contents(), before)
            await pinned.__aexit__(None, None, None)
    assert len(run.members) == 4 and all(one.engine.serving == "v0.40" for one in run.members)
    assert run.count("repeated") == 2 and list(run.dropped) == ["a0"]
    whole = {label for label, payload in run.announced.items() if "delta" not in payload}
    assert whole == {f"v0.{version}" for version in formed}
    assert len(run.groups) == len(formed) + 2, "after a cut, all of it goes to a new group"
