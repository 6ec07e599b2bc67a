"""Which process goes where: pure functions of (configuration, nodes, taken slots).

Runs in: the driver, and anywhere for a dry run. Knows no Ray: the caller gives the nodes and turns
the result into placement groups. `place` is for the start of a run, `another` for one more engine
later, `refuse` for settings that cannot run on the device found.

    split       one bundle per engine with its tensor-parallel GPUs, all on one node; a bundle per
                learner rank, on as few nodes as possible
    colocated   rank i and engine i share a bundle with one GPU, half each
    given       the bundles of the placement group in which the caller runs, such as a trial of Ray
                Tune: [caller] [rank 0] ... [rank M-1] [frozen 0] ... [engine 0] ... [engine N-1];
                nothing beside them, and no cores of their own, since others compute on the same
                machines

A frozen model has a bundle with its tensor-parallel GPUs, which it shares with nobody; they are
taken before the others are dealt.

On CPU every process is one bundle with a share of the CPUs and, where there are enough, cores of
its own; frozen models compute on any. Learner and driver are on the first node, where one core
stays free for the driver and the queue; spare cores go to the engines first, for their verifiers,
and then to the learner. Engines for which the first node has no core go to other nodes. The engines
that a run must have start even where they share cores.

Invariant: a refusal is one sentence with the settings and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_grpo.config.checks import WITHOUT_ROUTES, speculation_on_cpu, without_deltas
from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS
from async_grpo.errors import SetupError
from async_grpo.runtime.text import counted
from async_grpo.weights.transport import BUCKETS_IN_FLIGHT, torn_after

CPU_ENGINES = 2
"""Engines per node on CPU, unless `cluster.rollout_actors` asks for more."""


def room_for(config: Config) -> int:
    """CPUs of a Ray cluster that is started for this run: one per process, and a spare one."""
    actors = config.cluster.rollout_actors
    return config.learner.ranks + len(config.frozen_here) + (actors.max or actors.min) + 1


class PlacementError(ValueError):
    """The cluster has no room for what the configuration asks for."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: resources, reservations, and cores that processes may use."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    cores: tuple[int, ...] = ()
    used_cpus: float = 0.0
    used_gpus: float = 0.0
    real_cpus: int | None = None
    """CPUs of the machine, where a Ray of our own offers one for each process instead."""
    gpu_bytes: int | None = None
    """Memory of each GPU; None: not known."""

    @property
    def free_gpus(self) -> int:
        """GPUs without a reservation, even of a part."""
        return int(self.gpus - self.used_gpus)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one process. gpus: its request to Ray. cores: empty when it is not pinned.
    threads: for computing on the CPU beside a GPU, where Ray would leave one; 0: as Ray says.
    """

    node_id: str
    cpus: float
    gpus: float
    cores: tuple[int, ...] = ()
    threads: int = 0
    bundle: int | None = None
    """Index in the placement group in which the caller runs; None: a place of its own."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots of a run by rank, by engine and by frozen model."""

    device: str
    colocated: bool
    learners: tuple[Slot, ...]
    engines: tuple[Slot, ...]
    frozen: tuple[Slot, ...] = ()
    """Of the models of `config.frozen_here`, in their order."""

    @property
    def given(self) -> bool:
        """Whether the slots are bundles of the caller's placement group (`place_given`)."""
        return self.learners[0].bundle is not None


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle of the caller's placement group: its node, and what it holds."""

    node_id: str
    cpus: float
    gpus: float

    def holds(self, asked: dict[str, float]) -> bool:
        """Whether a process that asks for this has room."""
        return self.cpus >= asked["CPU"] and self.gpus >= asked.get("GPU", 0.0)

    def __str__(self) -> str:
        return str(_asked(self.cpus, self.gpus))


def place(config: Config, nodes: list[Node]) -> Placement:
    """Place all ranks and, as there is room, `cluster.rollout_actors.min` to `max` engines. Raises
    PlacementError naming the request and what each node has.
    """
    device = _device(config, nodes)
    if not nodes:
        raise PlacementError("the cluster has no nodes")
    if device == "cpu":
        _refuse_what_needs_gpus(config, nodes)
        learners, engines, frozen = _place_cpu(config, nodes)
        return Placement(device, False, tuple(learners), tuple(engines), tuple(frozen))
    frozen, nodes = _place_frozen(config, nodes)
    colocated = _shares_gpus(config, nodes)
    split = _place_colocated if colocated else _place_split
    learners, engines = split(config, nodes)
    return Placement(device, colocated, tuple(learners), tuple(engines), tuple(frozen))


