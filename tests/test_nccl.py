"""The `nccl` path: our sender and vLLM's engines on both sides; on CPU over the doubles of tests/nccl_double.py."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.engine import Engine, Sampling
from async_grpo.weights.base import WeightOwner, version_label
from tests import nccl_double
from tests.learner_case import free_port
from tests.models import ModuleOwner, write_model
from tests.nccl_double import Aborted, Control, GlooCommunicator
from tests.test_inflight import learner_logprobs, perturbed

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEADLINE_S, START_S = 30.0, 90.0
BUFFER_BYTES = 64 * 1024
"""Packs of this size make several chunks of the test model."""
PROMPT = list(range(5, 17))
pytestmark = [pytest.mark.timeout(120), *([pytest.mark.gpu] if GPUS else [])]
only_doubles = pytest.mark.skipif(GPUS > 0, reason="about the doubles, which are not used where there are GPUs")


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with nccl_double.installed(tmp_path_factory.mktemp("nccl")) as control:
        yield control


@pytest.fixture(autouse=True)
def _clean(control: Control) -> None:
    control.clear()


def in_thread(work: Callable[[], Any], *, device: int = 0) -> Future:
    """Run `work` in a daemon thread whose current device is `device`."""
    future: Future = Future()

    def run() -> None:
        try:
            torch.accelerator.set_device_index(device)
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# -- the path: sender, real engine ------------------------------------------------------------------------------------


def make_sender(owner: WeightOwner) -> Any:
    """The one place that builds our sender."""
    from async_grpo.weights.gpu import NcclSender

    return NcclSender(owner)


def connect(sender: Any, sizes: list[int], *, packed: bool = True) -> list[dict[str, Any]]:
    """Connect, with the wire's settings of this test: both sides learn them from the sender."""
    payloads = sender.connect("127.0.0.1", sizes)
    settings = {"packed": packed, "packed_buffer_size_bytes": BUFFER_BYTES}
    for name, value in settings.items():
        setattr(sender._info, name, value)
    return [{**payload, **settings} for payload in payloads]


@dataclass
class Serving:
    """A real engine, its event loop in a thread, and the model that it loaded."""

    engine: Engine
    loop: asyncio.AbstractEventLoop
    model: torch.nn.Module

    def submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


