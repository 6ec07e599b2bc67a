"""The transfer of `make gpu-check`'s stage `senders`: its processes as threads, over the doubles of
tests/support/nccl_over_gloo.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import packed_tensor

from benchmarks.gpu_check import senders as gpu_senders
from tests.support import nccl_over_gloo
from tests.support.nccl_over_gloo import Control
from tests.support.nccl_sides import GPUS, in_thread

DEADLINE_S = 60.0
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(GPUS > 0, reason="about the doubles: several ranks in one process"),
]


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setattr(
        packed_tensor, "_get_streams", lambda _, n: [torch.cuda.Stream() for _ in range(n)]
    )
    monkeypatch.setattr(gpu_senders, "set_environment", lambda _: None)  # of this process
    with nccl_over_gloo.installed(tmp_path) as control:
        yield control


def transfer(ranks: int, workers: int) -> dict[str, Any]:
    """Two weight syncs of a small model."""
    options = argparse.Namespace(
        ranks=ranks, workers=workers, gigabytes=0.0005, publications=2, device="cpu"
    )
    options = gpu_senders.sized(options)
    pipes, running = [], []
    for main, count in ((gpu_senders.rank_main, ranks), (gpu_senders.worker_main, workers)):
        for number in range(count):
            ours, theirs = Pipe()
            pipes.append(ours)
            running.append(in_thread(lambda m=main, n=number, p=theirs: m(n, options, p)))
    found = gpu_senders.publications(pipes[:ranks], pipes[ranks:], options.publications)
    for future in running:
        future.result(DEADLINE_S)
    return found


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2)])
def test_what_was_sent_arrives(control: Control, ranks: int, workers: int) -> None:
    found = transfer(ranks, workers)
    assert (found["wrong_pieces"], found["failed"], len(found["seconds"])) == (0, "", 2)
    senders = {event.comm for event in control.events("end", rank=0)}
    assert len(senders) == ranks


def test_a_flipped_bit_is_counted(control: Control) -> None:
    control.inject({"kind": "corrupt", "rank": 1, "bucket": 0})
    assert transfer(2, 1)["wrong_pieces"] == 2, "one of each rank"


def test_the_bits_differ_from_tensor_to_tensor_and_publication_to_publication() -> None:
    one, other = gpu_senders.bits(1, 4, "cpu"), gpu_senders.bits(2, 4, "cpu")
    assert one.dtype == torch.bfloat16 and one.shape == (4, gpu_senders.COLUMNS)
    words = one.view(torch.int16)
    assert len(words.unique()) > words.numel() // 2
    assert (words != other.view(torch.int16)).float().mean() > 0.99


@pytest.mark.slow
def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_senders.main(["--gigabytes", "0.0005", "--device", "cpu"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["wrong_pieces"] == 0
