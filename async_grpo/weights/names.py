"""Compare the tensors that the learner publishes with those of the files that engines load.

Runs in: learner ranks at their start, and engine workers, once per connection. Without an error, an
engine ignores a name that it does not know and keeps old values under a name that never comes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from async_grpo.errors import SetupError
from async_grpo.runtime.text import listed

_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|(^|\.)mtp\.")
"""Tensors in model files that neither learner nor engine loads."""
_SHOWN = 8


class NamesDiffer(SetupError):
    """The learner publishes other tensors than the engine has."""


def check_names(
    files: Mapping[str, tuple[int, ...]],
    metadata: Sequence[Sequence[Any]],
    *,
    tied: bool,
    where: str,
) -> None:
    """Raise NamesDiffer with the missing, extra, duplicate and differently shaped tensors.

    files: name -> shape; metadata: [name, shape, dtype] of every published tensor; tied: whether
    the head may be missing; where: the model.
    """
    expected = {name: shape for name, shape in files.items() if not _NOT_WEIGHTS.search(name)}
    published = {name: tuple(shape) for name, shape, _ in metadata}
    missing = [
        name
        for name in expected
        if name not in published and not (tied and name.endswith("lm_head.weight"))
    ]
    extra = [name for name in published if name not in expected]
    shapes = [
        f"{name} {published[name]} instead of {expected[name]}"
        for name in published
        if name in expected and published[name] != expected[name]
    ]
    twice = [name for name, count in Counter(name for name, _, _ in metadata).items() if count > 1]
    kinds = {"missing": missing, "extra": extra, "twice": twice, "of another shape": shapes}
    if found := [f"{kind}: {listed(names, _SHOWN)}" for kind, names in kinds.items() if names]:
        raise NamesDiffer(
            f"the learner's tensors are not those that the engine loads from {where}; "
            f"{'; '.join(found)}. Train a model whose architecture both name alike"
        )


def file_shapes(model: str, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Read name -> shape of every tensor from the headers of a model's files. model: a directory,
    or a name of the hub. Raises NamesDiffer where there are none.
    """
    directory = Path(model)
    if not directory.is_dir():
        directory = Path(cached_file(model, "config.json", revision=revision)).parent
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name.startswith("consolidated"):  # the same weights in another layout
            continue
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if not shapes:
        for path in sorted(directory.glob("*.bin")):
            shapes |= _shapes_of_pickle(path)
    if not shapes:
        raise NamesDiffer(
            f"{directory} has no *.safetensors and no *.bin file to compare the learner's "
            "tensors with"
        )
    return shapes


def _shapes_of_pickle(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes in a file of `torch.save`. Raises NamesDiffer where it is none."""
    try:
        try:
            tensors = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        except RuntimeError:  # a file of the format before torch 1.6 cannot be mapped
            tensors = torch.load(path, map_location="meta", weights_only=True)
    except (EOFError, RuntimeError, UnpicklingError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise NamesDiffer(f"{path} holds no weights that torch reads: {reason}") from error
    found = tensors.items() if isinstance(tensors, dict) else ()
    return {name: tuple(one.shape) for name, one in found if isinstance(one, torch.Tensor)}
