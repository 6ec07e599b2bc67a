"""Whether one communicator over all engines will do, or a tree of them is needed:
`python -m benchmarks.weight_sync.tree [--measure]`. A simulation of seconds, on any machine.

    flat     one communicator: sender -> machine -> machine -> ... , pipelined inside NCCL
    tree k   a communicator per family: a machine and the k machines that it passes weights on to,
             bucket by bucket, once a whole bucket is there
    chain    tree 1

`flat` is what `weights.nccl` builds. It is also the tree whose first family has every machine, so
both are computed by the same code. NCCL broadcasts by a ring alone, so inside a family too each
machine passes the bytes on to the next; a machine that heads a family as well sends twice.

VERDICT (2026-11-28): no tree.

- The flat communicator is the fastest at every size, and hardly depends on it: 7B at 50 GB/s takes
  0.30 s to 8 engines and 0.33 s to 1,024. A tree sends all bytes twice through a network card.
- A failure tears all of the flat one. At Llama 3's rate of failures that costs 1,024 engines of 7B
  0.2 % of the time at most, of 70B 1 % to 3 %; a tree's second sending costs 1 % and 9 %.
- With machines that are taken back once a day, flat costs more than 5 % and more than a tree from
  about 650 engines of 7B, 230 of 32B and 110 of 70B on; where NCCL starts slowly, from 410, 50
  and 25.
- There, self-checks of one engine after another and four senders cost as much as the group's size.
  With one check for all newcomers and one sender, flat does for 960, 540 and 270 (500, 120, 60).
  So that is to be built first, then families of 10 to 20 machines.
- A group of more than some 5,700 ranks (1,300) does not form within `deadlines.rendezvous_s`.

NCCL 2.29 can also shrink and grow a communicator; vLLM's wrapper cannot, and how long it takes is
not known here.
"""

from __future__ import annotations

import argparse
import math
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.schema import Deadlines
from async_grpo.weights.transport import (
    BUCKETS_IN_FLIGHT,
    MOST_SENDERS,
    ONE_SENDER_BYTES,
    PACKED_BYTES,
)
from benchmarks.harness import spread

# ---- machines and models ----

GPUS = 8
"""Of a machine, all of them in engines, joined by NVLink."""
NETWORK = {"25 GB/s": 25e9, "50 GB/s": 50e9}
"""Of a machine, each way: one card of 200 or 400 Gb/s."""
NVLINK = 450e9
"""Bytes per second each way, H100 (NVIDIA's data sheet: 900 GB/s in both directions)."""

# ---- NCCL ----

CHUNK, CHANNELS = 2**19, 8
"""A broadcast moves in steps of NCCL_BUFFSIZE / NCCL_STEPS (4 MiB / 8) on every channel; how many
channels there are is an assumption, and hardly matters.
"""
NETWORK_HOP_S, NVLINK_HOP_S = 14e-6, 3.4e-6
"""Latencies of a step by a ring with the protocol Simple (hwLatencies in NCCL's tuner)."""

# ---- joining ----

INIT_S = 2.5
"""ncclCommInitRank of 8 ranks on H100 with NCCL 2.22 (NVIDIA/nccl, issue 534)."""
INIT_S_PER_RANK = {"fast": 30 / 10_000, "slow": 150 / 4_096}
"""fast: all groups of a training in less than 30 s on more than 10,000 GPUs (MegaScale, NSDI 2024,
section 3.5). slow: 2.5 minutes on some thousands of GPUs (NVIDIA/nccl, issue 1156, of 2024, before
the faster start of NCCL 2.23); 4,096 is our reading of it.
"""
STORE_S_PER_RANK = 0.007
"""The store through which ranks find each other, vLLM's StatelessProcessGroup: `--measure`, the
slowest of several with 1,025 ranks, all of them threads of two cores (2 to 7 s).
"""
CHECKS = 2
"""Weight syncs of an engine's self-check: true weights, then perturbed ones."""

# ---- failures ----

FAILURES = {"Llama 3": 419 / (54 * 24 * 16_384 / GPUS), "preemptible": 1 / 24}
"""Per machine and hour. Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama
3 Herd of Models, section 3.3.4). preemptible: machines that are taken back once a day.
"""
EVERY_S = 30.0
"""Between publications: a learner step."""
LIMIT = 0.05
"""Share of the time that weight sync may cost; `kv_cache: auto` allows as much."""


