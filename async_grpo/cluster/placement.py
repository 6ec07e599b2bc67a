"""Which process goes where: pure functions of (configuration, nodes).

Runs in: the driver, and anywhere for a dry run. Knows no Ray: the caller gives the nodes and turns the result into placement groups.

    split       one bundle per engine with its tensor-parallel GPUs, all on one node; a bundle per learner rank, on as few nodes as possible
    colocated   rank i and engine i share a bundle with one GPU, half each

On CPU every process is one bundle with a share of the CPUs and, where there are enough, cores of its own. One core stays free for the
driver and the queue; spare ones go to the engines first, for their verifiers, and then to the learner.
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
    colocated: bool
    learners: tuple[Slot, ...]
    engines: tuple[Slot, ...]
    rank_offsets: tuple[int, ...]


def place(config: Config, nodes: list[Node]) -> Placement:
    """Place learner ranks and engines. Raises PlacementError naming what was asked for and what each node has."""
    device = config.cluster.device
    if device == "auto":
        device = "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"
    if not nodes:
        raise PlacementError("the cluster has no nodes")
    colocated = device == "cuda" and _shares_gpus(config, nodes)
    if device == "cpu":
        _refuse_what_needs_gpus(config, nodes)
        learners, engines = _place_cpu(config, nodes)
    elif colocated:
        learners, engines = _place_colocated(config, nodes)
    else:
        learners, engines = _place_split(config, nodes)
    if config.weight_sync.backend == "shared_memory" and len({slot.node_id for slot in engines} | {learners[0].node_id}) > 1:
        raise PlacementError(
            f"weight_sync.backend: shared_memory needs learner and engines on one node; use auto or nccl: {describe(nodes)}"
        )
    size = config.cluster.engine.tensor_parallel_size
    return Placement(device, colocated, tuple(learners), tuple(engines), tuple(1 + size * index for index in range(len(engines))))


def describe(nodes: list[Node]) -> str:
    """What each node has, for messages."""
    return "; ".join(f"{node.address}: {node.cpus:g} CPUs, {node.gpus:g} GPUs" for node in nodes) or "no nodes"


def _shares_gpus(config: Config, nodes: list[Node]) -> bool:
    """`cluster.layout`, where `auto` shares GPUs between learner and engines only if the ranks take them all."""
    ranks, size, layout = config.learner.ranks, config.cluster.engine.tensor_parallel_size, config.cluster.layout
    if layout != "auto":
        return layout == "colocated"
    gpus = sum(int(node.gpus) for node in nodes)
    return size == 1 and config.weight_sync.backend in ("auto", "ipc") and gpus == ranks


def _wanted_engines(config: Config, room: int, asked: str, nodes: list[Node]) -> int:
    actors = config.cluster.rollout_actors
    wanted = actors.max if actors.max is not None else max(room, actors.min)
    if room < wanted:
        raise PlacementError(f"the run asks for {asked} and {wanted} rollout actors, the cluster has room for {room}: {describe(nodes)}")
    return wanted


def _refuse_what_needs_gpus(config: Config, nodes: list[Node]) -> None:
    size, backend = config.cluster.engine.tensor_parallel_size, config.weight_sync.backend
    for setting, asked in (
        ("cluster.layout: colocated", config.cluster.layout == "colocated"),
        (f"weight_sync.backend: {backend}", backend in ("nccl", "ipc")),
        (f"cluster.engine.tensor_parallel_size: {size}", size > 1),
    ):
        if asked:
            raise PlacementError(f"{setting} needs GPUs and the run would be on CPU: {describe(nodes)}")


def _place_cpu(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    """Everything on the first node: CPU weights travel through shared memory."""
    node, ranks, actors = nodes[0], config.learner.ranks, config.cluster.rollout_actors
    available = len(node.cores) or int(node.cpus)
    wanted = actors.max if actors.max is not None else max(2 if available >= ranks + 3 else 1, actors.min)
    processes = ranks + wanted
    share = min(1.0, int(100 * node.cpus / processes) / 100)
    if node.cpus < 1 or share <= 0:
        raise PlacementError(f"the run asks for {ranks} learner ranks and {wanted} rollout actors on CPU: {describe(nodes)}")
    slots = [Slot(node.node_id, share, 0.0, cores) for cores in _deal_cores(node.cores, ranks=ranks, engines=wanted)]
    return slots[:ranks], slots[ranks:]


def _deal_cores(cores: tuple[int, ...], *, ranks: int, engines: int) -> list[tuple[int, ...]]:
    """Cores of each learner rank, then of each engine, the highest first; none for anybody where a process would have to share."""
    if len(cores) < ranks + engines:
        return [()] * (ranks + engines)
    spare = max(0, len(cores) - ranks - engines - 1)
    engine = 2 if spare >= engines else 1
    rank = 1 + (spare - (engine - 1) * engines) // ranks
    left, dealt = list(cores), []
    for count in [rank] * ranks + [engine] * engines:
        dealt.append(tuple(left.pop() for _ in range(count)))
    return dealt


def _place_split(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    ranks, size = config.learner.ranks, config.cluster.engine.tensor_parallel_size
    free = {node.node_id: int(node.gpus) for node in nodes}
    if sum(free.values()) < ranks:
        raise PlacementError(f"the run asks for {ranks} learner ranks with a GPU each: {describe(nodes)}")
    learners: list[Slot] = []
    while missing := ranks - len(learners):
        node_id = _node_for(missing, free, size=size)
        taken = min(missing, free[node_id])
        learners += [Slot(node_id, 1.0, 1.0)] * taken
        free[node_id] -= taken
    room = [node.node_id for node in nodes for _ in range(free[node.node_id] // size)]
    asked = f"{ranks} learner ranks with a GPU each, {size} GPUs per engine"
    return learners, [Slot(node_id, 1.0, float(size)) for node_id in room[: _wanted_engines(config, len(room), asked, nodes)]]


def _node_for(ranks: int, free: dict[str, int], *, size: int) -> str:
    """The node of the next ranks: one that holds them all and loses the fewest engines by it, otherwise the one with most room."""
    fitting = [node_id for node_id, gpus in free.items() if gpus >= ranks]
    if not fitting:
        return max(free, key=lambda node_id: free[node_id])
    return min(fitting, key=lambda node_id: (free[node_id] // size - (free[node_id] - ranks) // size, free[node_id]))


def _place_colocated(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    ranks = config.learner.ranks
    room = [node.node_id for node in sorted(nodes, key=lambda node: -node.gpus) for _ in range(int(node.gpus))]
    if len(room) < ranks:
        raise PlacementError(f"the run asks for {ranks} GPUs that a learner rank and an engine share: {describe(nodes)}")
    slots = [Slot(node_id, 1.0, 0.5) for node_id in room[:ranks]]
    return slots, list(slots)
