"""The engine workers' half of every transport, on top of vLLM's weight-transfer engines.

Runs in: vLLM EngineCore and worker processes. vLLM imports this module there because its
`worker_extension_cls` names `WorkerExtension`; the import registers the engines with vLLM, and the
process for post-mortems. The front end makes one call per publication:

    take_publication -> start_weight_update -> update_weights (verify, then load)
        -> finish_weight_update -> what happened, as plain values
    of an adapter    -> update_weights (verify, then copy) -> load_adapter -> what happened

Invariants: tensors with a wrong checksum are not loaded; after `finish_weight_update` every layer
computes with the new weights; a publication that was cut off leaves nothing behind that could mix
with the next one; a worker that waits for the learner frees itself within its deadline. On CPU two
kinds of layers compute with packed copies that a layerwise reload does not refresh: a tied LM head,
and experts. Those that were loaded are packed again here.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from tqdm.std import TqdmDefaultWriteLock
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_process_group,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from async_grpo.errors import TransferMismatch
from async_grpo.rollout.engine.vllm.arguments import transfer_name
from async_grpo.rollout.engine.vllm.nccl_watchdog import WatchedGroup, within
from async_grpo.rollout.engine.vllm.worker_adapters import Factors, check_modules, load_adapter
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import die_with
from async_grpo.weights.delta import apply
from async_grpo.weights.layout import Layout, pieces
from async_grpo.weights.names import NamesDiffer, check_names, file_shapes
from async_grpo.weights.shared_memory import SegmentReader
from async_grpo.weights.transport import TornTransfer

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

# vLLM's first progress bar would make a semaphore, which stays in /dev/shm when the process is
# killed
TqdmDefaultWriteLock.mp_lock = None
if "ASYNC_GRPO_ENGINE_OWNER" in os.environ:
    # an EngineCore outlives a front end that is killed
    die_with(int(os.environ["ASYNC_GRPO_ENGINE_OWNER"]))
Metadata = list[list[Any]]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Init payload. metadata: [name, shape, dtype] of every published tensor. The rest is NCCL's: a
    group for every learner rank that sends, and deadlines in seconds.
    """

    metadata: Metadata
    groups: list[dict[str, Any]] = field(default_factory=list)
    rendezvous_s: float = 0.0
    pause_s: float = 0.0
    bucket_s: float = 0.0


@dataclass
class SegmentInfo(WeightTransferUpdateInfo):
    """The segment, its sequence number, and checksums of its buckets (none: not compared)."""

    path: str
    sequence: int
    checksums: list[int]


@dataclass
class HandleInfo(WeightTransferUpdateInfo):
    """handles: pickled GPU -> `rebuild_cuda_tensor` arguments; keep: they will come again."""

    handles: bytes
    keep: bool
    checksums: list[int]


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """A broadcast. verify: a checksum follows every bucket. label: of the version, where a copy is
    kept. delta: bytes of what changed since version `base`, where that is sent; checksums: of the
    weights that it makes.
    """

    verify: bool
    label: str = ""
    delta: int = 0
    base: str = ""
    checksums: list[int] = field(default_factory=list)


class _Reload:
    """Start and finish of an update, the same for all transports; or an adapter of it."""

    model: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    update_weights: Callable[[dict[str, Any]], None]

    def _check_names(self, init_info: InitInfo) -> None:
        """Compare the tensors to come with the engine's files, or layers that take adapters."""
        if getattr(self.model, "lora_manager", None) is not None:
            check_modules(self.model, init_info.metadata)
            return
        model = self.vllm_config.model_config
        check_names(
            file_shapes(model.model, model.revision),
            init_info.metadata,
            tied=any(
                getattr(config, "tie_word_embeddings", False)
                for config in (model.hf_config, model.hf_text_config)
            ),
            where=model.model,
        )

    def start_weight_update(self) -> None:
        """Forget what a cut-off publication left, and prepare every layer for loading."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            # left from a publication that was cut off: its half of a layer must not meet the other
            # half of this one
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        if self.device.type == "cpu":
            pack_reloaded_experts(self.model)
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Let every layer compute with the loaded weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)
        self.settle()

    def settle(self) -> None:
        """Let go of what was read, once nothing reads it any more."""

    def take_adapter(self, update_info: dict[str, Any], number: int, kept: list[int]) -> None:
        """Load an update of factors (`load_adapter`)."""
        factors = Factors()
        with self._instead(factors):
            self.update_weights(update_info)
            self.settle()
        load_adapter(self.model, factors.tensors, number, kept)

    @contextmanager
    def _instead(self, target: Any) -> Iterator[None]:
        """Inside the block another takes the weights than the model."""
        model, self.model = self.model, target
        try:
            yield
        finally:
            self.model = model

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            self.model.load_weights(weights)


def load_publication(model: nn.Module, model_config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load whole tensors into an engine's model of this process, as a publication does."""
    reload = _Reload()
    reload.model, reload.model_config = model, model_config
    reload.device = torch.device("cpu")
    reload.start_weight_update()
    reload._load([(name, tensor.clone()) for name, tensor in tensors.items()])
    reload.finish_weight_update()