@pytest.fixture(scope="module")
def serving(control: Control, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    if GPUS == 1:
        pytest.skip("sender and engine need a GPU each")
    directory = write_model(tmp_path_factory.mktemp("model"), tied=False, ends=False)
    config = Config.model_validate({
        "run": {"total_steps": 1}, "model": {"path": directory, "dtype": "float32"},
        "rollout": {"prompt_length": 32, "response_length": 100}, "cluster": {"engine": {"max_num_seqs": 8}},
    })
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    start = Engine.start(
        config, model_dir=directory, device="cuda" if GPUS else "cpu", backend="nccl", stop_token_ids=[], label=version_label(0), seed=1
    )
    engine = asyncio.run_coroutine_threadsafe(start, loop).result(START_S)
    try:
        yield Serving(engine, loop, AutoModelForCausalLM.from_pretrained(directory).float().eval())
    finally:
        engine.close()
        loop.call_soon_threadsafe(loop.stop)


def sender_device() -> int:
    """The engine is on GPU 0."""
    return 1 if GPUS else 0


def publish(sender: Any, serving: Serving, version: int) -> None:
    received = serving.submit(serving.engine.receive(sender.stage(version_label(version))))
    sent = in_thread(sender.send, device=sender_device())
    sent.result(DEADLINE_S)
    received.result(DEADLINE_S)


def assert_serves(serving: Serving, version: int, models: dict[int, torch.nn.Module]) -> None:
    """Log-probs of fresh tokens are those of the version's model, and not those of the one before."""
    completions = serving.submit(serving.engine.generate(PROMPT, Sampling(n=2, max_tokens=60, temperature=0.8))).result(DEADLINE_S)
    for completion in completions:
        assert [span.policy_version for span in completion.versions] == [version]
        now, before = (learner_logprobs(models[v], PROMPT, completion.token_ids, 0.8) for v in (version, version - 1))
        assert np.abs(completion.logprobs - now).max() < 1e-4
        assert np.abs(completion.logprobs - before).mean() > 1e-3


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_publications_reach_a_real_engine(serving: Serving, control: Control, packed: bool) -> None:
    device = f"cuda:{sender_device()}" if GPUS else "cpu"
    models = {0: serving.model, 1: perturbed(serving.model, 1), 2: perturbed(serving.model, 2)}
    owner = ModuleOwner(serving.model)
    owner.device = device
    sender = make_sender(owner)
    try:
        [payload] = connect(sender, [1], packed=packed)
        joined = serving.submit(serving.engine.connect(payload))
        in_thread(sender.rendezvous, device=sender_device()).result(DEADLINE_S)
        joined.result(DEADLINE_S)
        for version in (1, 2):
            owner.model = copy.deepcopy(models[version]).to(device)
            publish(sender, serving, version)
            assert_serves(serving, version, models)
    finally:
        sender.close()
    if not GPUS:
        ends = control.events("end", rank=1)
        tensors = len(owner.weight_metadata())
        assert 2 * 3 <= len(ends) <= tensors if packed else len(ends) == 2 * tensors
        assert {e.pid for e in ends}.isdisjoint({e.pid for e in control.events("end", rank=0)})


# -- the doubles themselves -------------------------------------------------------------------------------------------


def communicators(count: int) -> list[GlooCommunicator]:
    """A group of `count` ranks in this process."""
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    port = free_port()
    futures = [in_thread(lambda rank=rank: stateless_init_process_group("127.0.0.1", port, rank, count, rank)) for rank in range(count)]
    return [future.result(DEADLINE_S) for future in futures]


@only_doubles
def test_a_broadcast_is_asynchronous_at_the_root_and_in_order(control: Control) -> None:
    root, *others = communicators(3)
    assert isinstance(root, GlooCommunicator)
    control.inject({"kind": "slow", "rank": 0, "bucket": 0, "seconds": 0.3})
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sent = [torch.full((5,), float(number)) for number in range(4)]
    started = time.monotonic()
    for number, tensor in enumerate(sent):
        with torch.cuda.stream(streams[number % 2]):
            root.broadcast(tensor, src=0)
    assert time.monotonic() - started < 0.2 and not streams[0].query()
    received = [[torch.empty(5) for _ in sent] for _ in others]
    futures = [in_thread(lambda c=c, into=into: [c.broadcast(t, src=0) for t in into], device=c.rank) for c, into in zip(others, received, strict=True)]
    for future in futures:
        future.result(DEADLINE_S)
    for stream in streams:
        stream.synchronize()
    assert all(torch.equal(a, b) for into in received for a, b in zip(into, sent, strict=True))
    times = [(e.event, e.bucket) for e in control.events(rank=0) if e.event in ("begin", "end")]
    assert times == [(event, bucket) for bucket in range(4) for event in ("begin", "end")]


@only_doubles
@pytest.mark.parametrize("blocked", ["root", "receiver"])
def test_abort_ends_a_blocked_broadcast(control: Control, blocked: str) -> None:
    root, receiver = communicators(2)
    stream, tensor = torch.cuda.Stream(), torch.zeros(3)
    if blocked == "root":
        root.broadcast(tensor, src=0, stream=stream)
        waiting = in_thread(stream.synchronize)
        victim = root
    else:
        waiting, victim = in_thread(lambda: receiver.broadcast(tensor, src=0), device=1), receiver
    time.sleep(0.2)
    assert not waiting.done()
    started = time.monotonic()
    victim.destroy()
    with pytest.raises(Aborted):
        waiting.result(DEADLINE_S)
    assert time.monotonic() - started < 1
    assert victim.disabled and not victim.available
    victim.broadcast(tensor, src=0)  # does nothing, as vLLM's
    assert control.events("abort", rank=victim.rank)


@only_doubles
def test_faults(control: Control) -> None:
    root, receiver = communicators(2)
    stream = torch.cuda.Stream()

    def publish() -> list[torch.Tensor]:
        for number in range(2):
            root.broadcast(torch.full((4,), 1.0 + number), src=0, stream=stream)
        received = [torch.zeros(4), torch.zeros(4)]
        in_thread(lambda: [receiver.broadcast(t, src=0) for t in received], device=1).result(DEADLINE_S)
        stream.synchronize()
        return received

    control.inject({"kind": "corrupt", "rank": 1, "bucket": 1})
    good, bad = publish()
    assert good.tolist() == [1.0] * 4 and bad.tolist() != [2.0] * 4
    control.inject()
    assert [t.tolist() for t in publish()] == [[1.0] * 4, [2.0] * 4]
    control.inject({"kind": "hang", "rank": 1, "bucket": 1}, {"kind": "quiet_abort", "rank": 0})
    waiting = in_thread(publish)
    time.sleep(0.3)
    assert not waiting.done()
    receiver.destroy()
    with pytest.raises(Aborted):
        waiting.result(DEADLINE_S)
    assert not stream.query(), "the root is not told of the abort"
    root.destroy()
    stream.synchronize()
    with pytest.raises(ValueError, match="no fault"):
        control.inject({"kind": "nonsense"})


@only_doubles
def test_a_peer_that_died_leaves_the_others_hanging_until_they_abort(control: Control) -> None:
    port = free_port()
    control.inject({"kind": "exit", "rank": 1, "bucket": 0})
    process = get_context("spawn").Process(target=_join_and_receive, args=(port,), daemon=True)
    process.start()
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    root = stateless_init_process_group("127.0.0.1", port, 0, 2, 0)
    stream = torch.cuda.Stream()
    root.broadcast(torch.zeros(3), src=0, stream=stream)
    process.join(DEADLINE_S)
    assert process.exitcode == 17
    time.sleep(0.2)
    assert not stream.query()
    root.destroy()
    with pytest.raises(Aborted):
        stream.synchronize()


def _join_and_receive(port: int) -> None:
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    nccl_double.install()
    stateless_init_process_group("127.0.0.1", port, 1, 2, 0).broadcast(torch.zeros(3), src=0)
