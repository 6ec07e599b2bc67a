"""How much memory a run needs, before it is started: arithmetic on settings and the model's shape.

Runs in: anywhere. Hides transformers' and peft's classes, which count parameters on torch's `meta`
device from `config.json` alone: no weight is read. Counts what grows with the model; libraries'
code and buffers come on top. Sources: ZeRO (arXiv 1910.02054); the factors of activations were
measured on packed rows of a Qwen2 model with SwiGLU.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from async_grpo.algo.logprobs import CHUNK_BYTES
from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS
from async_grpo.learner import adapters
from async_grpo.learner.attention import heads_of
from async_grpo.learner.batching import REPEATED
from async_grpo.learner.division import GPU_GATHER_BYTES
from async_grpo.learner.experts import expert_share
from async_grpo.learner.model import PolicyModel, model_class
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.frozen import engine_config
from async_grpo.runtime.parts import needed
from async_grpo.weights.layout import AHEAD_BYTES
from async_grpo.weights.transport import PACKED_BYTES


@dataclass(frozen=True, slots=True)
class Shape:
    """`parameters` of the model as engines get it, tied ones once; `trained` ones, adapters
    included; `frozen` ones; its main dimensions. intermediate: what a token sees, of all the
    experts that it is routed to. kv_heads: 0 without attention. active: parameters that a token is
    multiplied with, if not all. experts: of a token, in a layer that has some. heads: query heads,
    which ranks that share sequences divide; 0 where a recurrence needs a whole one.
    """

    parameters: int
    trained: int
    frozen: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    active: int = 0
    experts: int = 0
    heads: int = 0
    can_recompute: bool = True
    """Whether its activations can be recomputed in the backward pass."""


def shape_of(config: Config, model: str | PretrainedConfig | None) -> Shape:
    """Count the parameters of a model by directory, hub name or configuration, or of the one to be
    warm-started (None). Raises SetupError where `model.lora` or `model.freeze` do not fit, OSError
    or ValueError for an unreadable one.
    """
    trust = config.model.trust_remote_code
    if isinstance(model, str):
        model = AutoConfig.from_pretrained(model, trust_remote_code=trust)
    with torch.device("meta"):
        if model is None:
            hf = _warm_started(config)
        else:
            hf = model_class(model).from_config(model, trust_remote_code=trust)
    parameters = sum(parameter.numel() for parameter in hf.parameters())
    PolicyModel(hf, float32_head=False)  # its head is no layer for adapters
    adapters.restrict(hf, config.model, seed=config.seed, base=str(config.model.path))
    total = sum(parameter.numel() for parameter in hf.parameters())
    trained = sum(parameter.numel() for parameter in hf.parameters() if parameter.requires_grad)
    text = hf.config.get_text_config()
    heads = heads_of(text)
    experts = expert_share(hf)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return Shape(
        parameters=parameters,
        trained=trained,
        frozen=total - trained,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=experts.intermediate if experts else inner,
        vocabulary=text.vocab_size,
        kv_heads=heads.groups,
        head_dim=heads.size,
        active=parameters - experts.idle if experts else 0,
        experts=experts.chosen if experts else 0,
        heads=0 if hf._is_stateful else heads.count,
        can_recompute=hf.supports_gradient_checkpointing,
    )


def _warm_started(config: Config) -> PreTrainedModel:
    made = needed("small_model", "`model.warm_start`")
    return made.build_model(config.model.warm_start, made.build_tokenizer())


MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Float32 bytes per trained parameter: DeepSpeed's copy, gradient, AdamW's two averages."""
ENGINE_CODE, LEARNER_CODE, OTHER_CODE = 1.3 * 2**30, 0.5 * 2**30, 1.7 * 2**30
"""Bytes that the libraries of an engine and of a learner rank take on CPU, and all other processes
(driver, rollout actor, queue, Ray's, the system's), measured.
"""
STAGED = 2
"""Copies of the weights on their way to engines: of two versions, in shared memory."""
HEAP = 1.25
"""Multiple of activations that a CPU process holds: its allocator gives back some later. Measured
at the second step of SmolLM2-135M on 1,024 tokens.
"""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's own `reduce_bucket_size`."""
HIDDEN_PER_TOKEN, INTERMEDIATE_PER_TOKEN = 12.5, 4.0
"""Numbers kept for the backward pass per token and layer, in hidden and intermediate sizes."""
HIDDEN_PER_POSITION = 4.0
"""Those among them that attention keeps; it works on rows with their prompts in front, shared or
not, so on more positions than tokens.
"""
LOGIT_CHUNKS = 3
"""Pieces of logits that live at once in the backward pass."""
GPU_CONTEXT = 2**30
"""CUDA's context, kernels and workspaces of a process, and the same again for NCCL's buffers where
there are several ranks. An estimate.
"""
FRAGMENTATION = 0.03
"""Share of what a GPU process holds that its allocator cannot give out again. An estimate."""
LIVE_PARAMETERS = SUB_GROUP = 1_000_000_000
"""DeepSpeed's own `stage3_max_live_parameters` and `sub_group_size`."""
_SHAPES: dict[str, Shape] = {}
"""Of frozen models, by directory or hub name."""
PACKS = 4
"""Packs of a broadcast that lie on rank 0's GPU: two under way, each copied and joined."""


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes of one rank: weights, gradients, the optimizer's states, DeepSpeed's buckets (at most),
    a micro-batch's activations, the reference, weights on their way to engines, and what the
    libraries take on a GPU.
    """

    weights: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    reference: int
    publication: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))

    @property
    def lent(self) -> int:
        """What stays on the GPU in an engine's turn."""
        return self.publication + self.context


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes per engine GPU or process: weights, KV cache (None: vLLM's choice), KV of a token."""

    weights: int
    kv_cache: int | None
    kv_token: int
    longest: int
    """Tokens of the longest row."""
    rest: int = 0
    """Of the libraries on a GPU, activations and CUDA graphs."""
    adapters: int = 0
    """Of the weights: slots for adapters."""

    def rows(self, kv_cache: int) -> int:
        """Responses of full length whose cache fits at the same time."""
        return kv_cache // max(self.kv_token * self.longest, 1)


def element_bytes(config: Config, device: str) -> int:
    """Bytes per number in `model.dtype`."""
    dtype = config.model.dtype
    return 4 if dtype == "float32" or (dtype == "auto" and device == "cpu") else 2


CPU_BFLOAT16 = "avx512_bf16", "amx_bf16"
"""Features of a processor that multiplies bfloat16. With the first one, on an AMD EPYC, engines of
13 million parameters and whole steps of 135 million are 1.6 and 1.7 times as fast; without any, a
product is some forty times as slow as in float32.
"""


def cpu_bfloat16() -> str | None:
    """Return the feature with which this processor multiplies bfloat16; None where it has none."""
    features = torch.cpu.get_capabilities()
    return next((name for name in CPU_BFLOAT16 if features.get(name)), None)


def learner_memory(
    config: Config, shape: Shape, *, device: str, stage: int, backend: str = ""
) -> LearnerMemory:
    """Peak of rank 0; ZeRO 1 shards the optimizer's states, 2 gradients too, 3 weights too; what
    `learner.deepspeed` offloads lies in host memory. Buckets hold what is there for a while: what
    is reduced, the flat gradients that the optimizer reads, and with ZeRO-3 the layers that are
    whole for their turn. backend: the weight transport.
    """
    ranks, size = config.learner.ranks, element_bytes(config, device)
    sharded = [ranks if stage >= least else 1 for least in (1, 2, 3)]
    heap = HEAP if device == "cpu" else 1.0
    master = MASTER if stage > 0 else 0
    zero = config.learner.deepspeed.get("zero_optimization", {})
    bucket = int(zero.get("reduce_bucket_size", BUCKET_ELEMENTS)) if stage > 0 else BUCKET_ELEMENTS
    buckets = min(bucket, shape.trained) * size
    if stage == 1 and size == 2:  # one gradient at a time is added to the flat float32 ones
        buckets = min(shape.vocabulary * shape.hidden, shape.trained) * size
    elif stage in (1, 2):
        buckets *= 2 if zero.get("overlap_comm") else 1  # one is filled while one is sent
        buckets += shape.trained // ranks * size
    elif stage == 3:
        piece = int(zero.get("sub_group_size", SUB_GROUP))
        buckets += min(piece, shape.trained // ranks) * GRADIENT
        if ranks > 1:
            live = int(zero.get("stage3_max_live_parameters", LIVE_PARAMETERS)) * size
            if device != "cpu":  # or what a weight sync gathers, and still copies
                live = max(live, GPU_GATHER_BYTES + AHEAD_BYTES)
            buckets += min(live, (shape.trained + shape.frozen) * size)
    moved = [key for key in ("offload_optimizer", "offload_param") if _offloads(zero.get(key))]
    has_reference = config.algorithm.uses_reference and config.model.lora is None
    need = LearnerMemory(
        weights=0
        if "offload_param" in moved
        else (shape.trained + shape.frozen) * size // sharded[2],
        gradients=0 if moved else shape.trained * GRADIENT // sharded[1],
        optimizer=0 if moved else shape.trained * (master + MOMENTS) // sharded[0],
        buckets=buckets,
        activations=int(heap * activation_bytes(config, shape, size=size)),
        reference=shape.parameters * size // sharded[2] if has_reference else 0,
        publication=_publication_bytes(shape, size=size, backend=backend),
    )
    if device == "cpu":
        return need
    context = GPU_CONTEXT * (2 if ranks > 1 else 1) + int(need.total * FRAGMENTATION)
    return replace(need, context=context)


def _offloads(settings: object) -> bool:
    """Whether an `offload_*` section of DeepSpeed moves anything."""
    return isinstance(settings, dict) and settings.get("device") in ("cpu", "nvme")


def _publication_bytes(shape: Shape, *, size: int, backend: str) -> int:
    """On rank 0's GPU: a copy that the engine beside it reads, or the packs of a broadcast."""
    transport, whole = TRANSPORTS.get(backend), shape.parameters * size
    if transport is None or not transport.needs_gpu:
        return 0
    if transport.colocated:
        return whole
    largest = max(shape.vocabulary * shape.hidden * size, PACKED_BYTES)
    return min(PACKS * largest, 2 * whole)


def activation_bytes(config: Config, shape: Shape, *, size: int) -> int:
    """Of one rank's part of a micro-batch: all layers', or with gradient checkpointing one layer's
    and the input of each, where those are not in host memory; and three pieces of logits.
    """
    rollout, share = config.rollout, config.learner.sequence_parallel
    rows = config.mini_batch_groups * rollout.group_size // config.learner.teams or 1
    # responses share their prompt; rows of episodes may each have one of their own
    prompts = min(rows, config.mini_batch_groups) if rollout.context_length is None else rows
    longest = rows * rollout.longest_row
    most = longest - (rows - prompts) * rollout.prompt_length
    budget = config.micro_batch_tokens
    # in attention a rank has all positions, and its part of the heads, of an odd number the larger
    part = -(-shape.heads // share) / shape.heads if shape.heads else 1 / share
    tokens, positions = min(budget, most) // share, min(REPEATED * budget, longest) * part
    layer = tokens * (HIDDEN_PER_TOKEN * shape.hidden + INTERMEDIATE_PER_TOKEN * shape.intermediate)
    layer += (positions - tokens) * HIDDEN_PER_POSITION * shape.hidden
    if not config.learner.recomputes:
        kept = layer * shape.layers
    elif config.learner.activation_offload:
        kept = layer + 2 * tokens * shape.hidden  # of one layer, and of the one that is fetched
    else:
        kept = layer + shape.layers * tokens * shape.hidden
    return int(kept * size) + LOGIT_CHUNKS * min(tokens * shape.vocabulary * 4, CHUNK_BYTES)


def engine_memory(
    config: Config, shape: Shape, *, device: str, kv_cache_gb: float | None
) -> EngineMemory:
    """Memory of one engine GPU or process. kv_cache_gb: None where vLLM chooses."""
    size = element_bytes(config, device)
    tensor_parallel = config.cluster.engine.tensor_parallel_size
    heads = max(1, shape.kv_heads // tensor_parallel) if shape.kv_heads else 0
    slots, lora = config.adapter_slots * size, config.model.lora
    if slots and lora is not None:
        slots *= shape.trained * ENGINE.adapter_rank(lora.rank) // lora.rank
    return EngineMemory(
        weights=shape.parameters * size // tensor_parallel + slots,
        kv_cache=None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
        kv_token=2 * shape.layers * heads * shape.head_dim * size,
        longest=config.rollout.longest_row,
        rest=0 if device == "cpu" else ENGINE.gpu_bytes,
        adapters=slots,
    )


def frozen_memory(config: Config, *, device: str, backend: str) -> dict[str, EngineMemory]:
    """Memory of the engine of each frozen model, by name."""
    found = {}
    for name in config.frozen_here:
        own = engine_config(config, name)
        cache = ENGINE.kv_cache_gb(own, device=device, backend=backend)
        found[name] = engine_memory(own, _shape_of(own), device=device, kv_cache_gb=cache)
    return found


def _shape_of(config: Config) -> Shape:
    """Count the parameters of `model.path` as it is, once."""
    key = str(config.model.path)
    if key not in _SHAPES:
        _SHAPES[key] = shape_of(config, key)
    return _SHAPES[key]


def size_text(count: float) -> str:
    """Write bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.{0 if count >= 100 or unit == 'bytes' else 1}f} {unit}"
        count /= 1024
    raise AssertionError
