"""The `nccl` path: our sender and vLLM's engines on both sides; on CPU over the doubles of
tests/support/nccl_over_gloo.py.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config, Deadlines
from async_grpo.errors import TransferMismatch
from async_grpo.rollout.engine.base import EngineError, Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.transport import Announcement, TornTransfer, Version, merged_payloads
from tests.support import nccl_over_gloo
from tests.support.engine_weights import learner_logprobs, perturbed
from tests.support.learners import run_ranks, set_rank
from tests.support.models import ModuleOwner, write_model
from tests.support.nccl_over_gloo import ABORT_WAIT_S, Aborted, Control, GlooCommunicator
from tests.support.nccl_sides import (
    BUFFER_BYTES,
    GPUS,
    MixedModel,
    Receiver,
    bit_equal,
    in_thread,
    make_sender,
)
from tests.support.processes import free_port

if TYPE_CHECKING:
    from async_grpo.learner.learner import Learner

DEADLINE_S, START_S = 30.0, 120.0
PROMPT = list(range(5, 17))
pytestmark = [pytest.mark.timeout(200), *([pytest.mark.gpu] if GPUS else [])]
only_doubles = pytest.mark.skipif(
    GPUS > 0, reason="about the doubles, which are not used where there are GPUs"
)


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with nccl_over_gloo.installed(tmp_path_factory.mktemp("nccl")) as control:
        yield control


@pytest.fixture(autouse=True)
def _clean(control: Control) -> None:
    control.clear()


# -- several ranks on either side
# ------------------------------------------------------------------------


@pytest.mark.skipif(GPUS in range(1, 4), reason="needs four GPUs")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_every_worker_of_every_engine_has_its_rank_and_receives_all(
    control: Control, packed: bool, tmp_path: Path
) -> None:
    owner = ModuleOwner(MixedModel().to("cuda:0" if GPUS else "cpu"))
    owner.device = "cuda:0" if GPUS else "cpu"
    save_file(owner.model.state_dict(), tmp_path / "model.safetensors")
    sender = make_sender(owner, packed=packed, deadlines=Deadlines(pause_s=0.5, bucket_s=2.0))
    try:
        one, two = sender.connect("127.0.0.1", [1, 2])
        [first], [second] = one["groups"], two["groups"]
        assert (first["rank_offset"], second["rank_offset"]) == (1, 2)
        assert first["world_size"] == second["world_size"] == 4
        receivers = [
            Receiver(one, tmp_path),
            Receiver(two, tmp_path, size=2),
            Receiver(two, tmp_path, rank=1, size=2),
        ]
        joined = [receiver.join() for receiver in receivers]
        for future in (in_thread(sender.rendezvous), *joined):
            future.result(DEADLINE_S)
        assert [receiver.engine.model_update_group.rank for receiver in receivers] == [1, 2, 3]
        for version in (1, 2):
            with torch.no_grad():
                for parameter in owner.model.parameters():
                    parameter.add_(version)
            wanted = {name: tensor.cpu().clone() for name, tensor in owner.named_weights()}
            announcement = sender.stage(Version(0, version).label, verify=version == 2)
            receiving = [receiver.receive(announcement.payload) for receiver in receivers]
            for future in (in_thread(sender.send), *receiving):
                future.result(DEADLINE_S)
            assert all(bit_equal(receiver.received, wanted) for receiver in receivers)
        if not GPUS:
            check_that_a_flipped_bit_is_seen(control, sender, receivers, wanted)
    finally:
        sender.close()


def check_that_a_flipped_bit_is_seen(
    control: Control, sender: Any, receivers: list[Receiver], wanted: dict[str, torch.Tensor]
) -> None:
    """The comparison above can fail, only the rank with the fault is hit, and where checksums
    follow the buckets it loads nothing of it.
    """
    for verify in (False, True):
        control.inject(
            {"kind": "corrupt", "rank": 2, "bucket": 2}
        )  # the third tensor or pack; with checksums between them, the second
        announcement = sender.stage(Version(0, 3).label, verify=verify)
        receiving = [receiver.receive(announcement.payload) for receiver in receivers]
        sent = in_thread(sender.send)
        failures = [future.exception(DEADLINE_S) for future in receiving]
        if not verify:
            assert failures == [None] * 3 and sent.result(DEADLINE_S) == ""
            assert [bit_equal(receiver.received, wanted) for receiver in receivers] == [
                True,
                False,
                True,
            ]
    assert sent.result(DEADLINE_S).startswith("the learner's half: no bucket moved"), (
        "who found it takes no more part, so the others are cut off"
    )
    assert isinstance(failures[0], TornTransfer) and isinstance(failures[2], TornTransfer)
    assert isinstance(
        failures[1], TransferMismatch
    ) and "bucket 2 of the weights arrived with other bytes than were sent" in str(failures[1])
    assert list(receivers[1].received) and set(receivers[1].received).isdisjoint(
        str(failures[1]).split("it holds ")[1].split(", ")
    )


class WatchedOwner:
    """A learner as the sender sees it, that notes when each tensor was gathered and how many bytes
    were whole at that moment.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner, self.rank, self.device = learner, learner.rank, learner.device
        self.world_size = learner.world_size
        self.sharded = learner.sharded
        self.gathered: list[tuple[str, float]] = []
        self.most_live = 0

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        return self.learner.published.weight_metadata()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.learner.published.named_weights():
            self.gathered.append((name, time.monotonic()))
            self.most_live = max(self.most_live, self.live())
            yield name, tensor

    def live(self) -> int:
        """Bytes of parameters that this rank holds whole."""
        parameters = list(self.learner.policy.module.parameters())
        assert all(hasattr(parameter, "ds_status") for parameter in parameters)
        return sum(
            p.ds_numel * p.element_size() for p in parameters if p.ds_status.name == "AVAILABLE"
        )

    def total(self) -> int:
        return sum(p.ds_numel * p.element_size() for p in self.learner.policy.module.parameters())


