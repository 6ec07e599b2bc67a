"""Weights over NCCL, to engines on other GPUs and nodes: the learner's half.

Runs in: learner ranks. The engines' half is `worker.NcclEngine`; both drive vLLM's own NCCL
weight-transfer engines, packed into buckets.

    overlap:     stage = gather bucket by bucket into one copy on rank 0
                 send  = broadcast the copy, in a thread, while the next step runs
    no overlap:  stage = nothing
                 send  = gather bucket i + 1 while bucket i is broadcast

Invariants: the group (rank 0 and every engine worker) is separate from DeepSpeed's; with ZeRO-3 no
GPU holds the whole model, so its copy lies in host memory; a send or a rendezvous that does not
move ends by itself within its deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

from async_grpo.config.schema import Config, Deadlines
from async_grpo.errors import SetupError
from async_grpo.weights.layout import Layout, to_wire
from async_grpo.weights.nccl_watchdog import WatchedGroup, within
from async_grpo.weights.transport import (
    PACKED_BYTES,
    Announcement,
    TornTransfer,
    TransferStuck,
    WeightOwner,
    WeightSender,
    torn_after,
)

ABORT_S = 10.0
COPY_SHARE = 0.1
"""A staging copy up to this share of a GPU's memory lies there, a larger one in pinned memory."""


