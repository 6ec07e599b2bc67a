"""Engines load what has arrived, and memory is used again only when it was read: our senders and
engines, vLLM's packs and its layerwise reload, on the doubles of tests/support/nccl_over_gloo.py
and tests/support/gpu_order.py, where only what is said to wait does.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer import packed_tensor
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from async_grpo.config.schema import Deadlines
from async_grpo.rollout.engine.vllm.nccl import NcclSender, _Source
from async_grpo.rollout.engine.vllm.nccl_watchdog import WatchedGroup
from async_grpo.weights import layout
from async_grpo.weights.layout import Layout, packs
from async_grpo.weights.transport import Version, merged_payloads
from tests.support import nccl_over_gloo
from tests.support.gpu_order import Gpu, Order
from tests.support.models import ModuleOwner
from tests.support.nccl_over_gloo import Control
from tests.support.nccl_sides import GPUS, Receiver, in_thread, make_sender

DEADLINE_S = 30.0
AT_ONCE = 5
"""Pieces of a gather, which ends within a pack."""
MOST_RANKS, MODELS = 8, 40
COUNTS = [24, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(540)])]
Rows = Sequence[Sequence[int]]
"""Of each piece of each layer."""
ROWS, COLUMNS = 100, 100
"""Of a piece: 40 kB, so that a pack of 64 kB ends with its second piece."""
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(GPUS > 0, reason="about the doubles: several ranks in one process"),
]


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """The doubles; every rank, which is a process of its own, has its own streams, and senders pack
    asynchronously as well.
    """
    send = NcclSender._send

    def asynchronously(sender: NcclSender) -> str:
        with Gpu(copy_s=getattr(sender._owner, "packing_s", 0.0)):
            return send(sender)

    monkeypatch.setattr(
        packed_tensor, "_get_streams", lambda _, n: [torch.cuda.Stream() for _ in range(n)]
    )
    monkeypatch.setattr(NcclSender, "_send", asynchronously)
    with nccl_over_gloo.installed(tmp_path) as control:
        yield control
    nccl_over_gloo.order = None


class Pieces(nn.Module):
    """What a learner publishes: tensors of `rows[layer][piece]` rows."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        for layer, pieces in enumerate(rows):
            for piece, height in enumerate(pieces):
                weight = nn.Parameter(torch.zeros(height, COLUMNS), requires_grad=False)
                self.register_parameter(f"layer{layer}_{piece}", weight)


class Merged(nn.Module):
    """A layer of an engine, whose pieces lie in one tensor (as gate and up, or experts)."""

    def __init__(self, pieces: Sequence[int]) -> None:
        super().__init__()
        self._pieces = pieces
        self.weight = nn.Parameter(torch.zeros(sum(pieces), COLUMNS), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param: Tensor, loaded_weight: Tensor, piece: int) -> None:
        self.piece(param.data, piece).copy_(loaded_weight)

    def piece(self, weight: Tensor, piece: int) -> Tensor:
        return weight.narrow(0, sum(self._pieces[:piece]), self._pieces[piece])


