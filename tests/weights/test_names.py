"""The learner's tensors against the files that an engine was loaded from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from async_grpo.weights.names import NamesDiffer, check_names, file_shapes

TENSORS = {
    "embed.weight": torch.zeros(4, 2),
    "layers.0.weight": torch.zeros(2, 2),
    "layers.0.rotary_emb.inv_freq": torch.zeros(2),
}


def compare(directory: Path, metadata: list[tuple], *, tied: bool = False) -> None:
    where = str(directory)
    check_names(file_shapes(where), metadata, tied=tied, where=where)


def published(*names: str, shapes: dict[str, list[int]] | None = None) -> list[tuple]:
    known = {name: list(tensor.shape) for name, tensor in TENSORS.items()} | (shapes or {})
    return [(name, known.get(name, [1]), "float32") for name in names]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shapes_come_from_the_files_whatever_their_kind(tmp_path: Path, kind: str) -> None:
    if kind == "bin":
        torch.save(TENSORS | {"note": "no tensor"}, tmp_path / "pytorch_model.bin")
    else:
        save_file(TENSORS, tmp_path / "model.safetensors")
        save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert file_shapes(str(tmp_path)) == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    compare(tmp_path, published("embed.weight", "layers.0.weight"))


def test_every_difference_is_named(tmp_path: Path) -> None:
    save_file(TENSORS | {"lm_head.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    tensors = published(
        "layers.0.weight", "layers.0.weight", "new", shapes={"layers.0.weight": [2, 3]}
    )
    with pytest.raises(NamesDiffer) as caught:
        compare(tmp_path, tensors, tied=True)
    message = str(caught.value)
    for part in (
        "missing: embed.weight",
        "extra: new",
        "twice: layers.0.weight",
        "of another shape: layers.0.weight",
    ):
        assert part in message, message
    assert "lm_head" not in message, "a tied head is published as the embedding"


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(NamesDiffer, match=r"no \*\.safetensors and no \*\.bin file"):
        file_shapes(str(tmp_path))