@dataclass(frozen=True)
class Model:
    """A model in bfloat16, whose engines have `tensor_parallel` GPUs."""

    name: str
    parameters: float
    tensor_parallel: int

    @property
    def nbytes(self) -> float:
        """All weights; every rank of an engine receives them all."""
        return 2 * self.parameters

    @property
    def senders(self) -> int:
        """Learner ranks that send, each over communicators of its own (`senders: auto`)."""
        return MOST_SENDERS if self.nbytes > ONE_SENDER_BYTES else 1

    def machines(self, engines: int) -> int:
        """Of so many engines."""
        return math.ceil(engines * self.tensor_parallel / GPUS)


MODELS = (Model("7B", 7.6e9, 1), Model("32B", 32.8e9, 2), Model("70B", 70.6e9, 4))
ENGINES = (8, 64, 1_024)


class Family(NamedTuple):
    """A communicator: `head` broadcasts, machine after machine passes it on. 0 is the sender."""

    head: int
    members: range


class Tree:
    """Machines 1 to `machines`, in families of a head and at most `fan_out` members.

    torn_communicators, torn_machines: what one failure tears, on average over the machines.
    """

    def __init__(self, machines: int, fan_out: int) -> None:
        self.machines, self.fan_out = machines, fan_out
        self.families = [
            Family(head, range(first, min(first + fan_out, machines + 1)))
            for head, first in enumerate(range(1, machines + 1, fan_out))
        ]
        torn = [self.torn(machine) for machine in range(1, machines + 1)]
        self.torn_communicators = float(np.mean([len(families) for families in torn]))
        self.torn_machines = float(
            np.mean([sum(len(one.members) for one in families) for families in torn])
        )

    def sends(self, machine: int) -> int:
        """How often a machine sends the weights: as a head, and to the next of its family."""
        own = machine < len(self.families)
        family = self.families[(machine - 1) // self.fan_out] if machine else None
        return own + (family is not None and machine != family.members[-1])

    def torn(self, machine: int) -> list[Family]:
        """Communicators that are lost with a machine."""
        own = self.families[machine : machine + 1]
        return [self.families[(machine - 1) // self.fan_out], *own]

    def arrivals(self, nbytes: float, bandwidth: float) -> NDArray[np.float64]:
        """Seconds until each machine has every bucket [machines + 1, buckets], the last one a part.

        A family broadcasts a bucket when its head has it and the bucket before is through, at the
        rate of the machine in it that shares its card among the most.
        """
        sizes = np.full(math.ceil(nbytes / PACKED_BYTES), float(PACKED_BYTES))
        sizes[-1] -= sizes.sum() - nbytes
        found = np.zeros((self.machines + 1, len(sizes)))
        for head, members in self.families:
            shared = max(self.sends(machine) for machine in (head, *members[:-1]))
            ends = np.cumsum(sizes) * shared / bandwidth
            starts = np.concatenate([[0.0], ends[:-1]])
            through = ends + np.maximum.accumulate(found[head] - starts)
            for place, machine in enumerate(members, 1):
                found[machine] = through + place * hop(bandwidth)
        return found


@cache
def sending(tree: Tree, nbytes: float, bandwidth: float) -> float:
    """Seconds until the last machine has everything."""
    return float(tree.arrivals(nbytes, bandwidth).max())


def hop(bandwidth: float) -> float:
    """Seconds that one machine more in a ring adds: a step over the network, then through its GPUs
    by NVLink.
    """
    step = CHUNK * CHANNELS
    return (step / bandwidth + NETWORK_HOP_S) + GPUS * (step / NVLINK + NVLINK_HOP_S)


@cache
def layouts(machines: int) -> dict[str, Tree]:
    """What is compared. The widest tree has two levels."""
    two_levels = max(2, math.ceil((math.sqrt(4 * machines + 1) - 1) / 2))
    widths = {"flat": machines, "tree 2": 2, f"tree {two_levels}": two_levels, "chain": 1}
    return {name: Tree(machines, fan_out) for name, fan_out in widths.items()}


@dataclass(frozen=True)
class Way:
    """How machines come back. senders: 0 for as many as `senders: auto` takes, each with its own
    communicators, which engines join one after another. together: newcomers are checked in one
    group; else each engine in a group of its own (`PushDelivery.regroup`).
    """

    senders: int = 0
    together: bool = False

    def joining(
        self, model: Model, ranks: float, per_rank: float, *, communicators: float = 1
    ) -> float:
        """Seconds to form communicators, one after another, of so many ranks in all."""
        senders = self.senders or model.senders
        return senders * (INIT_S * communicators + (per_rank + STORE_S_PER_RANK) * ranks)

    def checks(self, model: Model, bandwidth: float, per_rank: float) -> float:
        """Seconds for the self-checks of a machine's engines."""
        groups = 1 if self.together else GPUS // model.tensor_parallel
        sent = CHECKS * sending(layouts(1)["flat"], model.nbytes, bandwidth)
        return groups * (self.joining(model, 1 + GPUS / groups, per_rank) + sent)


WAYS = {"as it is": Way(), "checks together": Way(senders=1, together=True)}


@dataclass(frozen=True)
class Cost:
    """What failures of machines cost. A publication is live only when every engine has it, so the
    learner waits for all of this.

    reformed: machines in the communicators that one failure tears, on average. rejoin_s: until
    those communicators are formed again. failure_s: of one failure, all told. failures: per hour.
    sending: share of an hour in which engines are paused for the weights.
    """

    reformed: float
    rejoin_s: float
    failure_s: float
    failures: float
    sending: float

    @property
    def lost(self) -> float:
        """Publications per hour that were not made in time."""
        return self.failures * self.failure_s / EVERY_S

    @property
    def share(self) -> float:
        """Share of an hour for sending and failures; above 1, the run does not get on."""
        return self.sending + self.failures * self.failure_s / 3_600


def cost(
    model: Model, tree: Tree, way: Way, *, bandwidth: float, per_rank: float, failures: float
) -> Cost:
    """What a layout costs. per_rank: seconds of NCCL's start. failures: per machine and hour.

    A machine leaves and comes back, so its communicators are formed twice; its engines are checked.
    A failure in the middle of a publication is noticed when two buckets' deadlines are over, and
    everything is sent again.
    """
    seconds = sending(tree, model.nbytes, bandwidth)
    ranks = tree.torn_communicators + GPUS * tree.torn_machines
    rejoin = way.joining(model, ranks, per_rank, communicators=tree.torn_communicators)
    noticed = BUCKETS_IN_FLIGHT * Deadlines().bucket_s + seconds
    share = min(1.0, seconds / EVERY_S)
    return Cost(
        reformed=tree.torn_machines,
        rejoin_s=rejoin,
        failure_s=share * noticed + 2 * rejoin + way.checks(model, bandwidth, per_rank),
        failures=failures * tree.machines,
        sending=share,
    )


# ---- the tables ----


def transfers() -> list[str]:
    """Bytes and seconds without failures."""
    lines = [
        "| model | engines | machines | layout | GB sent by the busiest card | "
        + " | ".join(f"s at {name}" for name in NETWORK)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(NETWORK),
    ]
    for model in MODELS:
        for engines in ENGINES:
            machines = model.machines(engines)
            for name, tree in layouts(machines).items():
                most = max(map(tree.sends, range(machines + 1))) * model.nbytes / 1e9
                seconds = [f"{sending(tree, model.nbytes, one):.2f}" for one in NETWORK.values()]
                row = [model.name, f"{engines:,}", f"{machines:,}", name, f"{most:.0f}", *seconds]
                lines.append(f"| {' | '.join(row)} |")
    return lines


def losses(bandwidth: float) -> list[str]:
    """What failures cost, with a fast and a slow start of NCCL."""
    lines = [
        "| model | engines | layout | way | machines that form again | re-join s | a failure s | "
        + " | ".join(f"{one}: lost per hour | share" for one in FAILURES)
        + " |",
        "|---|---|---|---|---|---|---|" + "---|---|" * len(FAILURES),
    ]
    for model in MODELS:
        for engines in ENGINES:
            for name, tree in layouts(model.machines(engines)).items():
                for how, way in WAYS.items():
                    found = {
                        failures: [
                            cost(
                                model,
                                tree,
                                way,
                                bandwidth=bandwidth,
                                per_rank=per_rank,
                                failures=failures,
                            )
                            for per_rank in INIT_S_PER_RANK.values()
                        ]
                        for failures in FAILURES.values()
                    }
                    pair = next(iter(found.values()))
                    row = [model.name, f"{engines:,}", name, how, f"{pair[0].reformed:.0f}"]
                    row += [both(pair, "rejoin_s", ".0f"), both(pair, "failure_s", ".0f")]
                    for pair in found.values():
                        row += [both(pair, "lost", ".2f"), both(pair, "share", ".1%")]
                    lines.append(f"| {' | '.join(row)} |")
    return lines


def both(costs: Sequence[Cost], figure: str, digits: str) -> str:
    """A figure with the fast and with the slow start."""
    return " / ".join(f"{getattr(one, figure):{digits}}" for one in costs)


def flat_does(
    model: Model, way: Way, engines: int, *, bandwidth: float, per_rank: float, failures: float
) -> bool:
    """Whether the flat communicator costs no more than LIMIT, or no more than the best tree."""
    flat, *others = (
        cost(model, tree, way, bandwidth=bandwidth, per_rank=per_rank, failures=failures).share
        for tree in layouts(model.machines(engines)).values()
    )
    return flat <= max(LIMIT, min(others, default=flat))


def flat_does_until(
    model: Model, way: Way, *, bandwidth: float, per_rank: float, failures: float
) -> int:
    """Return until how many engines, in whole machines and up to ENGINES, the flat one does."""
    done, each = 0, GPUS // model.tensor_parallel
    for engines in range(each, ENGINES[-1] + 1, each):
        if not flat_does(
            model, way, engines, bandwidth=bandwidth, per_rank=per_rank, failures=failures
        ):
            break
        done = engines
    return done


def verdicts(bandwidth: float) -> list[str]:
    """Until how many engines the flat communicator does."""
    lines = [
        f"| model | way | NCCL starts | {' | '.join(FAILURES)} |",
        "|---|---|---|" + "---|" * len(FAILURES),
    ]
    for model in MODELS:
        for how, way in WAYS.items():
            for start, per_rank in INIT_S_PER_RANK.items():
                found = [
                    flat_does_until(
                        model, way, bandwidth=bandwidth, per_rank=per_rank, failures=failures
                    )
                    for failures in FAILURES.values()
                ]
                cells = [f"{one:,}" + " or more" * (one == ENGINES[-1]) for one in found]
                lines.append(f"| {' | '.join([model.name, how, start, *cells])} |")
    return lines


def largest_group(per_rank: float) -> int:
    """Return how many ranks can form a communicator within the default deadline."""
    return int((Deadlines().rendezvous_s - INIT_S) / (per_rank + STORE_S_PER_RANK))


# ---- the part of a rendezvous that needs no GPU ----


def meet(ranks: int) -> float:
    """Seconds until so many ranks, threads of this process, share NCCL's id by the store that
    learner and engines use.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, groups = listener.getsockname()[1], []

    def join(rank: int) -> None:
        group = StatelessProcessGroup.create(
            "127.0.0.1",
            port,
            rank=rank,
            world_size=ranks,
            store_timeout=60,
            listen_socket=None if rank else listener,
        )
        groups.append(group)  # rank 0's has the store, which the others still ask
        group.broadcast_obj(None if rank else bytes(128), src=0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def measured(counts: Sequence[int] = (9, 129, 1_025)) -> list[str]:
    """Print what the store costs, as a table."""
    lines = ["| ranks | s | ms a rank |", "|---|---|---|"]
    meet(2)
    for ranks in counts:
        found = [meet(ranks) for _ in range(3)]
        per_rank = spread([1e3 * one / ranks for one in found], ".1f")
        lines.append(f"| {ranks:,} | {spread(found)} | {per_rank} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync.tree")
    parser.add_argument(
        "--measure", action="store_true", help="measure the store of a rendezvous here, on CPU"
    )
    if parser.parse_args().measure:
        print("\n".join(measured()))
        return
    fastest = NETWORK["50 GB/s"]
    for title, lines in (
        ("Without failures", transfers()),
        (
            f"With failures, 50 GB/s, a publication every {EVERY_S:g} s; NCCL starts fast / slow",
            losses(fastest),
        ),
        (
            f"Engines until which the flat one costs at most {LIMIT:.0%}, or no tree costs less",
            verdicts(fastest),
        ),
    ):
        print(f"\n{title}\n")
        print("\n".join(lines))
    ranks = ", ".join(f"{largest_group(one):,} ({name})" for name, one in INIT_S_PER_RANK.items())
    print(f"\nRanks that meet within deadlines.rendezvous_s: {ranks}")


if __name__ == "__main__":
    main()
