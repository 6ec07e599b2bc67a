"""One real engine through the real coordinator: torn and wrong publications, other names, weights
changed behind its back, a stopped process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError, TransferMismatch
from async_grpo.rollout.engine.base import Completion, EngineError, Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.shared_memory import SEGMENT_DIR, SegmentReader, SharedMemorySender
from async_grpo.weights.transport import Announcement, Receipt, Staged, TokenSequence
from tests.support.engine_weights import PROMPT, learner_logprobs, perturbed
from tests.support.listener import RecordingListener
from tests.support.models import ModuleOwner, write_model

PAUSE_S, ACKNOWLEDGE_S, LATE_S, START_S = 2.0, 5.0, 10.0, 120.0
RESPONSE = list(range(20, 60))
pytestmark = pytest.mark.timeout(200)


def config(directory: str, *, verify_every: int = 0) -> Config:
    deadlines = {"pause_s": PAUSE_S, "resume_s": PAUSE_S, "acknowledge_s": ACKNOWLEDGE_S}
    return Config.model_validate(
        {
            "run": {"total_steps": 9},
            "model": {"path": directory, "dtype": "float32"},
            "rollout": {"prompt_length": 32, "response_length": 100},
            "weight_sync": {
                "self_check": False,
                "verify_every": verify_every,
                "deadlines": deadlines,
            },
            "cluster": {"engine": {"max_num_seqs": 8}},
        }
    )


class Serving:
    """A real engine as the driver sees it, with its event loop in a thread."""

    actor_id, tensor_parallel_size = "a0", 1

    def __init__(self, directory: str) -> None:
        self.directory, self.loop = directory, asyncio.new_event_loop()
        self.model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
        self.announced: Callable[[Announcement], Announcement] | None = (
            None  # what the next publication becomes on its way
        )
        self.behind: dict[str, Any] | None = (
            None  # a publication that it takes after each of the run's, and tells nobody
        )
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        children = set(_children())
        start = VllmEngine.start(
            config(directory),
            model_dir=directory,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label="v0.0",
            seed=1,
        )
        self.engine = asyncio.run_coroutine_threadsafe(start, self.loop).result(START_S)
        [self.pid] = [
            pid
            for pid in set(_children()) - children
            if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()
        ]

    def ask(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        return await self.ask(self.engine.connect(payload))

    async def receive(self, announcement: Announcement) -> Receipt:
        if self.announced is not None:
            announcement, self.announced = self.announced(announcement), None
        receipt = await self.ask(self.engine.receive(announcement))
        if self.behind is not None:
            await self.ask(self.engine._llm.collective_rpc("take_publication", args=(self.behind,)))
        return receipt

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return [(PROMPT, RESPONSE, np.zeros(len(RESPONSE), np.float32))]

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        return await self.ask(self.engine.score(sequences))

    async def distance(self, model: torch.nn.Module) -> float:
        """Largest difference between log-probs of the engine and of this model; a paused engine
        gives none.
        """
        [(_, scored)] = await asyncio.wait_for(self.score([(PROMPT, RESPONSE)]), ACKNOWLEDGE_S)
        return float(
            np.abs(scored - learner_logprobs(model, PROMPT, np.array(RESPONSE), 1.0)).max()
        )

    def close(self) -> None:
        self.engine.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


def _children() -> list[int]:
    """Child processes of this one."""
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


class Learner:
    """The learner's side around the real sender. `after`: what happens to an announcement between
    staging and receiving.
    """

    def __init__(self, serving: Serving, sender: SharedMemorySender, owner: ModuleOwner) -> None:
        self.serving, self.sender, self.owner, self.metadata = serving, sender, owner, None
        self.after: Callable[[Announcement], Announcement] = lambda announcement: announcement

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        payloads = self.sender.connect("127.0.0.1", tensor_parallel_sizes)
        return (
            payloads
            if self.metadata is None
            else [{"metadata": self.metadata(payloads[0]["metadata"])}]
        )

    async def rendezvous(self) -> str:
        return ""

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        logprobs = [
            learner_logprobs(self.owner.model, prompt, np.array(response), 1.0)
            for prompt, response in sequences
        ]
        return Staged(self.after(self.sender.stage(label, verify=verify)), logprobs)

    async def send(self, announcement: Announcement) -> str:
        return ""


class Run:
    """A coordinator of the one engine; versions go on from those that the engine has served."""

    epochs = iter(range(1, 1000))

    def __init__(self, serving: Serving, scratch: Path, *, verify_every: int = 0) -> None:
        self.serving, self.owner = serving, ModuleOwner(serving.model)
        self.sender = SharedMemorySender(
            self.owner, key=f"test-{uuid.uuid4().hex[:8]}", fallback=scratch
        )
        self.learner = Learner(serving, self.sender, self.owner)
        self.members, self.lived, self.dropped, self.notes = [serving], [], {}, []
        self.coordinator = Coordinator(
            config(serving.directory, verify_every=verify_every),
            learner=self.learner,
            engines=self,
            backend="shared_memory",
            live=self.live,
            exact=True,
            listener=RecordingListener(self.notes),
            run_epoch=next(self.epochs),
        )

    def alive(self) -> tuple[Serving, ...]:
        return tuple(self.members)

    async def drop(self, actor_id: str, error: BaseException) -> None:
        self.members, self.dropped[actor_id] = [], error

    async def live(self, version: int, digest: str) -> None:
        self.lived.append(version)

    async def publish(self, version: int) -> torch.nn.Module:
        """Publish a model that differs visibly from all others; returns it."""
        self.owner.model = perturbed(self.serving.model, version)
        await self.coordinator.publish(version)
        await self.coordinator.wait()
        return self.owner.model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    yield from _engine(tmp_path_factory.mktemp("model"))


def _engine(directory: Path) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # tests send functions to the worker
        serving = Serving(write_model(directory, tied=True, ends=False))
        yield serving
        serving.close()


@pytest.fixture
def run(engine: Serving, tmp_path: Path) -> Iterator[Run]:
    yield from _run(engine, tmp_path, verify_every=0)


@pytest.fixture
def probed(engine: Serving, tmp_path: Path) -> Iterator[Run]:
    """A run that verifies and probes every publication."""
    yield from _run(engine, tmp_path, verify_every=1)


def _run(engine: Serving, tmp_path: Path, *, verify_every: int) -> Iterator[Run]:
    before = set(threading.enumerate())
    run = Run(engine, tmp_path, verify_every=verify_every)
    yield run
    engine.announced = engine.behind = None
    run.sender.close()
    assert not list(SEGMENT_DIR.glob(f"*{run.sender._key}*"))
    assert [
        thread.name for thread in set(threading.enumerate()) - before if not thread.daemon
    ] == []


async def paused(serving: Serving) -> bool:
    return await serving.ask(serving.engine._llm.is_paused())


def flip(position: float) -> Callable[[Announcement], Announcement]:
    """Change one byte of the segment, at this share of it."""

    def after(announcement: Announcement) -> Announcement:
        with open(announcement.payload["path"], "r+b") as file:
            file.seek(4096 + int(position * (announcement.nbytes - 64)))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x80]))
        return announcement

    return after


async def test_a_response_that_repeats_itself_ends(engine: Serving) -> None:
    """Greedy, a model of random weights says the same again and again."""
    prompt = [5, 6, 7]
    greedy = Sampling(n=1, max_tokens=90, temperature=0.0)
    [whole] = await engine.ask(engine.engine.generate(prompt, greedy))
    assert whole.finish_reason == "length" and len(whole.token_ids) == 90
    stops = replace(greedy, repetition=(40, 2))
    [cut] = await engine.ask(engine.engine.generate(prompt, stops))
    n, ids = len(cut.token_ids), cut.token_ids.tolist()
    assert cut.finish_reason == "repetition" and n < 90
    assert ids == whole.token_ids.tolist()[:n] and len(cut.logprobs) == n
    assert any(ids[-size:] == ids[-2 * size : -size] for size in range(1, 41))


async def test_a_prompt_that_is_scored_again_is_not_computed_again(
    engine: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of responses that begin alike no log-prob is left out."""
    prompt = [3 + number % 80 for number in range(70)]
    pairs = [(prompt, list(range(20, end))) for end in (60, 50, 24)] + [(prompt, [7, 8, 9])]
    counted, cached = engine.engine._counted, list[int]()
    final = counted.final

    async def watched(*arguments: Any) -> Any:
        output = await final(*arguments)
        cached.append(output.num_cached_tokens)
        return output

    monkeypatch.setattr(counted, "final", watched)
    wanted = [values for _, values in await engine.score(pairs)]
    assert cached == [0] * 4
    for _ in range(2):
        found = await engine.ask(engine.engine.top_logprobs(pairs, 2))
        for (values, ids), one in zip(found, wanted, strict=True):
            np.testing.assert_allclose(values[:, 0], one, atol=1e-5)
            assert ids.shape == (len(one), 2) and (values[:, 1] >= values[:, 2]).all()
    assert 64 in cached[4:] and 96 in cached[4:], "blocks of 32 tokens"


