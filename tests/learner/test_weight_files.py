"""A model's safetensors files: their format, how ranks share them, and what fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from async_grpo.learner import weight_files
from async_grpo.learner.storage_writes import Writes
from async_grpo.learner.weight_files import INDEX, Metadata, divide, write


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {
        f"w.{number}": torch.randn(3 + number, 5).to(dtype)
        for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16] * 3)
    }
    return {
        **found,
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "odd": torch.arange(3, dtype=torch.uint8),
        "transposed": torch.arange(6.0).view(2, 3).t(),
    }


def metadata(values: dict[str, Tensor]) -> Metadata:
    return [
        (name, tuple(one.shape), str(one.dtype).removeprefix("torch."))
        for name, one in values.items()
    ]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("size", [2**32, 200])
def test_the_files_hold_every_tensor_bit_for_bit(
    tmp_path: Path, ranks: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", size)
    values = tensors()
    for rank in range(ranks):
        out = Writes()
        write(metadata(values), values.items(), tmp_path, rank=rank, ranks=ranks, out=out)
        assert out._error == ""
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(files[0], "pt") as first:
        assert first.metadata() == {"format": "pt"}
    assert len(files) == (1 if size > 1000 else len(divide(metadata(values), ranks)))
    assert (tmp_path / INDEX).is_file()


def test_files_are_cut_below_their_size_and_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", 100)
    entries = [(f"w{number}", (10,), "float32") for number in range(9)] + [
        ("large", (1000,), "float32")
    ]
    files = divide(entries, 2)
    assert [len(file.entries) for file in files] == [2, 2, 2, 2, 1, 1]
    assert [file.rank for file in files] == [0, 1, 0, 1, 0, 1]
    assert max(file.nbytes for file in files[:-1]) <= 100


def test_a_full_disk_is_noted_and_all_weights_are_still_read(tmp_path: Path) -> None:
    values, read = tensors(), []

    def weights() -> object:
        for name, tensor in values.items():
            read.append(name)
            yield name, tensor

    (tmp_path / "file").write_text("in the way")
    out = Writes()
    write(metadata(values), weights(), tmp_path / "file", rank=0, ranks=1, out=out)
    assert read == list(values), "other ranks wait in the gathers"
    assert out._error
