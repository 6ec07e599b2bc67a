"""Engines load what has arrived, and memory is used again only when it was read: our senders and
engines, vLLM's packs and its layerwise reload, on the doubles of tests/support/nccl_over_gloo.py
and tests/support/gpu_order.py, where only what is said to wait does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer import packed_tensor
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from async_grpo.config.schema import Deadlines
from async_grpo.rollout.engine.vllm.nccl import NcclSender
from async_grpo.weights.transport import Version, merged_payloads
from tests.support import nccl_over_gloo
from tests.support.gpu_order import Gpu
from tests.support.models import ModuleOwner
from tests.support.nccl_over_gloo import Control
from tests.support.nccl_sides import GPUS, Receiver, in_thread, make_sender

DEADLINE_S = 30.0
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
        with Gpu():
            return send(sender)

    monkeypatch.setattr(
        packed_tensor, "_get_streams", lambda _, n: [torch.cuda.Stream() for _ in range(n)]
    )
    monkeypatch.setattr(NcclSender, "_send", asynchronously)
    with nccl_over_gloo.installed(tmp_path) as control:
        yield control


class Pieces(nn.Module):
    """What a learner publishes: `pieces` tensors for each layer."""

    def __init__(self, layers: int, pieces: int) -> None:
        super().__init__()
        for name in range(layers * pieces):
            layer, piece = divmod(name, pieces)
            weight = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=False)
            self.register_parameter(f"layer{layer}_{piece}", weight)


class Merged(nn.Module):
    """A layer of an engine, whose pieces lie in one tensor (as gate and up, or experts)."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(pieces * ROWS, COLUMNS), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param: Tensor, loaded_weight: Tensor, piece: int) -> None:
        param.data.narrow(0, piece * ROWS, ROWS).copy_(loaded_weight)


class EngineModel(nn.Module):
    """An engine's model, which vLLM reloads layer by layer."""

    def __init__(self, layers: int, pieces: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Merged(pieces) for _ in range(layers))
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            layer, piece = map(int, name.removeprefix("layer").split("_"))
            weight = self.layers[layer].weight
            weight.weight_loader(weight, tensor, piece)


class Sides:
    """W learner ranks with the same weights, and an engine."""

    def __init__(self, ranks: int, layers: int, pieces: int, directory: Path) -> None:
        self.published, self.served = Pieces(layers, pieces), EngineModel(layers, pieces)
        self._pieces = pieces
        save_file(self.published.state_dict(), directory / "model.safetensors")
        self.senders: list[Any] = []
        for rank in range(ranks):
            owner = ModuleOwner(self.published)
            owner.rank, owner.world_size = rank, ranks
            deadlines = Deadlines(pause_s=10.0, bucket_s=10.0)
            self.senders.append(
                make_sender(owner, overlap=True, senders="every_rank", deadlines=deadlines)
            )
        [payload] = merged_payloads([one.connect("127.0.0.1", [1]) for one in self.senders])
        self.receiver = Receiver(payload, directory)
        self.receiver.engine.model = self.served
        joining = [self.receiver.join(), *(in_thread(one.rendezvous) for one in self.senders)]
        assert [future.result(DEADLINE_S) for future in joining][1:] == [""] * ranks

    def publish(self, version: int, gpu: Gpu) -> None:
        """Publish random weights, without checksums."""
        generator = torch.Generator().manual_seed(version)
        for parameter in self.published.parameters():
            parameter.copy_(torch.randn(ROWS, COLUMNS, generator=generator))
        [*_, announcement] = [
            one.stage(Version(0, version).label, verify=False) for one in self.senders
        ]

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
        found = []
        for index, (name, sent) in enumerate(self.published.named_parameters()):
            layer, piece = divmod(index, self._pieces)
            held = self.served.layers[layer].weight[piece * ROWS : (piece + 1) * ROWS]
            if not torch.equal(held.view(torch.int32), sent.view(torch.int32)):
                found.append(name)
        return found

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_layer_of_two_senders_is_loaded_when_both_packs_are_there(
    control: Control, tmp_path: Path, ranks: int
) -> None:
    """Two of three layers have pieces in two packs, of which a slow rank sends one."""
    sides = Sides(ranks, 6, 3, tmp_path)
    try:
        slow = sides.senders[0]._engine.model_update_group._groups[0]._id
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
    sides = Sides(ranks, 4, 12, tmp_path)
    gpu = Gpu(copy_s=0.003)
    try:
        for version in (1, 2):
            sides.publish(version, gpu)
            assert sides.wrong() == []
        assert gpu.reused > 0
    finally:
        sides.close()
