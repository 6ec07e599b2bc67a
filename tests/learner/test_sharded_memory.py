"""Memory of learner ranks that hold a model together (ZeRO-3): while it is loaded, while its
weights are read for a publication, and while they are written. Measured as anonymous memory,
without the pages of the weight files, which the system shares and may drop.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_grpo.learner import division, drafts, weight_files
from async_grpo.learner.backend.deepspeed.backend import ZeroDivision, divided, start
from async_grpo.learner.checkpoint import Saving
from async_grpo.learner.learner import Learner
from async_grpo.learner.model import PolicyModel
from async_grpo.learner.packing import pack, response_row
from async_grpo.learner.storage_writes import Writes
from async_grpo.learner.weights import Published
from tests.support.learners import SHARD_ALL, loaded, make_config, run_ranks, set_rank
from tests.support.processes import free_port

M_MMAP_THRESHOLD = -3
SLACK = 12 * 2**20
"""Python objects and modules that are imported meanwhile."""
BUCKET = 2**21


class Peak:
    """Largest growth of this process's anonymous memory inside the block, in bytes."""

    def __enter__(self) -> Peak:
        self._before = self.bytes = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.bytes = max(self.bytes, _anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, _anonymous()) - self._before


def _anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def _loaded(directory: str, world: int) -> PolicyModel:
    settings = {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "overlap_comm": False},
    }
    with divided(settings):
        return loaded(directory)


def rank_main(rank: int, world: int, port: int, small: str, large: str, target: str) -> None:
    weight_files.FILE_BYTES = BUCKET  # so that there is more than one file
    # the allocator keeps freed memory of smaller pieces, which is not what is measured
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)
    torch.set_num_threads(1)
    set_rank(rank, world, port)
    start("cpu", timeout_s=120)
    _loaded(small, world)  # imports
    division.GATHER_BYTES, zero = BUCKET, ZeroDivision()
    with Peak() as loading:
        model = _loaded(large, world)
    sizes = [zero.size(parameter) for parameter in model.parameters()]
    share, largest = 4 * sum(sizes) // world, 4 * max(sizes)
    assert share > 3 * (largest + SLACK), "the model is too small to tell"
    with Peak() as publishing:
        names = [name for name, _ in Published(model.hf, division=zero).named_weights()]
    assert len(names) == len(sizes)
    metadata, out = zero.metadata(model), Writes()
    with Peak() as exporting:
        weight_files.write(
            metadata, zero.whole(model), Path(target), rank=rank, ranks=world, out=out
        )
    out.agree()
    found = {"loading": loading.bytes, "publishing": publishing.bytes, "exporting": exporting.bytes}
    print(f"rank {rank} of {world}: share {share}, largest {largest}, {found}", flush=True)
    assert share < loading.bytes < share + 2 * largest + SLACK
    assert publishing.bytes < BUCKET + largest + SLACK
    assert exporting.bytes < 2 * largest + SLACK
    written = [file for file in weight_files.divide(metadata, world) if file.rank == rank]
    assert {(Path(target) / file.name).is_file() for file in written} == {True}
    assert abs(sum(file.nbytes for file in written) - share) < largest, "the ranks share the work"


def write(path: Path, *, hidden: int, layers: int) -> str:
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "world",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
    ids="{} ranks".format,
)
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path, world: int) -> None:
    small = write(tmp_path / "small", hidden=64, layers=1)
    large = write(tmp_path / "large", hidden=256, layers=12 * world)
    target = str(tmp_path / "exported")
    run_ranks(rank_main, world, free_port(), small, large, target, seconds=200, ranks=world)
    names = ((tmp_path / "large").glob("*.safetensors"), Path(target).glob("*.safetensors"))
    before, after = ({**_tensors(files)} for files in names)
    assert before.keys() == {name.removeprefix("hf.") for name in after}
    assert all(torch.equal(after[f"hf.{name}"], tensor) for name, tensor in before.items())


def _tensors(files: Iterator[Path]) -> dict[str, torch.Tensor]:
    """Bits: the weights were never filled."""
    return {
        name: tensor.view(torch.int32) for file in files for name, tensor in load_file(file).items()
    }


def saving_rank(rank: int, world: int, port: int, large: str, target: str) -> None:
    """Save learner and model as a checkpoint does, on every rank."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)
    torch.set_num_threads(1)
    set_rank(rank, world, port)
    drafts.SEGMENT_DIR = Path(target)  # a disk: memory files are no anonymous memory either
    division.GATHER_BYTES = BUCKET
    config = make_config(
        model={"path": large},
        # else small parameters stay whole, until an export gathers and frees them: with four ranks
        # they are as much as a share, and come back within the next save
        learner={"zero_stage": 3, "ranks": world, "deepspeed": SHARD_ALL},
        algorithm={"use_kl_loss": False, "kl_loss_coef": 0.0},
    )
    learner = Learner(config, model_dir=large, fetch=lambda *_: b"", device="cpu", total_updates=1)
    try:
        numbers = sum(
            torch.Size(shape).numel() for _, shape, _ in learner.published.weight_metadata()
        )
        row = (np.arange(3, 9), np.arange(9, 20))
        logprobs, _ = learner.policy(pack([response_row(*row)], torch.device("cpu")), 1.0, False)
        learner.policy.engine.backward(logprobs.sum())
        learner.policy.engine.step()
        saving = Saving(learner, key="k")
        with Peak() as first:
            written = saving.write(target, {})
        sums = saving.finish(target)
        with Peak() as again:
            saving.write(target, {})
        share = 4 * numbers // world
        found = (
            f"share {share}, written {written.nbytes}, saving {first.bytes}, again {again.bytes}"
        )
        print(f"rank {rank} of {world}: {found}", flush=True)
        assert written.nbytes > 12 * numbers, "weights, two moments, the model"
        assert any(name.startswith("hf/") for name in sums) == (rank == 0), "one file"
        assert max(first.bytes, again.bytes) < share, "of weights, a fourth of what is saved"
    finally:
        learner.close()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)], ids="{}".format)
def test_a_checkpoint_takes_no_second_copy_of_a_share(tmp_path: Path, world: int) -> None:
    large = write(tmp_path / "large", hidden=256, layers=12 * world)
    target = tmp_path / "saved"
    target.mkdir()
    run_ranks(saving_rank, world, free_port(), large, str(target), seconds=200, ranks=world)
