"""A small copy of a model: its architecture with few layers and tokens, and random weights.

Runs in: learner ranks, and whoever looks at a model before a run. Hides which numbers of a
configuration may be smaller, which no list can know: candidates are made from small to large, and
whoever asked tries them in turn. Windows and chunks become shorter than a few rows, so that short
rows show what they do. Source of the names: the configurations of transformers.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY, WINDOW, CHUNK, EXPERTS = 128, 8, 32, 4
LARGEST = 400_000_000
"""Parameters of a copy, at most; a larger one would take seconds and gigabytes."""
_WINDOW = re.compile(r"(^|_)(window|window_size|sliding_window)$")
_CHUNK = re.compile(r"(^|_)chunk_size$")
_EXPERTS = re.compile(r"(^|_)(num_|n_|num_local_|n_routed_|moe_num_)(local_|routed_)?experts$")
_GROUPS = ("n_group", "topk_group")


def short_windows(config: PretrainedConfig, longest_row: int) -> list[str]:
    """Name the keys of windows that are shorter than rows."""
    return [
        key
        for key, value in vars(config.get_text_config()).items()
        if _WINDOW.search(key) and isinstance(value, int) and value < longest_row
    ]


def candidates(
    config: PretrainedConfig, *, longest_row: int | None = None
) -> Iterator[PretrainedConfig]:
    """Make configurations of copies, the smallest first, the unchanged one last. Not each of them
    need be one that a model can be made from. longest_row: windows that are as long stay as they
    are; None: no window does.
    """
    windows = None if longest_row is None else short_windows(config, longest_row)
    for narrow in (True, False):
        small = copy.deepcopy(config)
        text = small.get_text_config()
        _shorten(text)
        for key, value in list(vars(text).items()):
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if _WINDOW.search(key):
                if windows is None or key in windows:
                    setattr(text, key, min(value, WINDOW))
            elif _CHUNK.search(key):  # engines want multiples of a cache's block
                setattr(text, key, min(value, CHUNK))
            elif _EXPERTS.search(key):
                setattr(text, key, min(value, EXPERTS))
            elif key in _GROUPS:
                setattr(text, key, 1)
        if (getattr(text, "num_experts_per_tok", None) or 0) > 2:
            text.num_experts_per_tok = 2
        _fewer_words(text)
        if narrow:
            _narrow(text)
        for part in {id(text): text, id(small): small}.values():
            part.dtype = torch.float32
            if hasattr(part, "initializer_range"):
                part.initializer_range = 0.1
        yield small
    yield copy.deepcopy(config)


def build(config: PretrainedConfig, auto: Any, **arguments: Any) -> PreTrainedModel:
    """Make a model of a copy's configuration, in float32, with the same weights at every call; no
    bias is 0 and no norm 1. Raises ValueError where it is too large, and whatever transformers
    raises for a configuration that makes no model.
    """
    with torch.device("meta"):
        counted = auto.from_config(config, **arguments)
    count = sum(parameter.numel() for parameter in counted.parameters())
    if count > LARGEST:
        raise ValueError(f"a copy would have {count:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf: PreTrainedModel = auto.from_config(copy.deepcopy(config), **arguments).float()
        with torch.no_grad():
            for tensor in hf.state_dict().values():
                if tensor.is_floating_point() and tensor.dim() <= 1:
                    tensor.add_(0.05 * torch.randn(tensor.shape))
    return hf


def limits(config: PretrainedConfig) -> tuple[range, int]:
    """Return ids that a model has and that mean nothing special, and how many tokens a row of it
    may have.
    """
    text = config.get_text_config()
    words = min(getattr(text, "vocab_size", VOCABULARY), VOCABULARY)
    positions = getattr(text, "max_position_embeddings", None)
    ids = range(3, words - 6) if words > 10 else range(words)
    return ids, positions if isinstance(positions, int) else sys.maxsize


def _shorten(text: PretrainedConfig) -> None:
    """Keep the first layers: two, or as many as have one of every kind."""
    layers = text.num_hidden_layers
    kinds = next(
        (value for key, value in vars(text).items() if key.endswith(("layer_types", "block_type"))
         and isinstance(value, list) and len(value) == layers),
        [],
    )  # fmt: skip
    most = 2
    while most < len(kinds) and set(kinds[:most]) != set(kinds):
        most += 1
    if most >= layers:
        return
    for key, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(text, key, value[:most])
    text.num_hidden_layers = most


def _fewer_words(text: PretrainedConfig) -> None:
    """Cut the vocabulary, and move ids that lie behind its end."""
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if getattr(text, key, 0):
            setattr(text, key, min(getattr(text, key), VOCABULARY))
    for key, value in list(vars(text).items()):
        if key.endswith(("_token_id", "_token_index")) and value is not None:
            setattr(text, key, 1 if key == "eos_token_id" else 0)


def _narrow(text: PretrainedConfig) -> None:
    """Keep up to two groups of heads, of the same size."""
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or not isinstance(getattr(text, "hidden_size", None), int):
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    fewer = min(groups, 2)
    text.num_attention_heads = fewer * min(heads // groups, 2)
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = fewer
    text.hidden_size = text.num_attention_heads * size
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if isinstance(getattr(text, key, None), int):
            setattr(text, key, min(getattr(text, key), 2 * text.hidden_size))