async def test_a_response_sleeps_with_its_engine_and_nothing_of_its_caches_is_left(
    run: Run,
) -> None:
    """As far as vLLM's sleep goes on CPU: requests are kept, caches dropped, and nothing resumes
    before all is awake; the memory stays.
    """
    serving, engine = run.serving, run.serving.engine
    await run.coordinator.start(0)
    greedy = Sampling(n=1, max_tokens=90, temperature=0.0)
    prompt = list(range(3, 3 + 70))
    [whole] = await serving.ask(engine.generate(prompt[:30], greedy))
    await serving.ask(engine.generate(prompt[:70], replace(greedy, max_tokens=1)))
    again = replace(greedy, max_tokens=1)
    [cached] = await serving.ask(engine.generate(prompt, again))
    assert cached.cached_tokens >= 64
    under_way = serving.ask(engine.generate(prompt[:30], greedy, name="sleeps"))
    while not (so_far := engine.so_far("sleeps")) or not len(so_far[0].token_ids):
        await asyncio.sleep(0.001)
    lost = await serving.ask(engine.sleep())
    assert lost >= 31 and await serving.ask(engine._llm.is_sleeping())
    tokens = len(engine.so_far("sleeps")[0].token_ids)
    queued = serving.ask(engine.generate(prompt, again))
    await asyncio.sleep(0.3)
    assert len(engine.so_far("sleeps")[0].token_ids) == tokens < 90 and not queued.done()
    await serving.ask(engine.wake())
    [rest] = await asyncio.wait_for(under_way, LATE_S)
    assert rest.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(rest.logprobs, whole.logprobs, atol=1e-4)
    [fresh] = await asyncio.wait_for(queued, LATE_S)
    assert fresh.cached_tokens == 0, "what others had computed before is gone"


