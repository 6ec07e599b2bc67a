"""Weights sent by every learner rank: what each holds and sends, what engines receive, and what
becomes of it when one of them stops. Over the doubles of tests/support/nccl_over_gloo.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import packed_tensor

from async_grpo.config.schema import Deadlines
from async_grpo.errors import TransferMismatch
from async_grpo.weights import layout, transport
from async_grpo.weights.layout import Layout, packs
from async_grpo.weights.transport import (
    Announcement,
    Staged,
    TornTransfer,
    Version,
    merged_payloads,
    merged_stage,
)
from tests.support import nccl_over_gloo
from tests.support.models import ModuleOwner
from tests.support.nccl_over_gloo import Control
from tests.support.nccl_sides import BUFFER_BYTES, GPUS, Receiver, bit_equal, in_thread, make_sender

DEADLINE_S = 30.0
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(GPUS > 0, reason="about the doubles: several ranks in one process"),
]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with nccl_over_gloo.installed(tmp_path_factory.mktemp("nccl")) as control:
        yield control


@pytest.fixture(autouse=True)
def _clean(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes with streams of their own, which vLLM keeps for each process."""
    control.clear()
    monkeypatch.setattr(
        packed_tensor,
        "_get_streams",
        lambda device, count: [torch.cuda.Stream() for _ in range(count)],
    )


class ManyTensors(torch.nn.Module):
    """Some dozens of tensors of 1 to 40 kB."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number in range(48):
            dtype = (torch.float32, torch.bfloat16)[number % 2]
            weight = torch.randn(11 + 7 * (number % 13), 62, generator=generator).to(dtype)
            setattr(self, f"w{number}", torch.nn.Parameter(weight, requires_grad=False))


class Sides:
    """W learner ranks, which hold the same model, and two engines of one and two workers."""

    def __init__(self, ranks: int, directory: Path, *, senders: str = "every_rank") -> None:
        self.model = ManyTensors()
        save_file(self.model.state_dict(), directory / "model.safetensors")
        self._directory, self.owners = directory, []
        for rank in range(ranks):
            owner = ModuleOwner(self.model)
            owner.rank, owner.world_size = rank, ranks
            self.owners.append(owner)
        deadlines = Deadlines(pause_s=0.5, bucket_s=1.0)
        self.senders = [
            make_sender(owner, overlap=True, senders=senders, deadlines=deadlines)
            for owner in self.owners
        ]
        self.join()

    def join(self) -> None:
        one, two = merged_payloads([sender.connect("127.0.0.1", [1, 2]) for sender in self.senders])
        self.groups = one["groups"]
        self.receivers = [
            Receiver(one, self._directory),
            Receiver(two, self._directory, size=2),
            Receiver(two, self._directory, rank=1, size=2),
        ]
        joined = [receiver.join() for receiver in self.receivers]
        rendezvous = [in_thread(sender.rendezvous) for sender in self.senders]
        assert [future.result(DEADLINE_S) for future in rendezvous] == [""] * len(self.senders)
        for future in joined:
            future.result(DEADLINE_S)

    def publish(self, version: int, *, verify: bool) -> tuple[Announcement, list[Any]]:
        """Publish changed weights; the announcement, and the futures of the workers."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(version)
        staged = merged_stage(
            [
                Staged(sender.stage(Version(0, version).label, verify=verify))
                for sender in self.senders
            ]
        )
        receiving = [one.receive(staged.announcement.payload) for one in self.receivers]
        assert [sender.send() for sender in self.senders] == [""] * len(self.senders)
        return staged.announcement, receiving

    def wanted(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.owners[0].named_weights()}

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_holds_and_sends_its_share(control: Control, tmp_path: Path, ranks: int) -> None:
    sides = Sides(ranks, tmp_path)
    total = sum(tensor.nbytes for tensor in sides.wanted().values())
    largest = BUFFER_BYTES + 40_000  # a pack ends with the tensor that fills it
    try:
        assert len(sides.groups) == ranks
        for version in (1, 2):
            control.clear()
            announcement, receiving = sides.publish(version, verify=version == 2)
            for future in receiving:
                future.result(DEADLINE_S)
            for sender in sides.senders:  # the last broadcasts have ended, and are in the log
                sender._wait()
            wanted = sides.wanted()
            assert all(bit_equal(one.received, wanted) for one in sides.receivers)
            assert announcement.nbytes >= total and announcement.digest
        held = [sender._memory.nbytes for sender in sides.senders]
        assert sum(held) <= total + 64 * 48 and max(held) <= total / ranks + largest
        links: dict[str, int] = {}
        for event in control.events("end", rank=0):
            if event.nbytes > 8:  # no checksum
                links[event.comm] = links.get(event.comm, 0) + event.nbytes
        assert len(links) == ranks
        assert sum(links.values()) == total, "every tensor crosses once"
        assert max(links.values()) <= total / ranks + largest
    finally:
        sides.close()


