"""Weights over NCCL, to engines on other GPUs and nodes: the learner's half.

Runs in: learner ranks. The engines' half is `worker.NcclEngine`; both drive vLLM's own NCCL
weight-transfer engines, packed into buckets.

    overlap:     stage = gather bucket by bucket into one copy, on the ranks that send
                 send  = broadcast the copy, in a thread, while the next step runs
    no overlap:  stage = nothing
                 send  = gather bucket i + 1 while bucket i is broadcast, from rank 0

Rank 0 sends everything, or (option `senders`) each of W ranks the packs that are its own, over a
group of its own with all engines, which take the packs in turn:

    pack        0   1   2   3   4   5   ...      whole tensors, cut as vLLM cuts them
    of rank     0   1   2   0   1   2            W = 3: each stages and sends a third

With `weight_sync.delta: always` there are two copies, in host memory: of the newest version, and of
the one before, which the group has. What changed is sent as if it were the weights.

Invariants: the groups (a sending rank and every engine worker) are separate from DeepSpeed's; with
ZeRO-3 no GPU holds the whole model, so its copy lies in host memory; a send or a rendezvous that
does not move ends by itself within its deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import TCPStore
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_common import unpinned_nccl_env
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from async_grpo.config.schema import Config, WeightSync
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.vllm.nccl_watchdog import WatchedGroup, within
from async_grpo.weights.delta import encode
from async_grpo.weights.layout import Layout, packs, pieces, to_wire
from async_grpo.weights.transport import (
    PACKED_BYTES,
    Announcement,
    TornTransfer,
    TransferStuck,
    WeightOwner,
    WeightSender,
    rendezvous_seconds,
    sending_ranks,
    torn_after,
)

ABORT_S = 10.0
COPY_SHARE = 0.1
"""A staging copy up to this share of a GPU's memory lies there, a larger one in pinned memory."""