async def test_weights_that_come_while_an_engine_sleeps_are_those_that_it_wakes_with(
    run: Run,
) -> None:
    serving, engine = run.serving, run.serving.engine
    await run.coordinator.start(0)
    before = await run.publish(1)
    greedy = Sampling(n=1, max_tokens=90, temperature=0.0)
    under_way = serving.ask(engine.generate(PROMPT, greedy, name="waits"))
    while not (so_far := engine.so_far("waits")) or not len(so_far[0].token_ids):
        await asyncio.sleep(0.001)
    await serving.ask(engine.sleep())
    tokens = len(engine.so_far("waits")[0].token_ids)
    after = await run.publish(2)
    assert not await serving.ask(engine._llm.is_sleeping())
    [response] = await asyncio.wait_for(under_way, LATE_S)
    [old, new] = response.versions
    assert (old.policy_version, old.end) == (1, tokens)
    assert (new.policy_version, new.end) == (2, 90)
    expected = learner_logprobs(after, PROMPT, response.token_ids, 1.0)
    assert np.abs(response.logprobs - expected)[tokens:].max() < 1e-3
    assert await serving.distance(after) < 1e-4 < 1e-2 < await serving.distance(before)
    await serving.ask(engine.sleep())
    await serving.ask(engine.wake())
    assert await serving.distance(after) < 1e-4


async def test_an_engine_with_a_torn_load_sleeps_and_does_not_wake_before_a_whole_one(
    run: Run,
) -> None:
    serving, engine = run.serving, run.serving.engine
    await run.coordinator.start(0)
    await serving.ask(engine.sleep())
    await serving.ask(engine._llm.collective_rpc(cut_next_load, args=(5,)))
    announcement = run.sender.stage(run.coordinator._label(1), verify=False)
    receipt = await serving.receive(announcement)
    assert receipt.failure == "torn"
    await serving.ask(engine.sleep())
    await serving.ask(engine.wake())
    assert engine.paused and await paused(serving)
    model = await run.publish(2)
    assert await serving.distance(model) < 1e-4