def overlapped(owner: WatchedOwner, ends: list[float]) -> list[bool]:
    """Per packed bucket but the last: whether the first tensor of the next one was gathered before
    this one's broadcast ended.
    """
    sizes = {
        name: int(np.prod(shape)) * getattr(torch, dtype).itemsize
        for name, shape, dtype in owner.weight_metadata()
    }
    firsts, held = [], BUFFER_BYTES + 1
    for name, moment in owner.gathered:
        if held > BUFFER_BYTES:
            firsts.append(moment)
            held = 0
        held += sizes[name]
    assert len(firsts) == len(ends) > 3
    return [first < end for first, end in zip(firsts[1:], ends, strict=False)]


def zero3_rank(rank: int, port: int, directory: str, scratch: str) -> None:
    """One of two learner ranks; rank 0's process also holds the receiver."""
    from async_grpo.learner import division, weights
    from async_grpo.learner.learner import Learner

    nccl_over_gloo.install()
    division.GATHER_BYTES = weights.GPU_GATHER_BYTES = BUFFER_BYTES // 2
    set_rank(rank, 2, port)
    if GPUS:  # a rank of a run sees its GPU alone; these see all, and DeepSpeed takes this one
        os.environ["LOCAL_RANK"] = str(rank)
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": directory, "dtype": "float32"},
            "rollout": {"prompt_length": 16, "response_length": 32},
            "learner": {
                "zero_stage": 3,
                "ranks": 2,
                "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
            },
        }
    )
    learner = Learner(
        config,
        model_dir=directory,
        fetch=lambda *_: b"",
        device=f"cuda:{rank}" if GPUS else "cpu",
        total_updates=1,
    )
    try:
        publish_from_zero3(learner, Control(Path(scratch)), directory)
    finally:
        learner.close()


