"""Which process goes where: pure functions of (configuration, nodes).

Runs in: the driver, and anywhere for a dry run. Knows no Ray: the caller gives the nodes and turns the result into placement groups.

    split       one bundle per engine with its tensor-parallel GPUs; one group with a bundle per learner rank, packed
    colocated   rank i and engine i share a bundle with one GPU, half each

On CPU every process is one bundle with a share of the CPUs and, where there are enough, cores of its own: the learner first, then
the engines; verifiers inherit what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.schema import Config


class PlacementError(ValueError):
    """The cluster has no room for what the configuration asks for."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: its resources as Ray reports them, and the cores its processes may use."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one process runs. `gpus` is what it asks Ray for; `cores` is empty when it is not pinned."""

    node_id: str
    cpus: float
    gpus: float
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """`learners[i]` is rank i, `engines[j]` is rollout actor j. `rank_offsets[j]` is engine j's first rank in an NCCL group."""

    device: str
    learners: tuple[Slot, ...]
    engines: tuple[Slot, ...]
    rank_offsets: tuple[int, ...]


def place(config: Config, nodes: list[Node]) -> Placement:
    """Place learner ranks and engines. Raises PlacementError naming what was asked for and what each node has."""
    device = config.cluster.device
    if device == "auto":
        device = "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"
    if device == "cpu":
        learners, engines = _place_cpu(config, nodes)
    elif config.cluster.layout == "colocated":
        learners, engines = _place_colocated(config, nodes)
    else:
        learners, engines = _place_split(config, nodes)
    size = config.cluster.engine.tensor_parallel_size
    return Placement(device, tuple(learners), tuple(engines), tuple(1 + size * index for index in range(len(engines))))


def describe(nodes: list[Node]) -> str:
    """What each node has, for messages."""
    return "; ".join(f"{node.address}: {node.cpus:g} CPUs, {node.gpus:g} GPUs" for node in nodes) or "no nodes"


def _wanted_engines(config: Config, room: int, asked: str, nodes: list[Node]) -> int:
    actors = config.cluster.rollout_actors
    wanted = actors.max if actors.max is not None else max(room, actors.min)
    if room < wanted:
        raise PlacementError(f"the run asks for {asked} and {wanted} rollout actors, the cluster has room for {room}: {describe(nodes)}")
    return wanted


def _place_cpu(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    """Everything on the first node: CPU weights travel through shared memory."""
    if not nodes:
        raise PlacementError("the cluster has no nodes")
    node, ranks, actors = nodes[0], config.learner.ranks, config.cluster.rollout_actors
    cores = node.cores or tuple(range(int(node.cpus)))
    wanted = actors.max if actors.max is not None else max(2 if len(cores) >= ranks + 3 else 1, actors.min)
    if node.cpus < 1:
        raise PlacementError(f"the run asks for {ranks} learner ranks and {wanted} rollout actors on CPU: {describe(nodes)}")
    processes = ranks + wanted
    share = min(1.0, int(100 * node.cpus / processes) / 100)
    slots = []
    for index in range(processes):
        own = (cores[-1 - index],) if len(cores) >= processes else ()
        slots.append(Slot(node.node_id, share, 0.0, own))
    return slots[:ranks], slots[ranks:]


def _place_split(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    ranks, size = config.learner.ranks, config.cluster.engine.tensor_parallel_size
    free = {node.node_id: int(node.gpus) for node in nodes}
    learners: list[Slot] = []
    for node in sorted(nodes, key=lambda node: (-node.gpus, node.node_id)):  # fill whole nodes: a node's ranks are neighbours
        while len(learners) < ranks and free[node.node_id] > 0:
            learners.append(Slot(node.node_id, 1.0, 1.0))
            free[node.node_id] -= 1
    if len(learners) < ranks:
        raise PlacementError(f"the run asks for {ranks} learner ranks with a GPU each: {describe(nodes)}")
    room = [node.node_id for node in nodes for _ in range(free[node.node_id] // size)]
    asked = f"{ranks} learner ranks with a GPU each, {size} GPUs per engine"
    return learners, [Slot(node_id, 1.0, float(size)) for node_id in room[: _wanted_engines(config, len(room), asked, nodes)]]


def _place_colocated(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    ranks = config.learner.ranks
    room = [node.node_id for node in sorted(nodes, key=lambda node: (-node.gpus, node.node_id)) for _ in range(int(node.gpus))]
    if len(room) < ranks:
        raise PlacementError(f"the run asks for {ranks} GPUs that a learner rank and an engine share: {describe(nodes)}")
    slots = [Slot(node_id, 1.0, 0.5) for node_id in room[:ranks]]
    return slots, list(slots)