async def test_tokens_come_many_at_a_time_and_all_of_them_at_a_pause(
    engine: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end's work is by output: were each token one, it would have 720 here."""
    ours, n, length = engine.engine, 8, 90
    processor, speeds, old = ours._llm.output_processor, ours._counted.speeds, ours.serving
    process, stepped = processor.process_outputs, speeds.stepped
    outputs = sampled = 0

    def processed(found: list[Any], *rest: Any, **more: Any) -> Any:
        nonlocal outputs
        outputs += len(found)
        return process(found, *rest, **more)

    def counted(tokens: int, **more: Any) -> None:
        nonlocal sampled
        sampled += tokens
        stepped(tokens, **more)

    monkeypatch.setattr(processor, "process_outputs", processed)
    monkeypatch.setattr(speeds, "stepped", counted)

    async def scenario() -> tuple[dict[int, int], list[Completion]]:
        sampling = Sampling(n=n, max_tokens=length, temperature=1.0)
        task = asyncio.ensure_future(ours.generate([5, 6, 7], sampling, name="many"))
        while sampled < n * 40:
            await asyncio.sleep(0.001)
        await ours._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        begun = {at: len(one.token_ids) for at, one in ours.so_far("many").items()}
        assert sum(begun.values()) == sampled, "a pause leaves nothing behind"
        await ours._set_label("v0.7")
        await ours._llm.resume_generation()
        return begun, await task

    try:
        begun, responses = await asyncio.wait_for(engine.ask(scenario()), LATE_S)
    finally:
        await engine.ask(ours._set_label(old))
    for at, response in enumerate(responses):
        assert response.labels == [(old, 0, begun[at]), ("v0.7", begun[at], length)]
    assert sampled == n * length and outputs < n * length / 8


async def test_a_flipped_byte_ends_the_run_and_the_engine_stays_paused(probed: Run) -> None:
    await probed.coordinator.start(0)
    label = probed.serving.engine.serving
    probed.learner.after = flip(0.5)
    with pytest.raises(
        TransferMismatch,
        match=r"engine a0: bucket 1 of 1 .* with other bytes than were sent; it holds model.embed",
    ) as raised:
        await probed.publish(1)
    assert raised.value.exit_code == 6 and probed.lived == [0]
    assert probed.serving.engine.serving == label and await paused(probed.serving), (
        "it serves nothing new, and nothing at all"
    )


async def test_an_honest_segment_passes_the_same_comparison(probed: Run) -> None:
    await probed.coordinator.start(0)
    model = await probed.publish(1)
    assert probed.lived == [0, 1] and not await paused(probed.serving)
    assert await probed.serving.distance(model) < 1e-4
    assert await probed.serving.distance(probed.serving.model) > 1e-3


@pytest.mark.parametrize("tear", ["before", "middle"])
async def test_of_a_torn_load_nothing_remains(run: Run, tear: str) -> None:
    """The segment holds another write than was announced, or has been written after a part was
    loaded.
    """
    await run.coordinator.start(0)
    if tear == "middle":
        await run.serving.ask(run.serving.engine._llm.collective_rpc(cut_next_load, args=(5,)))
    else:
        run.serving.announced = lambda one: replace(
            one, payload=one.payload | {"sequence": one.payload["sequence"] + 2}
        )
    model = await run.publish(1)
    [note] = run.notes
    assert (
        "weight sync" in note
        and "was cut off and is repeated: a0: " in note
        and ("write" in note if tear == "before" else "meanwhile" in note)
    )
    assert (
        run.lived == [0, 1]
        and not run.dropped
        and run.coordinator.weight_metrics()["weights/repeated"] == 1
    )
    assert await run.serving.distance(model) < 1e-4
    assert await run.serving.distance(run.serving.model) > 1e-3


def cut_next_load(worker: Any, tensors: int) -> None:
    """Inside the worker: the next load sees the write change after so many tensors."""
    from async_grpo.weights.transport import TornTransfer

    reader = worker.weight_transfer_engine._reader
    whole = type(reader).tensors

    def cut(path: str, sequence: int, checksums: list[int]) -> Any:
        del reader.tensors
        for number, pair in enumerate(whole(reader, path, sequence, checksums)):
            if number == tensors:
                raise TornTransfer("the segment was written meanwhile")
            yield pair

    reader.tensors = cut


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda names: names[:-1], "missing: model.norm.weight"),
        (lambda names: [*names, ["model.extra", [3], "float32"]], "extra: model.extra"),
        (lambda names: [*names, ["b.lora_A.weight", [4, 64], "float32"]], "extra: b.lora_A"),
        (lambda names: [*names, names[0]], "twice: model.embed_tokens.weight"),
        (
            lambda names: [[names[0][0], [7, 7], "float32"], *names[1:]],
            r"of another shape: model.embed_tokens.weight \(7, 7\) instead of",
        ),
    ],
    ids=["missing", "extra", "factor", "twice", "shape"],
)
async def test_other_names_or_shapes_end_the_run_with_the_list(
    run: Run, change: Callable[[list], list], says: str
) -> None:
    run.learner.metadata = change
    with pytest.raises(
        SetupError,
        match=f"engine a0: the learner's tensors are not those that the engine loads .*{says}",
    ) as raised:
        await run.coordinator.start(0)
    assert raised.value.exit_code == 2 and not run.lived


