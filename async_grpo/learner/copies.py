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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from async_grpo.learner.attention import heads_of

VOCABULARY, WINDOW, CHUNK, EXPERTS = 128, 8, 32, 4
LARGEST = 400_000_000
"""Parameters of a copy, at most; a larger one would take seconds and gigabytes."""
_WINDOW = re.compile(r"(^|_)(?<!keep_)(window|window_size|sliding_window)$")
"""Of neighbours. A `keep_window_size` is how many keys are chosen by their values: between two that
are nearly alike rounding decides, so that a copy that has to choose is never exact everywhere.
"""
_CHUNK = re.compile(r"(^|_)chunk_size$")
_EXPERTS = re.compile(r"(^|_)(num_|n_|num_local_|n_routed_|moe_num_)(local_|routed_)?experts$")
_FEWER = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
_DEPTH = re.compile(r"(^|_)(layers|depth)$")


class TooLarge(ValueError):
    """A copy that would take seconds and gigabytes."""


def short_windows(config: PretrainedConfig, longest_row: int) -> list[str]:
    """Name the keys of windows that are shorter than rows."""
    text = config.get_text_config()
    numbers = [vars(text), *_of_layers(text).values()]
    return sorted(
        {
            key
            for part in numbers
            for key, value in part.items()
            if _WINDOW.search(key) and isinstance(value, int) and value < longest_row
        }
    )


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
        _lower(text, partial(_most, windows=windows))
        _fewer_words(text)
        for tower in _towers(small, text):
            _shorten_tower(tower)
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
    bias is 0 and no norm 1. Raises TooLarge, and whatever transformers raises for a configuration
    that makes no model.
    """
    with torch.device("meta"):
        counted = auto.from_config(config, **arguments)
    count = sum(parameter.numel() for parameter in counted.parameters())
    if count > LARGEST:
        raise TooLarge(f"a copy would have {count:,} parameters")
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
    layers = getattr(text, "num_hidden_layers", 0)
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


def _of_layers(text: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Return what layers have of their own, instead of the numbers that the others share."""
    if not getattr(text, "is_heterogeneous", False):
        return {}
    return {int(index): own for index, own in text.to_dict()["per_layer_config"].items()}


def _most(key: str, windows: list[str] | None) -> int | None:
    """Return the largest number that a copy has under a key; None: the model's."""
    if _WINDOW.search(key):
        return WINDOW if windows is None or key in windows else None
    if _CHUNK.search(key):  # engines want multiples of a cache's block
        return CHUNK
    if _EXPERTS.search(key):
        return EXPERTS
    return _FEWER.get(key)


def _lower(text: PretrainedConfig, most: Callable[[str], int | None]) -> None:
    """Lower the numbers of a configuration, also those that layers have of their own."""
    known_as = {key: name for name, key in text.attribute_map.items()}

    def lowered(part: dict[str, Any]) -> dict[str, int]:
        largest = {key: most(known_as.get(key, key)) for key in part}
        return {
            key: min(part[key], bound)
            for key, bound in largest.items()
            if bound is not None and isinstance(part[key], int) and not isinstance(part[key], bool)
        }

    layers = {index: own | lowered(own) for index, own in _of_layers(text).items()}
    for key, value in lowered(vars(text)).items():
        setattr(text, key, value)
    if layers:
        text.per_layer_config = {
            index: own for index, own in layers.items() if index < text.num_hidden_layers
        }


def _towers(config: PretrainedConfig, text: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield the configurations beside the text's: what sees, hears, or speaks."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if not isinstance(part, PretrainedConfig) or part is text:
            continue
        if text in [getattr(part, inner, None) for inner in part.sub_configs]:
            yield from _towers(part, text)
        else:
            yield part
            yield from _towers(part, text)


def _shorten_tower(tower: PretrainedConfig) -> None:
    """Keep few layers of a tower, which no text goes through."""
    numbers = dict(vars(tower))
    for key, depth in numbers.items():
        if not _DEPTH.search(key) or not isinstance(depth, int) or depth <= 2:
            continue
        for other, value in numbers.items():
            if isinstance(value, (list, tuple)) and len(value) == depth:
                setattr(tower, other, value[:2])
        setattr(tower, key, 2)


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
    heads = heads_of(text)
    if not heads.count or not isinstance(getattr(text, "hidden_size", None), int):
        return
    fewer = min(heads.groups, 2)
    count = fewer * min(heads.count // heads.groups, 2)
    text.hidden_size = count * heads.size
    inner = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    most = dict.fromkeys(inner, 2 * text.hidden_size)
    _lower(text, (most | {"num_attention_heads": count, "num_key_value_heads": fewer}).get)
