"""What changed, over NCCL: which bytes are sent, what engines make of them, and what becomes of a
delta that is cut off, changed or begins from another version. Over the doubles of
tests/support/nccl_over_gloo.py; coordinators and faults are in `test_faults`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import packed_tensor

from async_grpo.config.schema import Deadlines
from async_grpo.errors import TransferMismatch
from async_grpo.rollout.engine.vllm.worker import BroadcastInfo
from async_grpo.weights import delta, layout, transport
from async_grpo.weights.layout import pieces
from async_grpo.weights.transport import SELF_CHECK, Announcement, TornTransfer, Version
from tests.support import nccl_over_gloo
from tests.support.models import ModuleOwner
from tests.support.nccl_over_gloo import Control
from tests.support.nccl_sides import GPUS, MixedModel, Receiver, bit_equal, in_thread, make_sender

DEADLINE_S = 30.0
CHANGED = 0.01
CHECKSUM_BYTES = 8
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(GPUS > 0, reason="about the doubles: several ranks in one process"),
]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with nccl_over_gloo.installed(tmp_path_factory.mktemp("nccl")) as control:
        yield control


@pytest.fixture
def sides(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    """A learner and two engines that have version 0."""
    control.clear()
    monkeypatch.setattr(
        packed_tensor,
        "_get_streams",
        lambda device, count: [torch.cuda.Stream() for _ in range(count)],
    )
    sides = Sides(control, tmp_path)
    try:
        assert "delta" not in sides.publish(0).payload
        yield sides
    finally:
        control.inject()
        sides.sender.close()


class Sides:
    """A learner rank that sends deltas, and two engines."""

    def __init__(self, control: Control, directory: Path) -> None:
        torch.manual_seed(0)
        self.control, self._directory = control, directory
        self.owner = ModuleOwner(MixedModel())
        save_file(self.owner.model.state_dict(), directory / "model.safetensors")
        self.sender = make_sender(
            self.owner, overlap=True, delta="always", deadlines=Deadlines(pause_s=0.3, bucket_s=0.5)
        )
        self.receivers: list[Receiver] = []
        self.join()

    def join(self) -> None:
        """Form a new group; engines stay what they are."""
        payloads = self.sender.connect("127.0.0.1", [1, 1])
        if not self.receivers:
            self.receivers = [Receiver(one, self._directory) for one in payloads]
        for receiver, payload in zip(self.receivers, payloads, strict=True):
            receiver.payload = payload
        joined = [receiver.join() for receiver in self.receivers]
        assert in_thread(self.sender.rendezvous).result(DEADLINE_S) == ""
        for future in joined:
            future.result(DEADLINE_S)

    def hurry(self) -> None:
        """Form a group that gives up after a second, and let it have version 0."""
        self.sender._deadlines = Deadlines(pause_s=0.3, bucket_s=0.5)
        self.join()
        self.publish(0)

    def stage(self, version: int, *, share: float = CHANGED, verify: bool = False) -> Announcement:
        """Change a share of the weights, and stage them."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.owner.model.parameters():
                moved = torch.rand(parameter.shape, generator=generator) < share
                parameter[moved] += 1.0
        return self.sender.stage(Version(0, version).label, verify=verify)

    def give(self, payload: dict[str, Any]) -> list[BaseException | None]:
        """Send what is staged; what became of each engine."""
        self.control.clear()
        receiving = [one.receive(payload) for one in self.receivers]
        assert self.sender.send() == ""
        return [future.exception(DEADLINE_S) for future in receiving]

    def publish(
        self, version: int, *, share: float = CHANGED, verify: bool = False
    ) -> Announcement:
        """Bring changed weights to both engines, bit for bit."""
        announcement = self.stage(version, share=share, verify=verify)
        assert self.give(announcement.payload) == [None, None]
        self.require_equal()
        return announcement

    def require_equal(self) -> None:
        """Require that both engines loaded the learner's weights."""
        wanted = {name: tensor.clone() for name, tensor in self.owner.named_weights()}
        assert all(bit_equal(one.received, wanted) for one in self.receivers)

    def wire_bytes(self) -> int:
        """Bytes that were broadcast last, without checksums."""
        self.sender._wait()
        ends = self.control.events("end", rank=0)
        return sum(event.nbytes for event in ends if event.nbytes != CHECKSUM_BYTES)

    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for _, tensor in self.owner.named_weights())


@pytest.mark.parametrize("verify", [False, True])
def test_what_changed_is_all_that_is_sent(sides: Sides, verify: bool) -> None:
    assert sides.wire_bytes() == sides.weights_bytes()
    for version in (1, 2, 3):
        payload = sides.publish(version, verify=verify).payload
        assert payload["base"] == Version(0, version - 1).label
        assert sides.wire_bytes() == payload["delta"] < sides.weights_bytes() / 10
        assert bool(payload["checksums"]) is verify