async def test_the_drift_alarm_finds_weights_that_changed_behind_the_back(
    probed: Run, tmp_path: Path
) -> None:
    await probed.coordinator.start(0)
    await probed.publish(1)
    await until_probed(probed)
    await probed.coordinator.refresh(1)  # an honest engine raises no alarm
    other = SharedMemorySender(
        ModuleOwner(perturbed(probed.serving.model, 77)),
        key=f"test-{uuid.uuid4().hex[:8]}",
        fallback=tmp_path,
    )
    try:
        other.connect("127.0.0.1", [1])
        probed.serving.behind = other.stage("nobody", verify=False).payload
        await probed.publish(2)
        await until_probed(probed)
    finally:
        other.close()
    with pytest.raises(
        TransferMismatch,
        match=r"engine a0 does not compute with the weights v\d+\.2 that it acknowledged: "
        r"log-probs differ",
    ):
        await probed.coordinator.refresh(2)


async def until_probed(run: Run) -> None:
    """The probes of the last weight sync have been answered."""
    async with asyncio.timeout(ACKNOWLEDGE_S):
        while run.coordinator._probe._asking:
            await asyncio.sleep(0.01)


def at(serving: Serving, phase: str, action: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Do something to the engine's process before it is asked to pause, to load or to go on."""
    llm = serving.engine._llm
    owner, name = {
        "pause": (llm.engine_core, "pause_scheduler_async"),
        "load": (llm, "collective_rpc"),
        "resume": (llm, "resume_generation"),
    }[phase]
    real = getattr(owner, name)

    async def call(*args: Any, **kwargs: Any) -> Any:
        if phase != "load" or args[0] == "take_publication":
            action()
        return await real(*args, **kwargs)

    patch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ("pause", "the engine's pause took longer than weight_sync.deadlines.pause_s = 2 s"),
        ("load", "a0 did not answer weight sync v"),
        ("resume", "the engine's resume took longer than weight_sync.deadlines.resume_s = 2 s"),
    ],
)
async def test_a_stopped_process_is_dropped_within_its_deadline(
    run: Run, phase: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.coordinator.start(0)
    at(run.serving, phase, lambda: os.kill(run.serving.pid, signal.SIGSTOP), monkeypatch)
    started = time.monotonic()
    try:
        await run.publish(1)
    finally:
        os.kill(run.serving.pid, signal.SIGCONT)
    assert time.monotonic() - started < ACKNOWLEDGE_S + LATE_S
    assert list(run.dropped) == ["a0"] and str(run.dropped["a0"]).startswith(says)
    assert run.coordinator.weight_metrics()["weights/dropped_engines"] == 1 and not run.notes, (
        "it is not repeated for one that is gone"
    )


async def test_a_newcomer_is_checked_while_the_run_publishes(tmp_path: Path) -> None:
    sender = SharedMemorySender(
        ModuleOwner(torch.nn.Linear(4, 3)), key=f"test-{uuid.uuid4().hex[:8]}", fallback=tmp_path
    )
    try:
        [payload] = sender.connect("127.0.0.1", [1])
        check = sender.stage("self-check", verify=True, apart=True)
        sender.stage("v0.1", verify=False)
        assert [
            name for name, _ in SegmentReader(payload["metadata"]).tensors(**check.payload)
        ] == ["weight", "bias"]
    finally:
        sender.close()


async def killed_in(run: Run, phase: str, patch: pytest.MonkeyPatch) -> None:
    await run.coordinator.start(0)
    at(run.serving, phase, lambda: os.kill(run.serving.pid, signal.SIGKILL), patch)
    started = time.monotonic()
    await run.publish(1)
    assert time.monotonic() - started < ACKNOWLEDGE_S + LATE_S
    assert list(run.dropped) == ["a0"] and run.lived == [0, 1], (
        "without an engine the version is live, and a newcomer starts with it"
    )


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["pause", "resume"])
async def test_a_killed_process_is_dropped_in_every_phase(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = _engine(tmp_path / "model")
    serving = next(engines)
    runs = _run(serving, tmp_path, verify_every=0)
    await killed_in(next(runs), phase, monkeypatch)
    assert [*runs, *engines] == []


async def test_a_process_that_is_killed_while_it_loads_is_dropped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the shared engine."""
    await killed_in(run, "load", monkeypatch)
    assert (
        isinstance(run.dropped["a0"], EngineError)
        or "EngineDead" in type(run.dropped["a0"]).__name__
    ), run.dropped