def bundles(config: Config, *, gpus: float) -> list[dict[str, float]]:
    """Return what a run asks for as bundles: the caller's, the ranks', those of frozen models, and
    of `cluster.rollout_actors.max` (or else `min`) engines. gpus: of a rank, 1 or 0 on CPU.
    """
    actors = config.cluster.rollout_actors
    return [_asked(1.0, 0.0), *_run_bundles(config, gpus, actors.max or actors.min)]


def place_given(config: Config, given: Sequence[Bundle]) -> Placement:
    """Place ranks and engines on the bundles of the caller's group. Raises PlacementError where
    they are too few or too small.
    """
    device = "cuda" if any(bundle.gpus for bundle in given[1:]) else "cpu"
    gpus, size = float(device == "cuda"), config.cluster.engine.tensor_parallel_size
    ranks, actors = config.learner.ranks, config.cluster.rollout_actors
    shared = gpus > 0 and config.cluster.layout == "colocated"
    places, sizes = list(enumerate(given))[1:], frozen_sizes(config)
    learners, rest = places[:ranks], places[ranks:]
    frozen, rest = rest[: len(sizes)], rest[len(sizes) :][: actors.max]
    engines = learners if shared else rest
    fits = (
        len(learners) == ranks
        and len(frozen) == len(sizes)
        and (shared or len(engines) >= actors.min)
        and config.cluster.device in ("auto", device)
        and all(bundle.holds(_asked(1.0, gpus)) for _, bundle in learners)
        and all(
            bundle.holds(_asked(1.0, gpus * one))
            for (_, bundle), one in zip(frozen, sizes, strict=True)
        )
        and all(bundle.holds(_asked(1.0, gpus * size)) for _, bundle in engines)
    )
    if not fits:
        needed = ", ".join(map(str, bundles(config, gpus=gpus)))
        raise PlacementError(
            f"the run is started in a placement group of {', '.join(map(str, given))}; it needs "
            f"{needed}, the first for the process that starts it (docs/how-to/notebook.md)"
        )
    both = 2 if shared else 1

    def slot(index: int, bundle: Bundle, gpus: float, sharers: int = both) -> Slot:
        threads = max(1, int(bundle.cpus)) if device == "cuda" else 0
        cpus = bundle.cpus / sharers
        return Slot(bundle.node_id, cpus, gpus / sharers, threads=threads, bundle=index)

    return Placement(
        device,
        shared,
        tuple(slot(index, bundle, gpus) for index, bundle in learners),
        tuple(slot(index, bundle, gpus * size) for index, bundle in engines),
        tuple(
            slot(index, bundle, gpus * one, 1)
            for (index, bundle), one in zip(frozen, sizes, strict=True)
        ),
    )


def frozen_sizes(config: Config) -> list[int]:
    """Return the GPUs of each frozen model, where there are GPUs."""
    return [model.engine.tensor_parallel_size for model in config.frozen_here.values()]


def _run_bundles(config: Config, gpus: float, engines: int) -> list[dict[str, float]]:
    """Return the bundles of all ranks and frozen models, and of engines that do not share those."""
    shared = gpus > 0 and config.cluster.layout == "colocated"
    size = gpus * config.cluster.engine.tensor_parallel_size
    ranks = [_asked(1.0, gpus)] * config.learner.ranks
    ranks += [_asked(1.0, gpus * one) for one in frozen_sizes(config)]
    return ranks + [_asked(1.0, size)] * (0 if shared else engines)