class NcclSender(WeightSender):
    """vLLM's NCCL trainer engine on the ranks that send; the others take part in the gather."""

    def __init__(
        self,
        owner: WeightOwner,
        *,
        settings: WeightSync,
        packed: bool = True,
        packed_bytes: int = PACKED_BYTES,
        packed_buffers: int = 2,
    ) -> None:
        self._owner = owner
        self._overlap, self._deadlines = settings.overlap, settings.deadlines
        self._deltas = settings.delta == "always"
        self._layout = layout = Layout(owner.weight_metadata())
        self._senders = sending_ranks(settings, ranks=owner.world_size, nbytes=layout.nbytes)
        self._sends = owner.rank < self._senders
        self._rendezvous_s = rendezvous_seconds(self._deadlines, self._senders)
        size = min(packed_bytes, -(-layout.nbytes // self._senders))
        self._packing = {
            "packed": packed,
            "packed_buffer_size_bytes": size,
            "packed_num_buffers": packed_buffers,
        }
        mine = packs(layout, size if packed else 0)[owner.rank :: self._senders]
        self._own = {index for pack in mine if self._sends for index in pack}
        self._share = Layout([layout.metadata[index] for index in sorted(self._own)])
        self.note = (
            f"weights are sent by {self._senders} learner ranks" if self._senders > 1 else ""
        )
        self._source = _Source(owner, self._share)
        self._verify = self._copied = False
        self._memory: Tensor | None = None
        self._before: Tensor | None = None
        self._label = ""  # of what is staged; of a copy apart ""
        self._base = ""  # of what all of the group has
        self._apart: Tensor | None = None
        self._listener: socket.socket | None = None
        self._group: dict[str, Any] = {}
        self._engine: NCCLTrainerWeightTransferEngine | None = None
        self._sending: Future[str] | None = None

    @classmethod
    def of(cls, owner: WeightOwner, *, config: Config, key: str) -> Self:
        """Build the sender of a rank, with the settings of `weight_sync`."""
        return cls(owner, settings=config.weight_sync)

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Leave the old group, and describe the new one to its engines. The copy is allocated now:
        pinning memory takes seconds for every 10 GB, which no publication should wait for.
        """
        self.close()
        self._base = ""
        if self._source.layout is not self._share:
            self._source.copy, self._source.layout = self._memory, self._share
        if not self._sends:
            return [{"groups": []} for _ in tensor_parallel_sizes]
        if self._overlap and self._memory is None:
            self._memory = self._allocate()
            self._before = self._allocate() if self._deltas else None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # the group's store listens on this very socket: nobody else can take its port meanwhile
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._group = {
            "master_address": address,
            "master_port": self._listener.getsockname()[1],
            "world_size": 1 + sum(tensor_parallel_sizes),
            **self._packing,
        }
        payloads, offset = [], 1
        for size in tensor_parallel_sizes:
            payloads.append(
                {
                    "metadata": to_wire(self._layout),
                    **self._deadlines.model_dump(include={"pause_s", "bucket_s"}),
                    "rendezvous_s": self._rendezvous_s,
                    "groups": [{**self._group, "rank_offset": offset}],
                }
            )
            offset += size
        return payloads

    def rendezvous(self) -> str:
        """Join the group, within the deadline; why it failed, or ""."""
        engine = self._engine = NCCLTrainerWeightTransferEngine(
            client=_DriverCommands(), source=self._source, is_sender=self._sends, **self._packing
        )
        if not self._sends:
            return ""
        assert self._listener is not None, "connect() comes first"
        listener, self._listener = self._listener, None
        device, seconds = self._owner.device, self._rendezvous_s

        def join() -> Any:
            if device != "cpu":
                torch.cuda.set_device(device)  # of this thread
            members = self._group["world_size"]
            # not by `StatelessProcessGroup.create`: without all members it closes the descriptor
            # again that its store has closed, so perhaps a file of another thread
            store = TCPStore(
                self._group["master_address"],
                self._group["master_port"],
                members,
                is_master=True,
                timeout=timedelta(seconds=seconds),
                use_libuv=False,
                master_listen_fd=listener.detach(),
            )
            group = StatelessProcessGroup(rank=0, world_size=members, store=store)
            with unpinned_nccl_env():
                return pynccl.PyNcclCommunicator(
                    group, device=torch.accelerator.current_device_index()
                )

        try:
            joined = within(seconds, "joining the engines' group", join)
        except (TimeoutError, RuntimeError) as error:
            return f"the learner could not form a group with the engines: {error}"
        engine.model_update_group = WatchedGroup(
            [joined], quiet_s=self._deadlines.bucket_s, first_s=self._deadlines.pause_s
        )
        return ""

    def reserve(self) -> None:
        """Allocate the memory for a copy apart, where there is none, on the ranks that send."""
        if self._sends and self._apart is None:
            self._apart = self._allocate()

    def stage(self, label: str, *, verify: bool, apart: bool = False) -> Announcement:
        """Copy nothing without overlap (unless `apart`): `send` reads the model (`streamed`)."""
        self._wait()
        base, self._base = self._base, ""
        self._label = "" if apart else label
        self._verify, self._copied = verify, self._overlap or apart
        self._source.copy, self._source.layout = None, self._share
        payload: dict[str, Any] = {"verify": verify}
        name = ""
        if self._copied:
            if self._deltas and not apart:
                self._memory, self._before = self._before, self._memory
            copy = self._source.copy = self._apart if apart else self._memory
            weights = enumerate(self._owner.named_weights())  # all of them: reading is collective
            own = (pair for index, pair in weights if index in self._own)
            beside = copy is not None and copy.is_pinned()
            stream = self._source.stream if beside else None
            self._share.fill(copy, own, once=apart, stream=stream)
            if self._owner.device != "cpu":
                # the copy is sent from other streams, which do not wait for this one
                torch.cuda.synchronize(self._owner.device)
            if copy is not None:
                sums, name = self._share.sums(copy, verify=verify, device=self._owner.device)
                if self._deltas and not apart:
                    payload |= {"label": label, **self._since(base, label, copy, sums)}
        return Announcement(
            label, "nccl", payload, name, self._layout.nbytes, streamed=not self._copied
        )

    def _since(self, base: str, label: str, copy: Tensor, checksums: list[int]) -> dict[str, Any]:
        """Let what changed since version `base` be sent, where the group has one and that is
        shorter; what engines need to know of it.
        """
        if not base or self._before is None:
            return {}
        changed = torch.from_numpy(encode(self._before.numpy(), copy.numpy(), (base, label)))
        if changed.nbytes >= copy.nbytes:
            return {}
        self._source.copy, self._source.layout = changed, pieces(changed.nbytes)
        return {"delta": changed.nbytes, "base": base, "checksums": checksums}

    def send(self) -> str:
        """Push the weights: streamed on every rank, while nothing trains; a copy from the ranks
        that have one, in a thread that the next `stage` or `connect` waits for.
        """
        assert self._engine is not None, "rendezvous() comes first"
        if not self._copied:
            return self._send()
        if self._source.copy is None:
            return ""
        self._sending = Future()
        threading.Thread(
            target=self._send_copy, args=(self._sending,), name="async_grpo-sending", daemon=True
        ).start()
        return ""

    def release(self) -> None:
        """Free the copy apart, once it is sent; torch keeps pinned memory unless it is told."""
        self._wait()
        self._source.copy = self._apart = None
        if self._owner.device != "cpu":
            torch._C._host_emptyCache()

    def close(self) -> None:
        """Leave the group; a send in the background is aborted."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._wait()

    def _send(self) -> str:
        self._source.open()
        engine = self._engine
        assert engine is not None, "rendezvous() comes first"
        group = engine.model_update_group
        if group is None:  # it only takes part in the gathers
            engine.send_weights()
            return ""
        if self._owner.device != "cpu":
            torch.cuda.set_device(self._owner.device)  # of this thread
            if not self._copied:  # another stream may still be writing the weights
                torch.cuda.synchronize(self._owner.device)
        group.begin(self._source.layout, verify=self._verify)
        try:
            engine.send_weights()
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
                torn = sending.result(timeout=seconds)
                self._base = "" if torn else self._label
            except TimeoutError:
                raise TransferStuck(
                    "the learner waits in NCCL for lost engines, and the abort did not "
                    f"end within {seconds:g} s"
                ) from None

    def _allocate(self) -> Tensor:
        """Memory for a copy, on the GPU if its share is small and none is compared, else pinned on
        the host; zeros between the tensors. Raises SetupError where the host has too little.
        """
        nbytes, device = self._share.nbytes, self._owner.device
        if device == "cpu":
            return torch.zeros(nbytes, dtype=torch.uint8)
        total = torch.cuda.get_device_properties(device).total_memory
        if not (self._owner.sharded or self._deltas) and nbytes <= COPY_SHARE * total:
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(meminfo["MemAvailable"].split()[0]) * 1024
        without = "weight_sync.overlap: false and weight_sync.self_check: false"
        if self._deltas:
            without = "weight_sync.delta: off"
        if 2 * nbytes > available:  # pinned memory is given in powers of two
            raise SetupError(
                f"a copy of the weights to send takes up to {2 * nbytes / 2**20:,.0f} "
                f"MiB of pinned host memory, {available / 2**20:,.0f} MiB are available; to do "
                f"without, set {without}"
            )
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


class _Source(WeightSource):
    """The tensors of one publication: of `copy`, or of the model."""

    def __init__(self, owner: WeightOwner, layout: Layout) -> None:
        self._owner, self.layout = owner, layout
        self.copy: Tensor | None = None
        self._left: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(entry.name, entry.dtype, entry.shape) for entry in self.layout.entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        # vLLM asks on the stream of each pack in turn, and what is gathered at once may be in two
        self.stream.wait_stream(torch.cuda.current_stream())
        while True:
            with torch.cuda.stream(self.stream):
                name, tensor = next(self._left, ("", None))
                if tensor is None:
                    return
                tensor = tensor.to(self._owner.device, non_blocking=True)
            pack = torch.cuda.current_stream()
            pack.wait_stream(self.stream)
            tensor.record_stream(pack)
            yield name, tensor

    @cached_property
    def stream(self) -> Any:
        """The same for every publication: memory stays with the stream that it was allocated on."""
        return torch.cuda.Stream(self._owner.device)

    def open(self) -> None:
        """Begin a new pass over the tensors."""
        self._left = (
            self._owner.named_weights() if self.copy is None else self.layout.tensors(self.copy)
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
