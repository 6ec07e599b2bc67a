"""Both halves of the NCCL transport over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from async_grpo.config.schema import Deadlines, WeightSync
from async_grpo.weights.transport import WeightOwner
from tests.support import nccl_over_gloo

if TYPE_CHECKING:
    pass


GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


BUFFER_BYTES = 64 * 1024
"""Packs of this size make several chunks of the test model."""


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


def make_sender(
    owner: WeightOwner,
    *,
    packed: bool = True,
    overlap: bool = False,
    buffers: int = 2,
    senders: str = "one",
    delta: str = "off",
    deadlines: Deadlines | None = None,
) -> Any:
    """The one place that builds our sender."""
    from async_grpo.rollout.engine.vllm.nccl import NcclSender

    settings = WeightSync.model_validate(
        {
            "overlap": overlap,
            "delta": delta,
            "backend": {"name": "nccl", "senders": senders},
            "deadlines": deadlines or Deadlines(),
        }
    )
    return NcclSender(
        owner, settings=settings, packed=packed, packed_bytes=BUFFER_BYTES, packed_buffers=buffers
    )


class Receiver:
    """One worker of an engine: the engines' half of the transport around a model that keeps what it
    is given.
    """

    def __init__(
        self,
        payload: dict[str, Any],
        directory: str | Path,
        *,
        rank: int = 0,
        size: int = 1,
        device: int | None = None,
    ) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig

        from async_grpo.rollout.engine.vllm.worker import NcclEngine

        self.payload, self.device = (
            payload,
            payload["groups"][0]["rank_offset"] + rank if device is None else device,
        )
        self.received: dict[str, torch.Tensor] = {}
        parallel = SimpleNamespace(data_parallel_index=0, world_size=size, rank=rank)
        hf = SimpleNamespace(tie_word_embeddings=False)
        model = SimpleNamespace(
            model=str(directory), revision=None, hf_config=hf, hf_text_config=hf
        )
        self.engine = NcclEngine(
            WeightTransferConfig(backend="nccl"),
            SimpleNamespace(parallel_config=parallel, model_config=model),
            torch.device(f"cuda:{self.device}" if GPUS else "cpu"),
            self,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            assert name not in self.received, f"{name} came twice"
            self.received[name] = tensor.cpu().clone()

    def join(self) -> Future:
        return in_thread(
            lambda: self.engine.init_transfer_engine(self.engine.parse_init_info(self.payload)),
            device=self.device,
        )

    def receive(self, payload: dict[str, Any]) -> Future:
        self.received = {}
        return in_thread(lambda: self.engine.update_weights(payload), device=self.device)

    def attend(self, payload: dict[str, Any]) -> Future:
        self.received = {}
        return in_thread(lambda: self.engine.attend(payload), device=self.device)


def bit_equal(received: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Same names in the same order, same dtypes, same bits."""
    return list(received) == list(wanted) and all(
        received[name].dtype == tensor.dtype
        and torch.equal(nccl_over_gloo._bytes_of(received[name]), nccl_over_gloo._bytes_of(tensor))
        for name, tensor in wanted.items()
    )


class MixedModel(torch.nn.Module):
    """Several dtypes and a shape whose bytes do not fill a buffer evenly."""

    def __init__(self) -> None:
        super().__init__()
        for number, dtype in enumerate(
            [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
        ):
            weight = torch.randn(61 + 40 * number, 97 + number).to(dtype)
            setattr(self, f"w{number}", torch.nn.Parameter(weight, requires_grad=False))