def publish_from_zero3(learner: Learner, control: Control, directory: str) -> None:
    """Publish with two buffers, where gather and broadcast overlap, and with one, where they
    cannot.
    """
    from vllm.distributed.device_communicators import pynccl

    groups = dict(dist.distributed_c10d._world.pg_map)
    probe = [([5, 6, 7], [8, 9, 10])]
    before = learner.logprobs(probe)
    wanted = {name: tensor.cpu().clone() for name, tensor in learner.published.named_weights()}
    for buffers in (2, 1):
        owner = WatchedOwner(learner)
        sender = make_sender(owner, buffers=buffers)
        [payload] = sender.connect("127.0.0.1", [1])
        receiver = Receiver(payload, directory, device=2) if learner.rank == 0 else None
        futures = [receiver.join()] if learner.rank == 0 else []
        assert sender.rendezvous() == ""
        for future in futures:
            future.result(DEADLINE_S)
        announcement = sender.stage(Version(0, 1).label, verify=False)
        futures = [receiver.receive(announcement.payload)] if learner.rank == 0 else []
        assert sender.send() == ""
        for future in futures:
            future.result(DEADLINE_S)
        assert owner.live() == 0 and 0 < owner.most_live <= owner.total() / 3, (
            "too much of the model was whole on one rank"
        )
        if learner.rank == 0:
            assert bit_equal(receiver.received, wanted)
            if not GPUS:
                comm = control.events("init", rank=0)[-1].comm
                ends = [event.t for event in control.events("end", rank=0) if event.comm == comm]
                assert set(overlapped(owner, ends)) == {buffers == 2}
        else:  # before it sends a share, below
            assert not any(
                isinstance(one, pynccl.PyNcclCommunicator) for one in gc.get_objects()
            ), "only rank 0 has a communicator"
        sender.close()
    publish_shares_from_zero3(learner, wanted, directory)
    assert dict(dist.distributed_c10d._world.pg_map) == groups
    assert np.array_equal(learner.logprobs(probe)[0], before[0])


def publish_shares_from_zero3(
    learner: Learner, wanted: dict[str, torch.Tensor], directory: str
) -> None:
    """Publish with both ranks as senders: each copies and sends half, from processes of their
    own.
    """
    owner = WatchedOwner(learner)
    sender = make_sender(owner, overlap=True, senders="every_rank")
    payloads: list[Any] = [None, None]
    dist.all_gather_object(payloads, sender.connect("127.0.0.1", [1]))
    [payload] = merged_payloads(payloads)
    receiver = Receiver(payload, directory, device=2) if learner.rank == 0 else None
    joined = [receiver.join()] if receiver is not None else []
    assert sender.rendezvous() == ""
    for future in joined:
        future.result(DEADLINE_S)
    announcement = sender.stage(Version(0, 2).label, verify=True)
    assert sender._memory.nbytes <= owner.total() / 2 + 2 * BUFFER_BYTES
    receiving = [receiver.receive(announcement.payload)] if receiver is not None else []
    assert sender.send() == ""
    for future in receiving:
        future.result(DEADLINE_S)
    if receiver is not None:
        assert bit_equal(receiver.received, wanted)
    dist.barrier()
    sender.close()