class EngineModel(nn.Module):
    """An engine's model, which vLLM reloads layer by layer."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Merged(pieces) for pieces in rows)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            layer, piece = self.place(name)
            layer.weight.weight_loader(layer.weight, tensor, piece)

    def held(self, name: str) -> Tensor:
        layer, piece = self.place(name)
        return layer.piece(layer.weight, piece)

    def place(self, name: str) -> tuple[Any, int]:
        layer, piece = map(int, name.removeprefix("layer").split("_"))
        return self.layers[layer], piece


class GatheringOwner(ModuleOwner):
    """A rank of a sharded model: weights are gathered by `AT_ONCE`, on the collectives' stream, and
    freed when the next are asked for, as with ZeRO-3. gathering_s, packing_s: how long a gather
    takes, and joining a pack. copying: to note in `beside` whether it was busy at each gather.
    """

    sharded = True
    gathering_s, packing_s = 0.003, 0.0
    copying: Any = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._collectives = torch.cuda.Stream()
        self.beside: list[bool] = []

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        pairs = list(super().named_weights())
        for first in range(0, len(pairs), AT_ONCE):
            bucket = pairs[first : first + AT_ONCE]
            whole = self._gathered([weight for _, weight in bucket])
            yield from zip((name for name, _ in bucket), whole, strict=True)
            for weight in whole:
                weight.record_stream(torch.cuda.current_stream())
            del whole, weight

    def _gathered(self, parts: list[Tensor]) -> list[Tensor]:
        if self.copying is not None:
            self.beside.append(not self.copying.query())
        whole, current = [torch.empty(part.shape) for part in parts], torch.cuda.current_stream()
        targets = [nccl_over_gloo._thread.gpu.address(weight) for weight in whole]

        def gather() -> None:
            time.sleep(self.gathering_s)
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)

        self._collectives.wait_stream(current)
        self._collectives.enqueue(gather)
        current.wait_stream(self._collectives)
        return whole


class Sides:
    """W learner ranks with the same weights, and an engine."""

    def __init__(
        self,
        ranks: int,
        rows: Rows,
        directory: Path,
        *,
        owner: type[ModuleOwner] = ModuleOwner,
        overlap: bool = True,
    ) -> None:
        self.published, self.served = Pieces(rows), EngineModel(rows)
        save_file(self.published.state_dict(), directory / "model.safetensors")
        self.senders: list[Any] = []
        for rank in range(ranks):
            one = owner(self.published)
            one.rank, one.world_size = rank, ranks
            deadlines = Deadlines(pause_s=10.0, bucket_s=10.0)
            self.senders.append(
                make_sender(one, overlap=overlap, senders="every_rank", deadlines=deadlines)
            )
        [payload] = merged_payloads([one.connect("127.0.0.1", [1]) for one in self.senders])
        self.receiver = Receiver(payload, directory)
        self.receiver.engine.model = self.served
        joining = [self.receiver.join(), *(in_thread(one.rendezvous) for one in self.senders)]
        assert [future.result(DEADLINE_S) for future in joining][1:] == [""] * ranks

    def publish(self, version: int, gpu: Gpu, *, ordered: bool = False) -> None:
        """Publish random weights, without checksums. ordered: they arrive in an order that the
        version draws.
        """
        generator = torch.Generator().manual_seed(version)
        for parameter in self.published.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        [*_, announcement] = [
            one.stage(Version(0, version).label, verify=False) for one in self.senders
        ]
        if ordered:
            sizes = packs(
                self.senders[0]._layout, self.senders[0]._group["packed_buffer_size_bytes"]
            )
            nccl_over_gloo.order = Order(version, self.communicators(), len(sizes))

        def take() -> None:
            engine = self.receiver.engine
            with gpu:
                engine.start_weight_update()
                engine.update_weights(announcement.payload)
                engine.finish_weight_update()

        taking = in_thread(take, device=self.receiver.device)
        assert [one.send() for one in self.senders] == [""] * len(self.senders)
        taking.result(DEADLINE_S)

    def wrong(self) -> list[str]:
        """Names of the pieces that the engine holds with other bits than were published."""
        return [
            name
            for name, sent in self.published.named_parameters()
            if not torch.equal(self.served.held(name).view(torch.int32), sent.view(torch.int32))
        ]

    def communicators(self) -> list[str]:
        """Ids of the senders' groups."""
        return [one._engine.model_update_group._groups[0]._id for one in self.senders]

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_layer_of_two_senders_is_loaded_when_both_packs_are_there(
    control: Control, tmp_path: Path, ranks: int
) -> None:
    """Two of three layers have pieces in two packs, of which a slow rank sends one."""
    sides = Sides(ranks, [[ROWS] * 3] * 6, tmp_path)
    try:
        slow = sides.communicators()[0]
        control.inject({"kind": "slow", "rank": 0, "comm": slow, "seconds": 0.02})
        for version in (1, 2, 3):
            sides.publish(version, Gpu())
            assert sides.wrong() == []
    finally:
        sides.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_of_a_layer_of_many_packs_is_not_used_again_before_it_is_read(
    control: Control, tmp_path: Path, ranks: int
) -> None:
    """A layer's packs lie on both of vLLM's streams; one of them copies them all."""
    sides = Sides(ranks, [[ROWS] * 12] * 4, tmp_path)
    gpu = Gpu(copy_s=0.003)
    try:
        for version in (1, 2):
            sides.publish(version, gpu)
            assert sides.wrong() == []
        assert gpu.reused > 0
    finally:
        sides.close()


