"""A model's safetensors files, written by all ranks together, tensor by tensor.

Runs in: learner ranks. Hides the format (a header with every tensor's place, then their bytes: the
safetensors README) and which rank writes which file. Invariants: a rank holds one tensor of what it
writes in host memory, whatever the size of the model; files are cut in the order of the weights, so
that any number of ranks writes the same tensors, and a model of up to 4 GiB is one file; an index
names the file of every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from async_grpo.learner.division import Division
from async_grpo.learner.storage_writes import Writes

INDEX = "model.safetensors.index.json"
FILE_BYTES = 2**32
"""Largest file, but for a larger tensor."""
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}

Metadata = Sequence[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype name of every tensor, in the order of the weights."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file: which rank writes it, and the tensors in it."""

    name: str
    rank: int
    entries: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(_nbytes(shape, dtype) for _, shape, dtype in self.entries)

    def header(self) -> bytes:
        """Return what comes before the tensors."""
        places: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape, dtype in self.entries:
            end = at + _nbytes(shape, dtype)
            places[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(places, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * int(getattr(torch, dtype).itemsize)


def divide(metadata: Metadata, ranks: int) -> list[WeightFile]:
    """Cut the weights into files, which the ranks take in turn."""
    total = sum(_nbytes(shape, dtype) for _, shape, dtype in metadata)
    size = total if total <= FILE_BYTES else min(FILE_BYTES, -(-total // ranks))
    parts: list[list[tuple[str, tuple[int, ...], str]]] = []
    held = size + 1
    for entry in metadata:
        nbytes = _nbytes(*entry[1:])
        if held + nbytes > size or not parts:
            parts.append([])
            held = 0
        parts[-1].append(entry)
        held += nbytes
    return [
        WeightFile(f"model-{number + 1:05d}.safetensors", number % ranks, tuple(part))
        for number, part in enumerate(parts)
    ]


def write(
    metadata: Metadata,
    weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    *,
    rank: int,
    ranks: int,
    out: Writes,
) -> None:
    """Write this rank's files and, as rank 0, the index. Collective where reading weights is: every
    rank exhausts them. What fails is in `out`.
    """
    files = divide(metadata, ranks)
    owner = {name: file for file in files for name, _, _ in file.entries}
    last = {file.name: file.entries[-1][0] for file in files}
    opened: BufferedWriter | None = None

    def put(file: WeightFile, name: str, tensor: Tensor) -> None:
        nonlocal opened
        if opened is None:
            directory.mkdir(parents=True, exist_ok=True)
            opened = open(directory / file.name, "wb")  # noqa: SIM115 - closed with its last tensor
            opened.write(file.header())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        opened.write(memoryview(data.numpy()))
        if name == last[file.name]:
            opened.close()
            opened = None

    try:
        for name, tensor in weights:
            file = owner[name]
            if file.rank == rank:
                out.do(partial(put, file, name, tensor))
    finally:
        if opened is not None:
            opened.close()
    if rank == 0:
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in files)},
            "weight_map": {name: file.name for name, file in owner.items()},
        }
        text = json.dumps(index, indent=1)
        out.do(lambda: (directory / INDEX).write_text(text, encoding="utf-8"))


def read(module: torch.nn.Module, directory: Path, *, division: Division) -> None:
    """Copy the parameters of a module from files that `write` wrote, one at a time."""
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    for name, parameter in module.named_parameters():
        with (
            safe_open(directory / index[name], "pt") as file,
            torch.no_grad(),
            division.gathered([parameter], modify=True),
        ):
            parameter.data.copy_(file.get_tensor(name))