def pack_reloaded_experts(model: nn.Module) -> None:
    """Let experts pack their weights whenever these were loaded, where vLLM on CPU does it only the
    first time and copies raw weights into packed storage later.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None:
            continue
        if "process_weights_after_loading" not in vars(method):
            method.process_weights_after_loading = partial(
                _process_and_pack, method, method.process_weights_after_loading
            )


def _process_and_pack(method: Any, process: Callable[[nn.Module], None], layer: nn.Module) -> None:
    process(layer)
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


class SharedMemoryEngine(_Reload, WeightTransferEngine[InitInfo, SegmentInfo]):
    """Loads a publication from a shared-memory segment."""

    transport, init_info_cls, update_info_cls = "shared_memory", InitInfo, SegmentInfo
    _reader: SegmentReader | None = None
    _announced: SegmentInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Compare names, and lay out the segments to come."""
        self._check_names(init_info)
        self._reader = SegmentReader(init_info.metadata)

    def receive_weights(self, update_info: SegmentInfo) -> None:
        """Load the tensors of the announced segment."""
        assert self._reader is not None, "init_transfer_engine() comes first"
        self._announced = update_info
        self._load(
            self._reader.tensors(update_info.path, update_info.sequence, update_info.checksums)
        )

    def settle(self) -> None:
        """Check that nothing was written meanwhile."""
        assert self._reader is not None
        # The layerwise reload may read the segment as late as here.
        self._reader.check(self._announced.path, self._announced.sequence)

    def shutdown(self) -> None:
        """Drop the mappings."""
        self._reader = None


class IpcEngine(_Reload, WeightTransferEngine[InitInfo, HandleInfo]):
    """Loads a publication from the learner's copy on this GPU."""

    transport, init_info_cls, update_info_cls = "ipc", InitInfo, HandleInfo
    _layout: Layout
    _kept: tuple[bytes, Tensor | None]
    _buffer: Tensor | None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Compare names, and lay out the copies to come."""
        self._check_names(init_info)
        self._layout = Layout(init_info.metadata)
        self._kept = (b"", None)

    def receive_weights(self, update_info: HandleInfo) -> None:
        """Map the learner's copy on this GPU, and load its tensors."""
        if update_info.handles != self._kept[0]:
            self._buffer = self._map(update_info)
            if update_info.keep:
                self._kept = update_info.handles, self._buffer
        else:
            self._buffer = self._kept[1]
        assert self._buffer is not None
        if update_info.checksums:
            self._layout.verify(self._buffer, update_info.checksums)
        self._load(self._layout.tensors(self._buffer))

    def settle(self) -> None:
        """Let go of the copy."""
        torch.cuda.synchronize(self.device)  # the last layers are read as late as here
        self._buffer = None

    def _map(self, update_info: HandleInfo) -> Tensor:
        """Return the learner's copy on this GPU, [nbytes] uint8."""
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = pickle.loads(update_info.handles)  # of our own learner
        if gpu not in handles:
            raise RuntimeError(
                f"the learner has no copy of the weights on this engine's GPU {gpu}, only "
                f"on {sorted(handles)}"
            )
        arguments = list(handles[gpu])
        arguments[6] = self.device.index  # the learner may know this GPU by another number
        return rebuild_cuda_tensor(*arguments)

    def shutdown(self) -> None:
        """Nothing to leave: the mappings end with the process."""


