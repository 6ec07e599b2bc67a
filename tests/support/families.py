"""Tiny models of many architectures, with random weights in which nothing is zero or one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from async_grpo.learner.attention import ATTENTION
from async_grpo.learner.copies import build
from async_grpo.learner.experts import blocks
from async_grpo.learner.model import (
    ForwardPass,
    PolicyModel,
    model_class,
    without_auxiliary_losses,
    without_dropout,
)
from tests.support.models import write_tokenizer

VOCABULARY = 128
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = WIDE | {"num_key_value_heads": 2}
HEADED = GROUPED | {"head_dim": 32}
OLD = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **WIDE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
ROUTED = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
SMALL_EYE = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
EYE_TOKENS = {
    "vision_start_token_id": 120,
    "vision_end_token_id": 121,
    "image_token_id": 122,
    "video_token_id": 123,
}
MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
}
WINDOW = 8
"""Tokens that a layer sees, where it does not see all: fewer than rows have."""


@dataclass(frozen=True)
class Family:
    """kind: transformers' `model_type`. rows, head: the forward pass that is to be chosen."""

    kind: str
    values: dict[str, Any]
    rows: str = "packed"
    head: str = "plain"


def _packed(kind: str, *parts: dict[str, Any], **values: Any) -> Family:
    return Family(kind, _joined(parts, values))


def _own_head(kind: str, *parts: dict[str, Any], **values: Any) -> Family:
    return Family(kind, _joined(parts, values), head="own")


def _rows(kind: str, *parts: dict[str, Any], **values: Any) -> Family:
    return Family(kind, _joined(parts, values), rows="rows")