def test_one_rank_sends_where_it_is_told_to(control: Control, tmp_path: Path) -> None:
    sides = Sides(3, tmp_path, senders="one")
    try:
        assert len(sides.groups) == 1
        _, receiving = sides.publish(1, verify=True)
        for future in receiving:
            future.result(DEADLINE_S)
        assert bit_equal(sides.receivers[0].received, sides.wanted())
        assert [sender._memory is None for sender in sides.senders] == [False, True, True]
    finally:
        sides.close()


def test_large_weights_are_sent_by_a_few_ranks(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = ModuleOwner(ManyTensors())
    owner.world_size = 2
    nbytes = Layout(owner.weight_metadata()).nbytes
    for limit, note in ((nbytes, ""), (nbytes - 1, "weights are sent by 2 learner ranks")):
        monkeypatch.setattr(transport, "ONE_SENDER_BYTES", limit)
        assert make_sender(owner, overlap=True, senders="auto").note == note
    owner.world_size = 16
    few, all_of_them = (
        make_sender(owner, overlap=True, senders=senders) for senders in ("auto", "every_rank")
    )
    assert few.note == "weights are sent by 4 learner ranks"
    assert all_of_them.note == "weights are sent by 16 learner ranks"
    # an engine joins the groups one after another
    assert [few._rendezvous_s, all_of_them._rendezvous_s] == [4 * 60, 16 * 60]
    owner.world_size = 2
    assert make_sender(owner, overlap=False, senders="every_rank").note == "", (
        "without a copy only rank 0 sends"
    )


def test_a_rank_without_tensors_takes_part(control: Control, tmp_path: Path) -> None:
    """More ranks than packs."""
    sides = Sides(2, tmp_path)
    sides.close()
    owner = ModuleOwner(torch.nn.Linear(3, 2, bias=False))
    sender = make_sender(owner, overlap=True)
    owner.rank, owner.world_size = 1, 2
    idle = make_sender(owner, overlap=True, senders="every_rank")
    assert idle._share.entries == [] and sender._share.nbytes > 0


def test_a_flipped_bit_of_any_rank_is_seen_and_named(control: Control, tmp_path: Path) -> None:
    sides = Sides(2, tmp_path)
    try:
        # the second pack, which is rank 1's; a checksum follows each
        control.inject({"kind": "corrupt", "rank": 2, "bucket": 0})
        _, receiving = sides.publish(1, verify=True)
        failures = [future.exception(DEADLINE_S) for future in receiving]
        assert isinstance(failures[1], TransferMismatch)
        assert isinstance(failures[0], TornTransfer) and isinstance(failures[2], TornTransfer)
        control.inject()
        sides.join()
        _, receiving = sides.publish(2, verify=True)
        for future in receiving:
            future.result(DEADLINE_S)
        assert bit_equal(sides.receivers[1].received, sides.wanted())
    finally:
        sides.close()


def test_a_rank_that_stops_cuts_all_off_and_a_new_group_mends_it(
    control: Control, tmp_path: Path
) -> None:
    sides = Sides(2, tmp_path)
    try:
        control.inject({"kind": "hang", "rank": 0, "bucket": 2})
        started = time.monotonic()
        _, receiving = sides.publish(1, verify=False)
        failures = [future.exception(DEADLINE_S) for future in receiving]
        assert all(isinstance(failure, TornTransfer) for failure in failures)
        assert time.monotonic() - started < DEADLINE_S
        control.inject()
        sides.join()
        _, receiving = sides.publish(2, verify=True)
        for future in receiving:
            future.result(DEADLINE_S)
        assert all(bit_equal(one.received, sides.wanted()) for one in sides.receivers)
    finally:
        sides.close()


def test_checksums_of_a_copy_are_computed_where_the_weights_are(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is in host memory, where they would take seconds for some gigabytes."""
    owner, devices = ModuleOwner(ManyTensors()), []
    sender = make_sender(owner, overlap=True)
    sender._memory = sender._allocate()
    monkeypatch.setattr(layout, "checksum", lambda data: devices.append(data.device.type) or 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    owner.device = "meta"
    assert sender.stage(Version(0, 1).label, verify=True).digest
    assert set(devices) == {"meta"}


def test_the_digest_is_of_all_shares() -> None:
    def staged(*digests: str) -> list[Staged]:
        return [Staged(Announcement("v0.1", "nccl", digest=digest)) for digest in digests]

    def name(*digests: str) -> str:
        return merged_stage(staged(*digests)).announcement.digest

    assert name("sum64-1") == name("sum64-1", "", "") == "sum64-1"
    assert len({name("a", "b"), name("b", "a"), name("a", "c")}) == 3
    assert name("", "") == ""


def test_packs_are_those_of_vllm() -> None:
    three = Layout([("a", (4,), "float32"), ("b", (5,), "float32"), ("c", (1,), "float32")])
    assert packs(three, 16) == [[0, 1], [2]]
    assert packs(three, 15) == [[0], [1], [2]]
    assert packs(three, 1000) == [[0, 1, 2]]
    assert packs(three, 0) == [[0], [1], [2]]
