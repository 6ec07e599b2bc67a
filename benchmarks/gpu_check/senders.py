"""Weights of several learner ranks at the size of a model: `python -m benchmarks.gpu_check.senders
[--ranks 2] [--workers 2] [--gigabytes 1] [--publications 3] [--device cpu]`.

Every learner rank and every engine worker is a process with a GPU of its own. The ranks hold the
same made-up bits and publish them without checksums, each its share; every worker compares what
vLLM's reload left in its layers with what was published. A layer has two pieces and a pack three,
so every second layer comes from two ranks. Prints one line of JSON, and ends with 1 where a bit
differs. On CPU the tests' doubles stand for NCCL and CUDA's streams.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from async_grpo.config.schema import WeightSync
from async_grpo.rollout.engine.vllm.arguments import set_environment
from async_grpo.weights.transport import Version, merged_payloads

COLUMNS = 2048
PIECES = 2
"""Of a layer, as gate and up of an MLP."""
PER_PACK = 3
LIMIT_S = 240.0
_SPREAD, _MORE = 6364136223846793005, 1442695040888963407


def bits(seed: int, rows: int, device: str) -> Tensor:
    """Made-up bfloat16 values, bfloat16 [rows, COLUMNS]: the same on every device."""
    words = torch.arange(rows * COLUMNS, dtype=torch.int64, device=device)
    words.mul_(_SPREAD).add_(seed * _MORE % 2**62).bitwise_right_shift_(47)
    return words.to(torch.int16).view(torch.bfloat16).view(rows, COLUMNS)


class Published:
    """A learner rank as a sender sees it, with made-up weights of a version."""

    sharded = False

    def __init__(self, rank: int, options: argparse.Namespace, device: str) -> None:
        self.rank, self.world_size, self.device = rank, options.ranks, device
        self.version, self._options = 0, options

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        shape = (self._options.rows, COLUMNS)
        return [(f"{index}", shape, "bfloat16") for index in range(self._options.tensors)]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for index in range(self._options.tensors):
            yield f"{index}", bits(self._seed(index), self._options.rows, self.device)

    def wrong(self, model: Served) -> list[str]:
        """Names of what a worker holds with other bits."""
        found = []
        for (name, sent), held in zip(self.named_weights(), model.pieces(), strict=True):
            if not torch.equal(sent.view(torch.int16), held.view(torch.int16)):
                found.append(name)
        return found

    def _seed(self, index: int) -> int:
        return self.version * 100_003 + index


class Served(nn.Module):
    """An engine's model, whose layers hold several pieces in one tensor."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self._rows = options.rows
        with torch.device(device):
            layers = [_Layer(self._rows) for _ in range(options.tensors // PIECES)]
            self.layers = nn.ModuleList(layers)
            record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load pieces, as models of vLLM do."""
        for name, tensor in weights:
            layer, piece = divmod(int(name), PIECES)
            weight = self.layers[layer].weight
            weight.weight_loader(weight, tensor, piece)

    def pieces(self) -> Iterator[Tensor]:
        """Every piece, in order."""
        for layer in self.layers:
            yield from layer.weight.split(self._rows)


class _Layer(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        weight = torch.zeros(PIECES * rows, COLUMNS, dtype=torch.bfloat16)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight.weight_loader = self._load

    def _load(self, param: Tensor, loaded_weight: Tensor, piece: int) -> None:
        param.data.narrow(0, piece * self._rows, self._rows).copy_(loaded_weight)


def rank_main(rank: int, options: argparse.Namespace, pipe: Any) -> None:
    """Run a learner rank: it announces what it sends, and sends it when it is told to."""
    device = begin(rank, options)
    from async_grpo.rollout.engine.vllm.nccl import NcclSender

    owner = Published(rank, options, device)
    pack = (PER_PACK - 1) * options.rows * COLUMNS * 2  # it ends with the piece that is too much
    settings = WeightSync(overlap=True, backend={"name": "nccl", "senders": "every_rank"})
    sender = NcclSender(owner, settings=settings, packed_bytes=pack)
    pipe.send(sender.connect("127.0.0.1", [1] * options.workers))
    pipe.send(sender.rendezvous())
    for owner.version in range(1, options.publications + 1):
        pipe.send(sender.stage(Version(0, owner.version).label, verify=False).payload)
        receive(pipe)
        failed = sender.send()
        sender.release()  # waits for the end
        pipe.send(failed)
    receive(pipe)
    sender.close()


def worker_main(worker: int, options: argparse.Namespace, pipe: Any) -> None:
    """Run an engine's worker: it takes publications, and answers with what is wrong in them."""
    device = begin(options.ranks + worker, options)
    from vllm.config.weight_transfer import WeightTransferConfig

    from async_grpo.rollout.engine.vllm.worker import NcclEngine

    model, wanted = Served(options, device), Published(0, options, device)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    about = SimpleNamespace(parallel_config=parallel, model_config=None)
    transfer = WeightTransferConfig(backend="nccl")
    engine = NcclEngine(transfer, about, torch.device(device), model)
    engine._check_names = lambda _: None  # there are no files that it was loaded from
    engine.init_transfer_engine(engine.parse_init_info(receive(pipe)))
    for wanted.version in range(1, options.publications + 1):
        payload = receive(pipe)
        engine.start_weight_update()
        engine.update_weights(payload)
        engine.finish_weight_update()
        torch.accelerator.synchronize()
        pipe.send("loaded")
        pipe.send(wanted.wrong(model))
    receive(pipe)
    engine.shutdown()


def begin(index: int, options: argparse.Namespace) -> str:
    """Prepare a process, on the GPU of this number; returns its device."""
    set_environment(options.device)
    if options.device == "cpu":
        from tests.support import nccl_over_gloo

        nccl_over_gloo.install()
        torch.accelerator.set_device_index(index)
        return "cpu"
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def receive(pipe: Any) -> Any:
    """What comes over a pipe. Raises TimeoutError, or EOFError where the other side has ended."""
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"a process did not answer within {LIMIT_S:g} s")
    return pipe.recv()


def publications(ranks: Sequence[Any], workers: Sequence[Any], count: int) -> dict[str, Any]:
    """Conduct the processes behind the pipes; seconds of each publication, and how many pieces came
    with other bits.
    """
    payloads = merged_payloads([receive(pipe) for pipe in ranks])
    for pipe, payload in zip(workers, payloads, strict=True):
        pipe.send(payload)
    failed = [text for text in map(receive, ranks) if text]
    seconds, wrong = [], 0
    for _ in range(0 if failed else count):
        announced = [receive(pipe) for pipe in ranks]
        started = time.perf_counter()
        for pipe in workers:
            pipe.send(announced[0])
        for pipe in ranks:
            pipe.send("send")
        for pipe in workers:
            receive(pipe)
        seconds.append(time.perf_counter() - started)
        failed += [text for text in map(receive, ranks) if text]
        wrong += sum(len(receive(pipe)) for pipe in workers)
    for pipe in (*ranks, *workers):
        pipe.send("end")
    return {"wrong_pieces": wrong, "failed": "; ".join(failed), "seconds": seconds}


def sized(options: argparse.Namespace) -> argparse.Namespace:
    """Add `rows` of a piece and the number of `tensors`, for about that many bytes."""
    options.rows = 4096 if options.gigabytes >= 0.5 else 8
    nbytes = options.rows * COLUMNS * 2
    options.tensors = max(
        PIECES * PER_PACK, round(options.gigabytes * 1e9 / nbytes) // PIECES * PIECES
    )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.senders")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--publications", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = sized(parser.parse_args(argv))
    context = get_context("spawn")

    def start(target: Any, number: int) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(number, options, theirs), daemon=True).start()
        theirs.close()
        return ours

    ranks = [start(rank_main, number) for number in range(options.ranks)]
    workers = [start(worker_main, number) for number in range(options.workers)]
    found = publications(ranks, workers, options.publications)
    nbytes = options.tensors * options.rows * COLUMNS * 2
    found |= {
        "gb": nbytes / 1e9,
        "gb_per_s": nbytes / 1e9 / max(min(found["seconds"], default=0.0), 1e-9),
    }
    print(json.dumps(found))
    return int(bool(found["wrong_pieces"] or found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