def _joined(parts: tuple[dict[str, Any], ...], values: dict[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for part in (*parts, values):
        joined |= part
    return joined


FAMILIES = {
    # plain attention over all tokens
    "llama": _packed("llama", HEADED),
    "llama_tied": _packed("llama", HEADED, tie_word_embeddings=True),
    "mistral": _packed("mistral", HEADED, sliding_window=None),
    "ministral3": _packed("ministral3", HEADED),
    "qwen2": _packed("qwen2", GROUPED),
    "qwen2_tied": _packed("qwen2", GROUPED, tie_word_embeddings=True),
    "qwen3": _packed("qwen3", HEADED),
    "qwen3_tied": _packed("qwen3", HEADED, tie_word_embeddings=True),
    "phi": _packed("phi", GROUPED),
    "phi3": _packed("phi3", GROUPED, sliding_window=None),
    "gemma": _packed("gemma", HEADED),
    "olmo": _packed("olmo", GROUPED),
    "olmo2": _packed("olmo2", GROUPED),
    "glm": _packed("glm", HEADED),
    "glm4": _packed("glm4", HEADED),
    "smollm3": _packed("smollm3", GROUPED, no_rope_layers=[1, 0]),
    "starcoder2": _packed("starcoder2", GROUPED),
    "stablelm": _packed("stablelm", GROUPED),
    "nemotron": _packed("nemotron", HEADED),
    "arcee": _packed("arcee", HEADED),
    "apertus": _packed("apertus", HEADED),
    "ernie4_5": _packed("ernie4_5", HEADED),
    "seed_oss": _packed("seed_oss", HEADED),
    "hunyuan_dense": _packed("hunyuan_v1_dense", HEADED),
    "hyperclovax": _packed("hyperclovax", HEADED),
    "diffllama": _packed("diffllama", GROUPED),
    "helium": _packed("helium", HEADED),
    "llama_yarn": _packed(
        "llama",
        HEADED,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "persimmon": _packed("persimmon", WIDE),
    "biogpt": _packed("biogpt", WIDE),
    "gpt2": _packed("gpt2", OLD),
    "gpt_bigcode": _packed("gpt_bigcode", OLD),
    "gpt_neox": _packed("gpt_neox", WIDE),
    "opt": _packed(
        "opt",
        hidden_size=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=128,
    ),
    # windows shorter than the rows
    "mistral_window": _packed("mistral", HEADED, sliding_window=WINDOW),
    "phi3_window": _packed("phi3", GROUPED, sliding_window=WINDOW),
    "starcoder2_window": _packed("starcoder2", GROUPED, sliding_window=WINDOW),
    "qwen2_window": _packed(
        "qwen2", GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma3": _packed(
        "gemma3_text", HEADED, ALTERNATING, query_pre_attn_scalar=32, sliding_window=WINDOW
    ),
    "gemma4": _packed(
        "gemma4_text",
        HEADED,
        ALTERNATING,
        global_head_dim=32,
        sliding_window=WINDOW,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    ),
    # heads of layers with a window and of those without differ in size and number
    "gemma4_heads": _packed(
        "gemma4_text",
        HEADED,
        ALTERNATING,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    ),
    "gemma4_unified": _packed(
        "gemma4_unified_text",
        HEADED,
        ALTERNATING,
        global_head_dim=64,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
    ),
    "cwm": _packed("cwm", HEADED, ALTERNATING, sliding_window=WINDOW, bos_token_id=2),
    "olmo3": _packed("olmo3", GROUPED, ALTERNATING, sliding_window=WINDOW),
    "exaone4": _packed("exaone4", HEADED, ALTERNATING, sliding_window=WINDOW),
    # logits scaled or capped, in attention or behind the head; sinks
    "gemma2": _own_head("gemma2", HEADED, query_pre_attn_scalar=32, sliding_window=WINDOW),
    "vaultgemma": _own_head("vaultgemma", HEADED, query_pre_attn_scalar=32),
    "cohere": _own_head("cohere", GROUPED, logit_scale=0.25),
    "cohere2": _own_head("cohere2", HEADED, sliding_window=512),
    "cohere2_window": _own_head("cohere2", HEADED, sliding_window=WINDOW),
    "granite": _own_head(
        "granite",
        GROUPED,
        logits_scaling=8.0,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
        attention_multiplier=0.1,
    ),
    "granite_swa": _packed("granite_swa", GROUPED),
    "minicpm3": _own_head("minicpm3", LATENT, q_lora_rank=32),
    "nanochat": _own_head("nanochat", HEADED),
    # mixtures of experts
    "qwen2_moe": _packed("qwen2_moe", GROUPED, EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": _packed("qwen3_moe", HEADED, EXPERTS),
    "olmoe": _packed("olmoe", GROUPED, num_experts=4, num_experts_per_tok=2),
    "mixtral": _packed("mixtral", HEADED, LOCAL_EXPERTS),
    "mixtral_window": _packed("mixtral", HEADED, LOCAL_EXPERTS, sliding_window=WINDOW),
    "phimoe": _packed("phimoe", GROUPED, LOCAL_EXPERTS),
    "granitemoe": _packed("granitemoe", GROUPED, LOCAL_EXPERTS),
    "granitemoeshared": _packed(
        "granitemoeshared", GROUPED, LOCAL_EXPERTS, shared_intermediate_size=64
    ),
    "dots1": _packed("dots1", HEADED, ROUTED, ALTERNATING, sliding_window=WINDOW),
    "exaone_moe": _packed("exaone_moe", HEADED, EXPERTS, ALTERNATING, sliding_window=WINDOW),
    "ernie4_5_moe": _packed(
        "ernie4_5_moe",
        HEADED,
        moe_intermediate_size=64,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
    ),
    "gpt_oss": _packed("gpt_oss", HEADED, LOCAL_EXPERTS, sliding_window=WINDOW),
    "deepseek_v2": _packed("deepseek_v2", LATENT, ROUTED, q_lora_rank=None),
    "deepseek_v3": _packed("deepseek_v3", LATENT, ROUTED, q_lora_rank=32, topk_method="noaux_tc"),
    "glm4_moe": _packed("glm4_moe", HEADED, ROUTED),
    "glm4_moe_groups": _packed(
        "glm4_moe", HEADED, ROUTED, n_routed_experts=8, n_group=2, topk_group=1
    ),
    # attention of the model's own, or chunks
    "falcon": _rows(
        "falcon",
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "gptj": _rows("gptj", OLD, rotary_dim=16),
    "codegen": _rows("codegen", OLD, rotary_dim=16),
    "gpt_neo": _rows(
        "gpt_neo",
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
    ),
    "bloom": _rows("bloom", hidden_size=128, n_layer=2, n_head=4),
    "mpt": _rows("mpt", d_model=128, n_layers=2, n_heads=4),
    "xglm": _rows("xglm", d_model=128, ffn_dim=256, num_layers=2, attention_heads=4),
    "doge": _rows("doge", GROUPED),
    "llama4": _rows(
        "llama4_text", HEADED, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=256
    ),
    # recurrences, and hybrids with them
    "mamba": _rows("mamba", hidden_size=128, num_hidden_layers=2, state_size=16),
    "mamba2": _rows(
        "mamba2",
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=32,
        n_groups=1,
        state_size=32,
    ),
    "falcon_h1": _rows(
        "falcon_h1",
        HEADED,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
    ),
    "nemotron_h": _rows(
        "nemotron_h",
        HEADED,
        layers_block_type=["mamba", "mlp", "attention", "mlp"],
        num_hidden_layers=4,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=32,
    ),
    "granite_hybrid": _rows(
        "granitemoehybrid",
        GROUPED,
        MAMBA,
        LOCAL_EXPERTS,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=64,
    ),
    "bamba": _rows("bamba", GROUPED, MAMBA, attn_layer_indices=[1]),
    "jamba": _rows(
        "jamba",
        GROUPED,
        num_experts=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=16,
    ),
    "lfm2": _rows(
        "lfm2",
        GROUPED,
        layer_types=["conv", "full_attention"],
        conv_dim=128,
        block_dim=128,
        block_multiple_of=1,
        block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=1.0,
    ),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        HEADED | {"num_hidden_layers": 3, "lru_width": 128, "attention_window_size": WINDOW},
        rows="rows",
        head="own",
    ),
    "qwen3_next": _rows("qwen3_next", HEADED, EXPERTS, DELTA, shared_expert_intermediate_size=64),
    "qwen3_5": _rows("qwen3_5_text", HEADED, DELTA),
    "olmo_hybrid": _rows(
        "olmo_hybrid", GROUPED, layer_types=["linear_attention", "full_attention"]
    ),
    "minimax": _rows("minimax", HEADED, LOCAL_EXPERTS),
    # with eyes
    "gemma3_vision": _packed(
        "gemma3",
        text_config=HEADED
        | {"vocab_size": VOCABULARY, "query_pre_attn_scalar": 32, "sliding_window": WINDOW},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        boi_token_index=120,
        eoi_token_index=121,
        image_token_index=122,
    ),
    "qwen2_5_vl": _packed(
        "qwen2_5_vl",
        EYE_TOKENS,
        text_config=GROUPED | MROPE | {"vocab_size": VOCABULARY},
        vision_config=SMALL_EYE | {"fullatt_block_indexes": [0], "window_size": 56},
    ),
    "qwen3_vl": _packed(
        "qwen3_vl",
        EYE_TOKENS,
        text_config=HEADED | MROPE | {"vocab_size": VOCABULARY},
        vision_config=SMALL_EYE | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    # whose files hold queries, keys and values in one tensor, and the model in three
    "qianfan_ocr": _packed(
        "qianfan_ocr",
        text_config=HEADED | {"model_type": "qwen3", "vocab_size": VOCABULARY},
        vision_config=TOWER | {"image_size": 56, "patch_size": 14},
        image_token_id=122,
    ),
    "kimi_k25": _packed(
        "kimi_k25",
        text_config=LATENT
        | ROUTED
        | {"model_type": "deepseek_v3", "vocab_size": VOCABULARY, "q_lora_rank": 32},
        vision_config=TOWER | {"pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=64,
        image_token_id=122,
        video_token_id=123,
        vision_start_token_id=120,
        vision_end_token_id=121,
        tie_word_embeddings=False,
    ),
}
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
_KEEPS = ("A_log", "dt_bias", ".D", "rg_lru", "conv", "_decay", "slope_rate")
"""Parts of names of weights whose sign or size a recurrence relies on."""


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    """Make the configuration of a family."""
    family = FAMILIES[name]
    values = copy.deepcopy(family.values) | changes
    if "text_config" in values:
        values["text_config"] = _COMMON | values["text_config"]
        common = {"eos_token_id": 1, "pad_token_id": 0}
    else:
        common = _COMMON
    return AutoConfig.for_model(family.kind, **(common | values))


def policy_of(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PolicyModel:
    """A family's model as a learner has it, the same one at every call."""
    family, config = FAMILIES[name], config_of(name, **changes)
    attention = ATTENTION if family.rows == "packed" else "sdpa"
    hf = build(config, model_class(config), attn_implementation=attention).to(dtype)
    if dtype == torch.float64 and any(blocks(hf)):
        hf.set_experts_implementation("eager")  # torch has no grouped product of doubles
    without_dropout(hf)
    without_auxiliary_losses(hf)
    forward_pass = ForwardPass(family.rows, attention, family.head)
    return PolicyModel(hf, float32_head=False, forward_pass=forward_pass).train()


def write_family(name: str, directory: Path) -> PreTrainedModel:
    """Write the files of a family's model and a tokenizer of characters, and return the model."""
    config = config_of(name)
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config).from_config(config).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or any(part in key for part in _KEEPS):
                continue
            noise = 0.1 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise if tensor.dim() >= 2 else tensor + noise)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model.eval()