def _asked(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def without_engines(config: Config) -> Config:
    """Return the settings for placing a learner alone, whatever engines and frozen models need."""
    cluster, sync = config.cluster, config.weight_sync
    changes = {
        "layout": "split",
        "engine": cluster.engine.model_copy(update={"tensor_parallel_size": 1}),
        "rollout_actors": cluster.rollout_actors.unchecked_copy(update={"min": 0}),
    }
    return config.unchecked_copy(
        update={
            "cluster": cluster.unchecked_copy(update=changes),
            "weight_sync": sync.model_copy(update={"backend": "auto"}),
            "frozen": {},
        }
    )


def least(config: Config, nodes: Sequence[Node]) -> list[dict[str, float]]:
    """Return the bundles that the run needs to begin, which a cluster that grows is asked for; none
    for a run on CPU, whose learner stays on the driver's node.
    """
    if _device(config, nodes) == "cpu" and not any(asked for _, asked in needing_gpus(config)):
        return []
    return _run_bundles(config, 1.0, config.cluster.rollout_actors.min)


def another(
    config: Config,
    placement: Placement,
    nodes: Sequence[Node],
    engines: Sequence[Slot],
    *,
    crowd: bool = False,
) -> Slot | None:
    """Find the slot of one more engine beside `engines`; None where the cluster has no room, or
    engines share GPUs with ranks or have bundles of the caller's group. placement: of the start.
    crowd: cores may be shared on CPU.
    """
    if placement.colocated or placement.given:
        return None
    others = (*placement.learners, *placement.frozen)
    nodes = [_with_taken(node, [*others, *engines]) for node in nodes]
    if placement.device == "cpu":
        return _another_on_cpu(config, placement, nodes, engines, crowd=crowd)
    size = config.cluster.engine.tensor_parallel_size
    return next(
        (
            Slot(node.node_id, 1.0, float(size))
            for node in nodes
            if node.free_gpus >= size and _free_cpus(node) >= 1
        ),
        None,
    )


def describe(nodes: Sequence[Node]) -> str:
    """Say what each node has."""
    parts = []
    for node in nodes:
        reserved = f" ({node.used_cpus:g} and {node.used_gpus:g} reserved)"
        used = reserved if node.used_cpus or node.used_gpus else ""
        cpus = counted(node.real_cpus or node.cpus, "CPU")
        memory = f" of {node.gpu_bytes / 2**30:g} GiB" if node.gpu_bytes else ""
        parts.append(f"{node.address}: {cpus}, {counted(node.gpus, 'GPU')}{memory}{used}")
    return "; ".join(parts) or "no nodes"


def _with_taken(node: Node, slots: Sequence[Slot]) -> Node:
    """Return the node with the run's own slots reserved, which Ray reports a little late."""
    own = [slot for slot in slots if slot.node_id == node.node_id]
    return replace(
        node,
        used_cpus=max(node.used_cpus, sum(slot.cpus for slot in own)),
        used_gpus=max(node.used_gpus, sum(slot.gpus for slot in own)),
    )


def _free_cpus(node: Node) -> float:
    """Free CPUs in Ray's resolution, since shares do not add up exactly."""
    return round(node.cpus - node.used_cpus, 4)


def _device(config: Config, nodes: Sequence[Node]) -> str:
    """Return `cluster.device`; for `auto`, cuda where a node has a GPU."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"


def _shares_gpus(config: Config, nodes: list[Node]) -> bool:
    """Tell whether learner and engines share GPUs; `auto`: if the ranks take all, and may share."""
    cluster, transport = config.cluster, TRANSPORTS.get(config.weight_sync.backend.name)
    if cluster.layout != "auto":
        return cluster.layout == "colocated"
    if cluster.engine.tensor_parallel_size > 1 or (transport and not transport.colocated):
        return False
    return sum(int(node.gpus) for node in nodes) == config.learner.ranks


def _count(config: Config, room: int, asked: str, nodes: list[Node]) -> int:
    """Return how many engines start, of those that have room."""
    actors = config.cluster.rollout_actors
    if room < actors.min:
        raise PlacementError(
            f"the run asks for {asked} and {counted(actors.min, 'rollout actor')}, the cluster has "
            f"room for {room}: {describe(nodes)}"
        )
    return room if actors.max is None else min(room, actors.max)


def needing_gpus(config: Config) -> list[tuple[str, bool]]:
    """Return the settings that only GPUs can fulfil, and whether the run has each."""
    size, backend = config.cluster.engine.tensor_parallel_size, config.weight_sync.backend.name
    transport = TRANSPORTS.get(backend)
    return [
        ("cluster.layout: colocated", config.cluster.layout == "colocated"),
        (f"weight_sync.backend: {backend}", transport is not None and transport.needs_gpu),
        (f"cluster.engine.tensor_parallel_size: {size}", size > 1),
    ]


def _refuse_what_needs_gpus(config: Config, nodes: list[Node]) -> None:
    for setting, asked in needing_gpus(config):
        if asked:
            raise PlacementError(
                f"{setting} needs GPUs and the run would be on CPU: {describe(nodes)}"
            )


def _place_cpu(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot], list[Slot]]:
    """Place learner, engines with cores and frozen models on the first node, other engines
    elsewhere.
    """
    first, ranks, actors = nodes[0], config.learner.ranks, config.cluster.rollout_actors
    cores = len(first.cores) or int(first.cpus)
    here = max(1, min(cores - ranks - 1, actors.max or CPU_ENGINES))
    room = [
        node.node_id
        for node in nodes[1:]
        for _ in range(min(int(_free_cpus(node)), actors.max or CPU_ENGINES))
    ]
    there = room[: max(0, actors.max - here)] if actors.max is not None else room
    here = max(here, actors.min - len(there))
    processes, free = ranks + here + len(config.frozen_here), _free_cpus(first)
    share = min(1.0, int(100 * free / processes) / 100)
    if free < 1 or share <= 0:
        raise PlacementError(
            f"the run asks for {counted(ranks, 'learner rank')} and "
            f"{counted(here + len(there), 'rollout actor')} on CPU: {describe(nodes)}"
        )
    slots = [
        Slot(first.node_id, share, 0.0, dealt)
        for dealt in _deal_cores(first.cores, ranks=ranks, engines=here)
    ]
    frozen = [Slot(first.node_id, share, 0.0)] * len(config.frozen_here)
    elsewhere = [Slot(node_id, 1.0, 0.0) for node_id in there]
    return slots[:ranks], [*slots[ranks:], *elsewhere], frozen


def _another_on_cpu(
    config: Config,
    placement: Placement,
    nodes: Sequence[Node],
    engines: Sequence[Slot],
    *,
    crowd: bool,
) -> Slot | None:
    """Find a slot on CPU; on the learner's node with the cores that a removed engine has left."""
    limit = config.cluster.rollout_actors.max or CPU_ENGINES
    for node in nodes:
        there = sum(slot.node_id == node.node_id for slot in engines)
        if node.node_id != placement.learners[0].node_id:
            if _free_cpus(node) >= 1 and (crowd or there < limit):
                return Slot(node.node_id, 1.0, 0.0)
            continue
        share, ranks = placement.learners[0].cpus, len(placement.learners)
        room = max(1, min((len(node.cores) or int(node.cpus)) - ranks - 1, limit))
        if _free_cpus(node) >= share and (crowd or there < room):
            taken = {core for slot in [*placement.learners, *engines] for core in slot.cores}
            left, dealt = set(node.cores) - taken, [slot.cores for slot in placement.engines]
            freed = (cores for cores in dealt if cores and left.issuperset(cores))
            return Slot(node.node_id, share, 0.0, next(freed, ()))
    return None


def lent_cores(config: Config, placement: Placement) -> frozenset[int]:
    """Return the cores that ranks and engines share (`runtime.cores`); none where they do not."""
    if config.cluster.cores != "shared":
        return frozenset()
    slots = (*placement.learners, *placement.engines)
    return frozenset(core for slot in slots for core in slot.cores)


def shared_threads(config: Config, placement: Placement, slot: Slot) -> int:
    """Return in how many threads a process computes that others lend cores; 0 where none do."""
    return min(2 * len(slot.cores), len(lent_cores(config, placement)))


def crowded(placement: Placement) -> str:
    """Say that several ranks share cores with each other and with engines, or ""."""
    ranks = placement.learners
    if placement.device != "cpu" or len(ranks) < 2 or ranks[0].cores:
        return ""
    engines = counted(len(placement.engines), "engine")
    return (
        f"learner.ranks is {len(ranks)}, and this machine has fewer cores than these and "
        f"{engines} need: they wait for each other, and fewer ranks are faster"
    )


def _deal_cores(cores: tuple[int, ...], *, ranks: int, engines: int) -> list[tuple[int, ...]]:
    """Deal the highest cores to the ranks, then to the engines; none if one would have to share."""
    if len(cores) < ranks + engines:
        return [()] * (ranks + engines)
    spare = max(0, len(cores) - ranks - engines - 1)
    engine = 2 if spare >= engines else 1
    rank = 1 + (spare - (engine - 1) * engines) // ranks
    left, dealt = list(cores), []
    for count in [rank] * ranks + [engine] * engines:
        dealt.append(tuple(left.pop() for _ in range(count)))
    return dealt


def _place_frozen(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Node]]:
    """Place frozen models on GPUs, the largest first; the nodes with what is left."""
    left, found = list(nodes), {}
    sizes = dict(zip(config.frozen_here, frozen_sizes(config), strict=True))
    for name, size in sorted(sizes.items(), key=lambda one: -one[1]):
        fitting = [place for place, node in enumerate(left) if node.free_gpus >= size]
        if not fitting:
            raise PlacementError(
                f"`frozen.{name}` needs {counted(size, 'GPU')} of its own: {describe(nodes)}"
            )
        place = min(fitting, key=lambda place: left[place].free_gpus)
        node = left[place]
        found[name] = Slot(node.node_id, 1.0, float(size))
        left[place] = replace(node, gpus=node.gpus - size, used_cpus=node.used_cpus + 1)
    return [found[name] for name in config.frozen_here], left