class NcclEngine(_Reload, NCCLWeightTransferEngine):
    """vLLM's NCCL engine with a watchdog, and checksums where the announcement asks for them. Where
    deltas are sent, what comes goes into a copy in host memory, from which all is loaded.
    """

    transport, init_info_cls, update_info_cls = "nccl", InitInfo, BroadcastInfo
    packed: bool
    packed_buffer_size_bytes: int
    packed_num_buffers: int
    model_update_group: WatchedGroup
    _layout: Layout
    _kept: _FlatCopy | None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Compare names, and join the learner's groups within the deadline."""
        self._check_names(init_info)
        self.shutdown()
        self._layout = Layout(init_info.metadata)
        self._kept = None
        groups = [NCCLWeightTransferInitInfo(**group) for group in init_info.groups]
        self.packed = groups[0].packed
        self.packed_buffer_size_bytes = groups[0].packed_buffer_size_bytes
        self.packed_num_buffers = groups[0].packed_num_buffers

        def join() -> list[PyNcclCommunicator]:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            return [worker_init_process_group(group, self.parallel_config) for group in groups]

        try:
            joined = within(init_info.rendezvous_s, "joining the learner's group", join)
        except RuntimeError as error:
            raise TornTransfer(f"the engine could not join the learner's group: {error}") from error
        self.model_update_group = WatchedGroup(
            joined, quiet_s=init_info.bucket_s, first_s=init_info.pause_s
        )

    def receive_weights(self, update_info: BroadcastInfo) -> None:
        """Receive all weights, or what changed, under the watchdog; load all."""
        label, verify = update_info.label, update_info.verify
        if not label:
            self._receive(self._layout, verify=verify)
            return
        kept = self._kept = self._kept or _FlatCopy(self._layout)
        if update_info.delta:
            changed = _FlatCopy(pieces(update_info.delta))
            self._receive(changed.layout, verify=verify, taker=changed)
            kept.change(changed.memory[: update_info.delta], update_info)
        else:
            kept.label = ""
            self._receive(self._layout, verify=verify, taker=kept)
        kept.label = label
        # copies: nothing that a model does with them may reach what the next delta begins from
        weights = self._layout.tensors(kept.memory)
        self._load((name, weight.to(self.device, copy=True)) for name, weight in weights)

    def _receive(self, layout: Layout, *, verify: bool, taker: _FlatCopy | None = None) -> None:
        """Receive all buckets, into the model or into what takes them in its place."""
        stream = NCCLWeightTransferUpdateInfo(
            names=[entry.name for entry in layout.entries],
            dtype_names=[dtype for _, _, dtype in layout.metadata],
            shapes=[list(entry.shape) for entry in layout.entries],
        )
        with self._instead(taker or self.model):
            self.model_update_group.begin(layout, verify=verify)
            try:
                super().receive_weights(stream)
            finally:
                self.model_update_group.end()

    def attend(self, update_info: dict[str, Any]) -> None:
        """Take part in a broadcast without loading: what comes is dropped, or kept for deltas."""
        with self._instead(_Nothing()):
            self.update_weights(update_info)


class _Nothing:
    """Stands where a model takes weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load nothing."""


class _FlatCopy:
    """Stands where a model takes weights, and copies them into host memory. label: of the version
    there, "" while it is written, so that no delta begins from a part of one.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.label = layout, ""
        # zeros between the tensors, as in the sender's copies: checksums are of all bytes
        self.memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._views = dict(layout.tensors(self.memory))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights."""
        for name, weight in weights:
            self._views[name].copy_(weight)

    def change(self, changed: Tensor, announced: BroadcastInfo) -> None:
        """Make the next version by a delta. Raises TornTransfer where it begins from another."""
        if announced.base != self.label:
            raise TornTransfer(
                f"what changed since {announced.base} came to an engine that has "
                f"{self.label or 'no version'}; weights were not loaded"
            )
        self.label = ""
        apply(changed.numpy(), self.memory.numpy(), (announced.base, announced.label))
        if announced.checksums:
            self.layout.verify(self.memory, announced.checksums)


class WorkerExtension:
    """Calls that the front end makes on every worker beside vLLM's own."""

    # of vLLM's worker
    model_runner: Any
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool
    weight_transfer_engine: Any

    def connect_weights(self, init_info: dict[str, Any]) -> dict[str, str]:
        """Prepare for publications; {} or what failed."""
        return _outcome(lambda: self.init_weight_transfer_engine(init_info))

    def take_publication(
        self, update_info: dict[str, Any], adapter: list[Any] | None = None
    ) -> dict[str, str]:
        """Load one publication; {} or what failed, after which the next starts from nothing. Of an
        adapter: its number, and those that are kept.
        """

        def take() -> None:
            if adapter is not None:
                self.weight_transfer_engine.take_adapter(update_info, *adapter)
                return
            self._weight_update_active = False
            self.start_weight_update()
            self.update_weights(update_info)
            self.finish_weight_update()

        return _outcome(take)

    def attend_publication(self, update_info: dict[str, Any]) -> dict[str, str]:
        """Take part in one publication without loading it; {} or what failed."""
        return _outcome(lambda: self.weight_transfer_engine.attend(update_info))

    def cached_tokens(self) -> int:
        """Count the tokens in the caches of running responses."""
        runner = self.model_runner
        if hasattr(runner, "requests"):
            # Not of its batch: a paused scheduler may have run an empty step, which empties that.
            return sum(int(request.num_computed_tokens) for request in runner.requests.values())
        states = runner.req_states  # vLLM's second model runner
        return int(states.num_computed_tokens_np[list(states.req_id_to_index.values())].sum())


def _outcome(work: Callable[[], None]) -> dict[str, str]:
    """{} or {failure, reason} as in Receipt: vLLM's processes do not keep the class of an error."""
    try:
        work()
    except NamesDiffer as error:
        return {"failure": "names", "reason": str(error)}
    except TransferMismatch as error:
        return {"failure": "mismatch", "reason": str(error)}
    except (TornTransfer, TimeoutError, OSError) as error:
        return {"failure": "torn", "reason": str(error)}
    return {}


stacks.register_child("engine")
for _engine in (SharedMemoryEngine, IpcEngine, NcclEngine):
    if transfer_name(_engine.transport) not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(transfer_name(_engine.transport), _engine)