class NcclSender(WeightSender):
    """vLLM's NCCL trainer engine on rank 0; the other ranks take part in the gather."""

    def __init__(
        self,
        owner: WeightOwner,
        *,
        overlap: bool,
        deadlines: Deadlines,
        packed: bool = True,
        packed_bytes: int = PACKED_BYTES,
        packed_buffers: int = 2,
    ) -> None:
        self._owner = owner
        self._overlap, self._deadlines = overlap, deadlines
        self._packing = {
            "packed": packed,
            "packed_buffer_size_bytes": packed_bytes,
            "packed_num_buffers": packed_buffers,
        }
        self._layout = Layout(owner.weight_metadata())
        self.note = ""
        self._source = _Source(owner, self._layout)
        self._verify = False
        self._memory: Tensor | None = None
        self._apart: Tensor | None = None
        self._info: NCCLTrainerInitInfo | None = None
        self._engine: NCCLTrainerWeightTransferEngine | None = None
        self._sending: Future[str] | None = None

    @classmethod
    def of(cls, owner: WeightOwner, *, config: Config, key: str) -> Self:
        """Build the sender of a rank, with the settings of `weight_sync`."""
        settings = config.weight_sync
        return cls(owner, overlap=settings.overlap, deadlines=settings.deadlines)

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Leave the old group, and describe the new one to its engines. Rank 0's copy is allocated
        now: pinning memory takes seconds for every 10 GB, which no publication should wait for.
        """
        self.close()
        if self._overlap and self._owner.rank == 0 and self._memory is None:
            self._memory = self._allocate()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        world_size = 1 + sum(tensor_parallel_sizes)
        self._info = NCCLTrainerInitInfo(
            address, port, world_size, rank=self._owner.rank, **self._packing
        )
        payloads, offset = [], 1
        for size in tensor_parallel_sizes:
            payloads.append(
                {
                    "metadata": to_wire(self._layout),
                    **self._deadlines.model_dump(include={"rendezvous_s", "pause_s", "bucket_s"}),
                    "group": {
                        "master_address": address,
                        "master_port": port,
                        "rank_offset": offset,
                        "world_size": world_size,
                        **self._packing,
                    },
                }
            )
            offset += size
        return payloads

    def rendezvous(self) -> str:
        """Join the group, within the deadline; why it failed, or ""."""
        assert self._info is not None, "connect() comes first"
        info, device = self._info, self._owner.device

        def join() -> NCCLTrainerWeightTransferEngine:
            if device != "cpu":
                torch.cuda.set_device(device)  # of this thread
            return NCCLTrainerWeightTransferEngine.trainer_init(
                info, client=_DriverCommands(), source=self._source
            )

        try:
            engine = within(self._deadlines.rendezvous_s, "joining the engines' group", join)
        except (TimeoutError, RuntimeError) as error:
            return f"the learner could not form a group with the engines: {error}"
        if engine.model_update_group is not None:
            engine.model_update_group = WatchedGroup(
                engine.model_update_group,
                quiet_s=self._deadlines.bucket_s,
                first_s=self._deadlines.pause_s,
            )
        self._engine = engine
        return ""

    def reserve(self) -> None:
        """Allocate the memory for a copy apart, on rank 0."""
        if self._owner.rank == 0:
            self._apart = self._allocate()

    def stage(self, label: str, *, verify: bool, apart: bool = False) -> Announcement:
        """Copy nothing without overlap (unless `apart`): `send` reads the model (`streamed`)."""
        self._wait()
        self._verify, self._source.copy, name = verify, None, ""
        copies = self._overlap or apart
        if copies:
            copy = self._source.copy = self._apart if apart else self._memory  # None but on rank 0
            self._layout.fill(copy, self._owner.named_weights(), once=apart)
            if self._owner.device != "cpu":
                # the copy is sent from other streams, which do not wait for this one
                torch.cuda.synchronize(self._owner.device)
            if copy is not None:
                name = self._layout.sums(copy, verify=verify)[1]
        return Announcement(
            label, "nccl", {"verify": verify}, name, self._layout.nbytes, streamed=not copies
        )

    def send(self) -> str:
        """Push the weights: streamed on every rank, while nothing trains; a copy from rank 0, in a
        thread that the next `stage` or `connect` waits for.
        """
        assert self._engine is not None, "rendezvous() comes first"
        if self._source.copy is None:
            return self._send()
        self._sending = Future()
        threading.Thread(
            target=self._send_copy, args=(self._sending,), name="async_grpo-sending", daemon=True
        ).start()
        return ""

    def release(self) -> None:
        """Free the copy apart, once it is sent."""
        self._wait()
        self._source.copy = self._apart = None

    def close(self) -> None:
        """Leave the group; a send in the background is aborted."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        self._wait()

    def _send(self) -> str:
        self._source.open()
        group = self._engine.model_update_group
        if group is None:  # not rank 0: it only takes part in the gathers
            self._engine.send_weights()
            return ""
        if self._owner.device != "cpu":
            torch.cuda.set_device(self._owner.device)  # of this thread
            # another stream may still be writing the weights
            torch.cuda.synchronize(self._owner.device)
        group.begin(self._layout, verify=self._verify)
        try:
            self._engine.send_weights()
            # unpacked, vLLM only puts the broadcasts on the stream
            torch.cuda.current_stream().synchronize()
            group.end()
        except Exception as error:
            if not isinstance(error, TornTransfer) and not group.aborted:
                raise
            self._source.exhaust()
            return f"the learner's half: {group.aborted or error}"
        return ""

    def _send_copy(self, done: Future[str]) -> None:
        try:
            done.set_result(self._send())
        except Exception as error:  # noqa: BLE001 - raised in `_wait`
            done.set_exception(error)

    def _wait(self) -> None:
        """Wait for the thread that sends the copy; only its engines know of a torn transfer. Raises
        TransferStuck if even an abort did not free the thread.
        """
        sending, self._sending = self._sending, None
        if sending is not None:
            seconds = torn_after(self._deadlines) + ABORT_S
            try:
                sending.result(timeout=seconds)
            except TimeoutError:
                raise TransferStuck(
                    "the learner waits in NCCL for engines that are gone, and could not "
                    f"abort it within {seconds:g} s"
                ) from None

    def _allocate(self) -> Tensor:
        """Memory for a copy, on the GPU if its share is small, else pinned on the host. Raises
        SetupError where the host has too little.
        """
        if self._owner.device == "cpu":
            return torch.empty(self._layout.nbytes, dtype=torch.uint8)
        total = torch.cuda.get_device_properties(self._owner.device).total_memory
        if not self._owner.sharded and self._layout.nbytes <= COPY_SHARE * total:
            return torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self._owner.device)
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(meminfo["MemAvailable"].split()[0]) * 1024
        if 2 * self._layout.nbytes > available:  # pinned memory is given in powers of two
            raise SetupError(
                f"a copy of the weights to send takes up to {2 * self._layout.nbytes / 2**20:,.0f} "
                f"MiB of pinned host memory, {available / 2**20:,.0f} MiB are available; set "
                "weight_sync.overlap: false and weight_sync.self_check: false to do without"
            )
        return torch.empty(self._layout.nbytes, dtype=torch.uint8, pin_memory=True)


class _Source(WeightSource):
    """The tensors of one publication: of `copy`, or of the model."""

    def __init__(self, owner: WeightOwner, layout: Layout) -> None:
        self._owner, self._layout = owner, layout
        self.copy: Tensor | None = None
        self._left: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(entry.name, entry.dtype, entry.shape) for entry in self._layout.entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._left:
            yield name, tensor.to(self._owner.device, non_blocking=True)

    def open(self) -> None:
        """Begin a new pass over the tensors."""
        self._left = (
            self._owner.named_weights() if self.copy is None else self._layout.tensors(self.copy)
        )

    def exhaust(self) -> None:
        """Finish a pass that was cut off: the other ranks are in the middle of its gathers."""
        for _ in self._left:
            pass


class _DriverCommands:
    """Stands in for vLLM's client of the engines, which the driver commands, with deadlines."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