def _place_split(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    ranks, size = config.learner.ranks, config.cluster.engine.tensor_parallel_size
    free = {node.node_id: node.free_gpus for node in nodes}
    threads = {node.node_id: _threads(node) for node in nodes}
    if sum(free.values()) < ranks:
        raise PlacementError(
            f"the run asks for {counted(ranks, 'learner rank')} with a GPU each: {describe(nodes)}"
        )
    learners: list[Slot] = []
    while missing := ranks - len(learners):
        node_id = _node_for(missing, free, size=size)
        taken = min(missing, free[node_id])
        learners += [Slot(node_id, 1.0, 1.0, threads=threads[node_id])] * taken
        free[node_id] -= taken
    room = [node.node_id for node in nodes for _ in range(free[node.node_id] // size)]
    asked = f"{counted(ranks, 'learner rank')} with a GPU each, {counted(size, 'GPU')} per engine"
    return learners, [
        Slot(node_id, 1.0, float(size))
        for node_id in room[: _count(config, len(room), asked, nodes)]
    ]


def _node_for(ranks: int, free: dict[str, int], *, size: int) -> str:
    """Choose the node that holds all next ranks and loses fewest engines, else the roomiest one."""
    fitting = [node_id for node_id, gpus in free.items() if gpus >= ranks]
    if not fitting:
        return max(free, key=lambda node_id: free[node_id])
    return min(
        fitting,
        key=lambda node_id: (
            free[node_id] // size - (free[node_id] - ranks) // size,
            free[node_id],
        ),
    )


def _place_colocated(config: Config, nodes: list[Node]) -> tuple[list[Slot], list[Slot]]:
    ranks = config.learner.ranks
    room = [
        node
        for node in sorted(nodes, key=lambda node: -node.free_gpus)
        for _ in range(node.free_gpus)
    ]
    if len(room) < ranks:
        raise PlacementError(
            f"the run asks for {ranks} GPUs that a learner rank and an engine share: "
            f"{describe(nodes)}"
        )
    slots = [Slot(node.node_id, 1.0, 0.5, threads=_threads(node)) for node in room[:ranks]]
    return slots, list(slots)


def _threads(node: Node) -> int:
    """Return the CPUs of a node for each of its GPUs."""
    return max(1, int((node.real_cpus or node.cpus) // max(node.gpus, 1)))


def refuse(config: Config, *, device: str, backend: str) -> None:
    """Raise SetupError for settings that this device or this transport cannot run with."""
    dtype, deadlines = config.model.dtype, config.weight_sync.deadlines
    bfloat16 = dtype == "bfloat16" or (dtype == "auto" and device == "cuda")
    if config.learner.zero_stage == 0 and bfloat16:
        raise SetupError(
            "`learner.zero_stage` is 0 and the model is bfloat16: gradients would be added up in "
            "bfloat16; use stage 1, 2 or 3, or model.dtype=float32."
        )
    recomputes = config.replay.max_staleness > 0 and config.weight_sync.kv_cache == "recompute"
    if device == "cpu" and config.seeded and recomputes:
        raise SetupError(
            "`rollout.seeded` is on: on CPU, vLLM dies when a seeded response is preempted by a "
            "weight sync; use rollout.seeded=off, weight_sync.kv_cache=keep, or "
            "replay.max_staleness=0."
        )
    if device == "cpu" and (refused := next(speculation_on_cpu(config), None)):
        raise SetupError(refused)
    if device == "cpu" and config.learner.routing_replay == "r3":
        raise SetupError(WITHOUT_ROUTES)
    if config.weight_sync.files is not None and not TRANSPORTS[backend].relayed:
        raise SetupError(
            f"`weight_sync.files` is given, and with {backend} engines read no files: use "
            "weight_sync.backend=shared_memory, or leave it out."
        )
    if config.weight_sync.delta == "always" and TRANSPORTS[backend].colocated:
        raise SetupError(without_deltas(backend))
    least = torn_after(deadlines) + deadlines.resume_s
    if TRANSPORTS[backend].pushes and deadlines.acknowledge_s <= least:
        raise SetupError(
            f"`weight_sync.deadlines.acknowledge_s` is {deadlines.acknowledge_s:g}, and "
            "engines that are cut off notice it only after up to "
            f"{least:g} s (pause_s + {BUCKETS_IN_FLIGHT} x bucket_s + resume_s): they would be "
            "blamed for the delay; raise the first, or lower the others."
        )
