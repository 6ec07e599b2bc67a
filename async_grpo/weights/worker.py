"""The engine workers' half of the shared-memory transport, as a vLLM weight-transfer engine.

Runs in: vLLM EngineCore and worker processes. vLLM imports this module there because `WorkerExtension` is named as its
`worker_extension_cls`; importing it registers the engine. `nccl` and `ipc` are vLLM's own engines and need nothing from here.

Invariant: after `finish_weight_update` every layer computes with the new weights. On CPU a tied LM head keeps a packed copy of the
embedding that a layerwise reload does not refresh, so it is packed again here; the self-check at start would find it otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_grpo.weights.shared_memory import SegmentReader


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Layout of the segments: [name, dtype, shape, offset] per tensor, and the size of a segment in bytes."""

    layout: list[list[Any]]
    nbytes: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which segment holds the publication, and its sequence number."""

    path: str
    sequence: int


class SharedMemoryWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a publication from a shared-memory segment."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _reader: SegmentReader | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._reader = SegmentReader(init_info.layout, init_info.nbytes)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._reader is None:
            raise RuntimeError("the engine was told to load weights before it was told their layout")
        self.model.load_weights(self._reader.tensors(update_info.path, update_info.sequence))
        self._announced = update_info

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)
        # The layerwise reload may read the segment as late as here.
        self._reader.verify(self._announced.path, self._announced.sequence)

    def shutdown(self) -> None:
        self._reader = None


class WorkerExtension:
    """Named in the engine arguments so that vLLM imports this module in its worker processes."""


def _register() -> None:
    if "shared_memory" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("shared_memory", SharedMemoryWeightEngine)


_register()