@pytest.mark.parametrize("times", [(0.006, 0.0), (0.003, 0.006)], ids=["arrived", "read"])
def test_what_is_gathered_at_once_is_sent_in_two_packs(
    control: Control, tmp_path: Path, times: tuple[float, float]
) -> None:
    """Without a copy, where vLLM packs on two streams: after it has arrived, and before its memory
    is used again.
    """
    sides = Sides(1, [[ROWS] * 4] * 5, tmp_path, owner=GatheringOwner, overlap=False)
    owner = sides.senders[0]._owner
    owner.gathering_s, owner.packing_s = times
    try:
        for version in (1, 2, 3):
            sides.publish(version, Gpu())
            assert sides.wrong() == []
    finally:
        sides.close()


def test_weights_are_gathered_when_they_are_written_and_ready_when_they_are_yielded(
    control: Control,
) -> None:
    """Also on a rank that does not send, which only asks for them, on the stream of the step."""
    owner = GatheringOwner(Pieces([[ROWS] * 4] * 5))
    source, taken = _Source(owner, Layout(owner.weight_metadata())), Pieces([[ROWS] * 4] * 5)

    def step() -> None:
        time.sleep(0.02)
        for parameter in owner.model.parameters():
            parameter.fill_(1.0)

    source.open()
    with Gpu():
        torch.cuda.current_stream().enqueue(step)
        for name, weight in source:
            taken.get_parameter(name).copy_(weight)
        torch.cuda.current_stream().synchronize()
    assert all(bool((parameter == 1.0).all()) for parameter in taken.parameters())


def test_a_copy_is_made_beside_the_next_gather_in_bounded_memory(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = AT_ONCE * ROWS * COLUMNS * 4
    monkeypatch.setattr(layout, "AHEAD_BYTES", gathered)
    monkeypatch.setattr(layout, "DIGEST_BYTES", 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    owner = GatheringOwner(Pieces([[ROWS] * 4] * 10))
    copying, gpu = torch.cuda.Stream(), Gpu(copy_s=0.002)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    sender = make_sender(owner, overlap=True)
    try:
        sender.connect("127.0.0.1", [1])
        for version in (1, 2):
            owner.copying, owner.beside = copying, []
            for parameter in owner.model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
            with gpu:
                sender.stage(Version(0, version).label, verify=False)
            copied = dict(sender._share.tensors(sender._memory))
            for name, sent in owner.model.named_parameters():
                assert torch.equal(copied[name], sent)
            assert sum(owner.beside) > len(owner.beside) / 2
        assert gpu.reused > 0 and gpu.allocated() <= 2 * gathered
    finally:
        sender.close()


def schedules(count: int, directory: Path) -> dict[int, int]:
    """Publish in `count` orders, from 1 to 8 senders in turn; how many senders there were, by the
    orders after which the engine held other bits than were published.
    """
    found = {}
    each = max(3, count // MODELS)
    for block in range(0, count, each):
        draw, ranks = random.Random(block), 1 + block // each % MOST_RANKS
        rows = [[draw.randint(5, 150) for _ in range(draw.choice((1, 2, 5, 9)))] for _ in range(5)]
        sides = Sides(ranks, rows, directory)
        gpu = Gpu(copy_s=draw.choice((0.0, 0.001)))
        try:
            for version in range(block, min(block + each, count)):
                sides.publish(version, gpu, ordered=True)
                if sides.wrong():
                    found[version] = ranks
        finally:
            sides.close()
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_the_order_in_which_buckets_arrive_changes_nothing(
    control: Control, tmp_path: Path, count: int
) -> None:
    assert schedules(count, tmp_path) == {}


@pytest.mark.parametrize("count", COUNTS)
def test_orders_that_change_what_is_loaded_are_drawn(
    control: Control, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing that says what comes after what."""
    monkeypatch.setattr(WatchedGroup, "_follow", lambda *_: None)
    found = schedules(count, tmp_path)
    print(f"{len(found)} of {count} orders; by senders: {sorted(Counter(found.values()).items())}")
    assert len(found) > count / 8