@pytest.mark.skipif(GPUS in (1, 2), reason="needs three GPUs")
def test_two_zero3_ranks_gather_while_they_send_and_never_hold_the_model(
    control: Control, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model", tied=False)
    control.inject({"kind": "slow", "rank": 0, "seconds": 0.1})
    run_ranks(
        zero3_rank,
        free_port(),
        directory,
        str(control.log_path.parent),
        seconds=DEADLINE_S + START_S,
    )
    if not GPUS:
        senders = [event.pid for event in control.events("init", rank=0)]
        assert len(senders) == 4 and len(set(senders)) == 2, (
            "the second learner rank joined a group before it had a share to send"
        )


# -- the doubles themselves
# -------------------------------------------------------------------------------------------


def communicators(count: int) -> list[GlooCommunicator]:
    """A group of `count` ranks in this process."""
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    port = free_port()
    futures = [
        in_thread(
            lambda rank=rank: stateless_init_process_group("127.0.0.1", port, rank, count, rank)
        )
        for rank in range(count)
    ]
    return [future.result(DEADLINE_S) for future in futures]


@only_doubles
def test_a_broadcast_is_asynchronous_at_the_root_and_in_order(control: Control) -> None:
    root, *others = communicators(3)
    assert isinstance(root, GlooCommunicator)
    control.inject({"kind": "slow", "rank": 0, "bucket": 0, "seconds": 0.3})
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sent = [torch.full((5,), float(number)) for number in range(4)]
    for number, tensor in enumerate(sent):
        with torch.cuda.stream(streams[number % 2]):
            root.broadcast(tensor, src=0)
    assert not streams[0].query(), "nobody has joined, and all four calls came back"
    received = [[torch.empty(5) for _ in sent] for _ in others]
    futures = [
        in_thread(lambda c=c, into=into: [c.broadcast(t, src=0) for t in into], device=c.rank)
        for c, into in zip(others, received, strict=True)
    ]
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
    assert time.monotonic() - started < ABORT_WAIT_S, "it waited for what it had ended"
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
        in_thread(lambda: [receiver.broadcast(t, src=0) for t in received], device=1).result(
            DEADLINE_S
        )
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


# -- a real engine (the last test kills it)
# ---------------------------------------------------------------------------


@dataclass
class Serving:
    """A real engine, its event loop in a thread, and the model that it loaded."""

    engine: VllmEngine
    loop: asyncio.AbstractEventLoop
    model: torch.nn.Module

    def submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


@pytest.fixture(scope="module")
def serving(control: Control, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    if GPUS == 1:
        pytest.skip("sender and engine need a GPU each")
    directory = write_model(tmp_path_factory.mktemp("model"), tied=True, ends=False)
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": directory, "dtype": "float32"},
            "rollout": {"prompt_length": 32, "response_length": 100},
            "cluster": {"engine": {"max_num_seqs": 8}},
        }
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    start = VllmEngine.start(
        config,
        model_dir=directory,
        device="cuda" if GPUS else "cpu",
        backend="nccl",
        stop_token_ids=[],
        label=Version(0, 0).label,
        seed=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        # On a GPU vLLM computes attention in float32 with Triton, whose products are TF32 (errors
        # of some 1e-3) where nothing else is said: too coarse for the bound of `assert_serves`.
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        engine = asyncio.run_coroutine_threadsafe(start, loop).result(START_S)
    try:
        yield Serving(engine, loop, AutoModelForCausalLM.from_pretrained(directory).float().eval())
    finally:
        engine.close()
        loop.call_soon_threadsafe(loop.stop)


def sender_device() -> int:
    """The engine is on GPU 0."""
    return 1 if GPUS else 0


def publish(sender: Any, serving: Serving, version: int) -> Announcement:
    announcement = sender.stage(Version(0, version).label, verify=True)
    received = serving.submit(serving.engine.receive(announcement))
    sent = in_thread(sender.send, device=sender_device())
    assert sent.result(DEADLINE_S) == ""
    assert received.result(DEADLINE_S).serving == Version(0, version).label
    return announcement


def assert_serves(serving: Serving, version: int, models: dict[int, torch.nn.Module]) -> None:
    """Log-probs of fresh tokens are those of the version's model, and not those of the one
    before.
    """
    completions = serving.submit(
        serving.engine.generate(PROMPT, Sampling(n=2, max_tokens=60, temperature=0.8))
    ).result(DEADLINE_S)
    for completion in completions:
        assert [span.policy_version for span in completion.versions] == [version]
        now, before = (
            learner_logprobs(models[v], PROMPT, completion.token_ids, 0.8)
            for v in (version, version - 1)
        )
        assert np.abs(completion.logprobs - now).max() < 1e-4
        assert np.abs(completion.logprobs - before).mean() > 1e-3


@pytest.mark.later
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_publications_reach_a_real_engine(serving: Serving, control: Control, packed: bool) -> None:
    device = f"cuda:{sender_device()}" if GPUS else "cpu"
    first = serving.engine.serving_version + 1
    models = {
        version: perturbed(serving.model, version) if version else serving.model
        for version in (first - 1, first, first + 1)
    }
    owner = ModuleOwner(serving.model)
    owner.device = device
    sender = make_sender(owner, packed=packed)
    try:
        [payload] = sender.connect("127.0.0.1", [1])
        joined = serving.submit(serving.engine.connect(payload))
        in_thread(sender.rendezvous, device=sender_device()).result(DEADLINE_S)
        assert not joined.result(DEADLINE_S).failure
        for version in (first, first + 1):
            owner.model = copy.deepcopy(models[version]).to(device)
            publish(sender, serving, version)
            assert_serves(serving, version, models)
    finally:
        sender.close()
    if not GPUS:
        ends = control.events("end", rank=1)
        tensors = len(owner.weight_metadata())
        assert 2 * 2 * 3 <= len(ends) <= 2 * tensors if packed else len(ends) == 2 * 2 * tensors, (
            "a checksum follows every bucket"
        )
        assert {e.pid for e in ends}.isdisjoint({e.pid for e in control.events("end", rank=0)})


@pytest.mark.later
def test_what_changed_reaches_a_real_engine(serving: Serving) -> None:
    """It loads all of it from the copy that it keeps: the layers that changed, and the others."""
    device = f"cuda:{sender_device()}" if GPUS else "cpu"
    first = serving.engine.serving_version + 1
    models = {version: perturbed(serving.model, version) for version in range(first - 1, first + 3)}
    for version in (first + 1, first + 2):
        changed = dict(models[version].named_parameters())
        models[version] = copy.deepcopy(models[version - 1])
        with torch.no_grad():
            for name, parameter in models[version].named_parameters():
                if "layers.0.mlp" in name:
                    parameter.copy_(changed[name])
    owner = ModuleOwner(serving.model)
    owner.device = device
    sender = make_sender(owner, overlap=True, delta="always")
    try:
        [payload] = sender.connect("127.0.0.1", [1])
        joined = serving.submit(serving.engine.connect(payload))
        in_thread(sender.rendezvous, device=sender_device()).result(DEADLINE_S)
        assert not joined.result(DEADLINE_S).failure
        for version in range(first, first + 3):
            owner.model = copy.deepcopy(models[version]).to(device)
            announcement = publish(sender, serving, version)
            assert ("delta" in announcement.payload) is (version > first)
            assert_serves(serving, version, models)
    finally:
        sender.close()


@only_doubles
def test_an_engine_that_dies_is_noticed_by_both_sides(serving: Serving, control: Control) -> None:
    owner = ModuleOwner(serving.model)
    sender = make_sender(owner, overlap=True, deadlines=Deadlines(pause_s=0.5, bucket_s=1.0))
    [payload] = sender.connect("127.0.0.1", [1])
    joined = serving.submit(serving.engine.connect(payload))
    assert in_thread(sender.rendezvous).result(DEADLINE_S) == ""
    joined.result(DEADLINE_S)
    control.inject({"kind": "exit", "rank": 1, "bucket": 1})
    received = serving.submit(
        serving.engine.receive(sender.stage(Version(0, 99).label, verify=False))
    )
    assert sender.send() == "", "the copy is sent in the background"
    with pytest.raises(EngineError):  # vLLM never answers a call whose engine died
        received.result(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while not control.events("abort", rank=0):
        assert time.monotonic() < deadline, (
            "nobody tells NCCL that a peer is gone: the sender's watchdog must"
        )
        time.sleep(0.05)
    sender.stage(Version(0, 100).label, verify=False)  # it waits for the thread, which has ended
    sender.close()


@only_doubles
def test_a_group_without_its_engines_is_refused_and_closes_its_socket_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's way to make the store closes the descriptor again: an error of its own, or a file that
    another thread opened meanwhile.
    """
    from async_grpo.rollout.engine.vllm import nccl

    monkeypatch.setattr(nccl, "within", lambda seconds, what, work: work())  # the store ends first
    sender = make_sender(ModuleOwner(MixedModel()), deadlines=Deadlines(rendezvous_s=0.2))
    sender.connect("127.0.0.1", [1])
    refused = sender.rendezvous()
    assert refused.startswith("the learner could not form a group with the engines: ")
    assert "Bad file descriptor" not in refused
    sender.close()