def test_a_long_delta_is_sent_in_pieces(
    sides: Sides, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs hold a few of them at the same time."""
    monkeypatch.setattr(layout, "BUCKET_BYTES", 640)
    payload = sides.publish(1, verify=True).payload
    assert sides.wire_bytes() == payload["delta"] > 3 * 640
    assert [one.nbytes for one in pieces(1500).entries] == [640, 640, 220]
    assert [one.offset for one in pieces(1500).entries] == [0, 640, 1280]


def test_weights_that_all_changed_are_sent_whole_and_the_next_delta_begins_from_them(
    sides: Sides,
) -> None:
    assert "delta" not in sides.publish(1, share=1.1).payload
    assert sides.wire_bytes() == sides.weights_bytes()
    assert sides.publish(2).payload["base"] == "v0.1"


def test_unchanged_weights_cost_next_to_nothing(sides: Sides) -> None:
    """As where the same version is sent again to an engine that was away."""
    assert sides.publish(1, share=0.0).payload["delta"] < 200


def test_an_engine_that_is_away_takes_part_and_has_what_the_next_delta_needs(sides: Sides) -> None:
    here, away = sides.receivers
    for version in (1, 2):
        payload = sides.stage(version).payload
        futures = [here.receive(payload), away.attend(payload)]
        assert sides.sender.send() == "" and payload["delta"]
        assert [future.exception(DEADLINE_S) for future in futures] == [None, None]
        assert here.received and not away.received
    sides.publish(3)


def test_an_engine_that_is_away_at_the_first_one_keeps_it_too(sides: Sides) -> None:
    sides.join()
    here, away = sides.receivers
    payload = sides.stage(1).payload
    futures = [here.receive(payload), away.attend(payload)]
    assert sides.sender.send() == "" and "delta" not in payload
    assert [future.exception(DEADLINE_S) for future in futures] == [None, None]
    assert not away.received
    assert sides.publish(2).payload["base"] == "v0.1"


def test_a_delta_from_another_version_is_refused_as_torn(sides: Sides) -> None:
    other = sides.receivers[1].engine._kept
    before, other.label = other.memory.clone(), "v7.7"
    first, second = sides.give(sides.stage(1).payload)
    assert first is None and isinstance(second, TornTransfer)
    assert "what changed since v0.0 came to an engine that has v7.7" in str(second)
    assert torch.equal(other.memory, before) and not sides.receivers[1].received


def test_a_new_group_is_sent_everything_although_a_delta_was_announced(
    sides: Sides, control: Control
) -> None:
    """Cut off in the delta: what the coordinator does is to form the group again, and to repeat."""
    sides.hurry()
    announcement = sides.stage(1)
    assert announcement.payload["delta"]
    control.clear()
    control.inject({"kind": "hang", "rank": 2, "bucket": 0})
    receiving = [one.receive(announcement.payload) for one in sides.receivers]
    assert sides.sender.send() == ""
    failures = [future.exception(DEADLINE_S) for future in receiving]
    assert isinstance(failures[1], TornTransfer) and sides.receivers[1].received == {}
    control.inject()
    sides.join()
    assert sides.give(announcement.whole().payload) == [None, None]
    sides.require_equal()
    assert sides.wire_bytes() == sides.weights_bytes()
    assert sides.publish(2).payload["base"] == "v0.1"


def test_after_a_torn_send_nothing_begins_from_what_was_torn(
    sides: Sides, control: Control
) -> None:
    sides.hurry()
    control.inject({"kind": "hang", "rank": 0, "bucket": 0})
    receiving = [one.receive(sides.stage(1).payload) for one in sides.receivers[:1]]
    assert sides.sender.send() == ""
    assert isinstance(receiving[0].exception(DEADLINE_S), TornTransfer)
    assert "delta" not in sides.stage(2).payload


def test_what_was_staged_and_not_sent_is_no_base(sides: Sides) -> None:
    sides.stage(1)
    assert "delta" not in sides.publish(2).payload
    assert sides.publish(3).payload["base"] == "v0.2"


def test_after_a_copy_apart_everything_is_sent(sides: Sides) -> None:
    """As the self-check makes one, with perturbed weights, which engines need not keep."""
    sides.sender.reserve()
    announcement = sides.sender.stage(SELF_CHECK, verify=True, apart=True)
    assert announcement.payload == {"verify": True}
    assert sides.give(announcement.payload) == [None, None]
    sides.sender.release()
    assert "delta" not in sides.publish(1).payload
    assert sides.publish(2).payload["base"] == "v0.1"


@pytest.mark.parametrize("verify", [False, True])
def test_a_flipped_bit_of_a_delta_is_seen_and_nothing_is_loaded(
    sides: Sides, control: Control, verify: bool
) -> None:
    payload = sides.stage(1, verify=verify).payload
    control.clear()
    control.inject({"kind": "corrupt", "rank": 2, "bucket": 0})
    receiving = [one.receive(payload) for one in sides.receivers]
    assert sides.sender.send() == ""
    failures = [future.exception(DEADLINE_S) for future in receiving]
    assert isinstance(failures[1], TransferMismatch) and not sides.receivers[1].received
    said = "bucket 1 of the weights .* it holds piece 1" if verify else "with other bytes than were"
    assert re.search(said, str(failures[1]))


def test_weights_that_a_delta_made_wrongly_are_not_loaded(sides: Sides) -> None:
    payload = sides.stage(1, verify=True).payload
    [sent] = payload["checksums"]
    failures = sides.give(payload | {"checksums": [sent ^ 1]})
    assert [type(failure) for failure in failures] == [TransferMismatch] * 2
    assert "bucket 1 of 1 of the weights" in str(failures[0])
    assert [one.received for one in sides.receivers] == [{}, {}]
    assert [one.engine._kept.label for one in sides.receivers] == ["", ""], "no base of the next"


def test_a_delta_that_was_cut_off_changes_nothing_and_leaves_no_base(sides: Sides) -> None:
    kept = sides.receivers[0].engine._kept
    before = kept.memory.clone()
    changed = delta.encode(before.numpy(), (before + 1).numpy())
    info = BroadcastInfo(verify=False, label="v0.1", delta=len(changed) - 2, base="v0.0")
    with pytest.raises(TransferMismatch):
        kept.change(torch.from_numpy(changed[:-2].copy()), info)
    assert torch.equal(kept.memory, before) and kept.label == ""
    with pytest.raises(TornTransfer, match="an engine that has no version"):
        kept.change(torch.from_numpy(changed), info)


def test_copies_of_both_sides_are_equal_in_every_byte(sides: Sides) -> None:
    """Between the tensors too: a checksum is of all bytes."""
    for version in (1, 2, 3):
        sides.publish(version)
    for receiver in sides.receivers:
        assert torch.equal(receiver.engine._kept.memory, sides.sender._memory)


def test_a_model_that_writes_into_what_it_is_given_spoils_no_base(sides: Sides) -> None:
    receiver = sides.receivers[0]
    load = receiver.load_weights

    def spoil(weights: Any) -> None:
        taken = list(weights)
        load(taken)
        for _, weight in taken:
            weight.zero_()

    receiver.load_weights = spoil
    for version in (1, 2, 3):
        sides.publish(version, verify=True)


def test_without_the_setting_no_engine_keeps_a_copy(control: Control, tmp_path: Path) -> None:
    control.clear()
    owner = ModuleOwner(MixedModel())
    save_file(owner.model.state_dict(), tmp_path / "model.safetensors")
    sender = make_sender(owner, overlap=True, delta="auto")
    try:
        [payload] = sender.connect("127.0.0.1", [1])
        receiver = Receiver(payload, tmp_path)
        joined = receiver.join()
        assert in_thread(sender.rendezvous).result(DEADLINE_S) == ""
        joined.result(DEADLINE_S)
        for version in (1, 2):
            announcement = sender.stage(Version(0, version).label, verify=False)
            assert announcement.payload == {"verify": False}
            receiving = receiver.receive(announcement.payload)
            assert sender.send() == ""
            receiving.result(DEADLINE_S)
        assert receiver.engine._kept is None and sender._before is None
    finally:
        sender.close()


def test_deltas_are_sent_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = ModuleOwner(MixedModel())
    owner.world_size = 4
    monkeypatch.setattr(transport, "ONE_SENDER_BYTES", 0)
    whole, changed = (
        make_sender(owner, overlap=True, senders="auto", delta=sent) for sent in ("auto", "always")
    )
    assert (whole._senders, changed._senders) == (4, 1)


def test_a_repetition_is_announced_without_the_delta_and_otherwise_as_it_was() -> None:
    payload = {"verify": True, "label": "v0.2", "delta": 9, "base": "v0.1", "checksums": [1]}
    whole = Announcement("v0.2", "nccl", payload, "sum64-1", 64).whole()
    assert whole.payload == {key: payload[key] for key in payload if key != "delta"}
    assert (whole.label, whole.digest, whole.nbytes) == ("v0.2", "sum64-1", 64)
    assert whole.whole() == whole
