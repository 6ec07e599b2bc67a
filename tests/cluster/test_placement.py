"""Where processes go on invented clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from async_grpo.cluster.placement import (
    Bundle,
    Node,
    Placement,
    PlacementError,
    Slot,
    another,
    bundles,
    crowded,
    least,
    lent_cores,
    place,
    place_given,
    refuse,
    shared_threads,
    without_engines,
)
from async_grpo.config.frozen import FrozenModel
from async_grpo.config.operation import EngineConfig
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError


def config(*, ranks: int = 1, size: int = 1, backend: str = "auto", **cluster: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "m"},
            "learner": {"ranks": ranks},
            "weight_sync": {"backend": backend},
            "cluster": {"engine": {"tensor_parallel_size": size}, **cluster},
        }
    )


def cpu(cores: int) -> list[Node]:
    return [Node("n0", "10.0.0.1", float(cores), 0.0, tuple(range(cores)))]


def gpu(*gpus: int) -> list[Node]:
    return [
        Node(f"n{index}", f"10.0.0.{index + 1}", 64.0, float(count))
        for index, count in enumerate(gpus)
    ]


def nodes_of(placement: Placement) -> tuple[list[str], list[str]]:
    return [slot.node_id for slot in placement.learners], [
        slot.node_id for slot in placement.engines
    ]


@pytest.mark.parametrize(("cores", "engines"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 2), (64, 2)])
def test_cpu_engines_and_cores(cores: int, engines: int) -> None:
    placement = place(config(), cpu(cores))
    assert placement.device == "cpu"
    assert (len(placement.learners), len(placement.engines)) == (1, engines)
    slots = [*placement.learners, *placement.engines]
    assert sum(slot.cpus for slot in slots) <= cores
    assert all(slot.cpus > 0 and slot.gpus == 0 for slot in slots)
    pinned = [core for slot in slots for core in slot.cores]
    assert len(pinned) == len(set(pinned)), "a core has two owners"
    if cores == 1:
        assert not pinned, "two processes on one core are not pinned"
    else:
        assert all(slot.cores for slot in slots)
    if cores >= 3:
        assert len(pinned) < cores, "the driver and the queue have no core left"


def test_cpu_spare_cores_go_to_verifiers_then_to_the_learner() -> None:
    placement = place(config(), cpu(8))
    assert [len(slot.cores) for slot in placement.engines] == [2, 2]
    assert len(placement.learners[0].cores) == 3


@pytest.mark.parametrize(
    ("cores", "rank", "engine", "lent"), [(1, 0, 0, 0), (2, 2, 2, 2), (8, 6, 4, 7), (64, 63, 4, 63)]
)
def test_who_is_lent_cores_computes_in_twice_as_many_threads_as_it_owns_cores(
    cores: int, rank: int, engine: int, lent: int
) -> None:
    shared = config(cores="shared")
    placement = place(shared, cpu(cores))
    found = [shared_threads(shared, placement, slot) for slot in placement.learners]
    assert found == [rank] and len(lent_cores(shared, placement)) == lent
    assert {shared_threads(shared, placement, slot) for slot in placement.engines} == {engine}
    apart = config(cores="apart")
    assert not lent_cores(apart, placement)
    assert shared_threads(apart, placement, placement.learners[0]) == 0


def test_cpu_without_known_cores_is_not_pinned() -> None:
    placement = place(config(), [Node("n0", "10.0.0.1", 8.0, 0.0)])
    assert len(placement.engines) == 2
    assert not any(slot.cores for slot in [*placement.learners, *placement.engines])


def test_cpu_affinity_with_gaps_is_respected() -> None:
    placement = place(config(), [Node("n0", "10.0.0.1", 64.0, 0.0, (3, 9, 17))])
    pinned = {core for slot in [*placement.learners, *placement.engines] for core in slot.cores}
    assert pinned <= {3, 9, 17}
    assert len(placement.engines) == 1, (
        "three cores are too few for two engines, however many CPUs Ray was told of"
    )


def test_ranks_that_share_cores_are_told_of() -> None:
    said = [crowded(place(config(ranks=ranks), cpu(2))) for ranks in (1, 3)]
    assert not said[0] and said[1].startswith(
        "learner.ranks is 3, and this machine has fewer cores"
    )
    assert not crowded(place(config(ranks=3), cpu(8)))


def test_cpu_learners_stay_on_the_first_node() -> None:
    nodes = [*cpu(4), Node("n1", "10.0.0.2", 128.0, 0.0)]
    assert nodes_of(place(config(ranks=2), nodes)) == (["n0"] * 2, ["n0", "n1", "n1"])
    assert nodes_of(place(config(ranks=2, rollout_actors={"max": 1}), nodes)) == (
        ["n0"] * 2,
        ["n0"],
    )


def test_cpu_min_and_max_actors() -> None:
    assert len(place(config(rollout_actors={"min": 3}), cpu(2)).engines) == 3
    assert len(place(config(rollout_actors={"max": 1}), cpu(8)).engines) == 1
    assert len(place(config(rollout_actors={"max": 4}), cpu(2)).engines) == 1
    assert len(place(config(rollout_actors={"max": 4}), cpu(8)).engines) == 4
    assert len(place(config(rollout_actors={"min": 2, "max": 4}), cpu(2)).engines) == 2, (
        "those that must be share cores"
    )


def test_one_gpu_colocated() -> None:
    assert place(config(), gpu(1)) == place(config(layout="colocated"), gpu(1)), (
        "one GPU is shared unless somebody says otherwise"
    )
    assert not place(config(), gpu(2)).colocated
    placement = place(config(layout="colocated"), gpu(1))
    assert placement.colocated
    assert placement.device == "cuda"
    assert placement.learners == placement.engines
    assert [slot.gpus for slot in placement.learners] == [0.5]


def test_colocated_pairs_share_a_node() -> None:
    placement = place(config(ranks=4, layout="colocated"), gpu(2, 8))
    learners, engines = nodes_of(placement)
    assert learners == engines == ["n1"] * 4


@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_a_rank_on_a_gpu_has_its_share_of_the_cpus(layout: str) -> None:
    """Ray would leave it one thread, for checksums and an optimizer on the CPU."""
    [node] = gpu(8)
    placement = place(config(ranks=4, layout=layout), [replace(node, cpus=96.0)])
    assert [slot.threads for slot in placement.learners] == [12] * 4
    assert [slot.cpus for slot in placement.learners] == [1.0] * 4, "and reserves one"
    mine = replace(node, cpus=96.0, real_cpus=4)
    assert place(config(ranks=4, layout=layout), [mine]).learners[0].threads == 1


@pytest.mark.parametrize(("size", "engines"), [(1, 4), (2, 2), (4, 1)])
def test_eight_gpus_split(size: int, engines: int) -> None:
    placement = place(config(ranks=4, size=size), gpu(8))
    assert [slot.gpus for slot in placement.learners] == [1.0] * 4
    assert [slot.gpus for slot in placement.engines] == [float(size)] * engines


@pytest.mark.parametrize(
    ("gpus", "ranks", "size", "learners", "engines"),
    [
        ((8, 8), 4, 1, ["n0"] * 4, 12),
        ((8, 8), 8, 4, ["n0"] * 8, 2),
        ((8, 8), 4, 4, ["n0"] * 4, 3),
        ((8, 8), 12, 2, ["n0"] * 8 + ["n1"] * 4, 2),
        (
            (8, 4),
            4,
            8,
            ["n1"] * 4,
            1,
        ),  # on n0 the learner would break up the only node that holds an engine
        ((4, 8), 2, 4, ["n0"] * 2, 2),
        ((0, 8), 4, 4, ["n1"] * 4, 1),
        (
            (3, 3, 3),
            1,
            2,
            ["n0"],
            3,
        ),  # one GPU of each node is of no use to an engine: the learner takes such a one
    ],
)
def test_several_nodes(
    gpus: tuple[int, ...], ranks: int, size: int, learners: list[str], engines: int
) -> None:
    placement = place(config(ranks=ranks, size=size), gpu(*gpus))
    placed, served = nodes_of(placement)
    assert placed == learners, "a node's ranks are neighbours"
    assert len(served) == engines
    used = Counter(placed) + Counter(
        {node: count * size for node, count in Counter(served).items()}
    )
    assert all(used[node.node_id] <= node.gpus for node in gpu(*gpus)), (
        "an engine spans nodes, or a GPU is used twice"
    )


def test_max_below_room_and_too_many() -> None:
    assert len(place(config(ranks=4, rollout_actors={"max": 2}), gpu(8)).engines) == 2
    assert len(place(config(ranks=4, rollout_actors={"max": 5}), gpu(8)).engines) == 4, (
        "the others come when there is room"
    )
    with pytest.raises(
        PlacementError,
        match=r"5 rollout actors, the cluster has room for 4: 10\.0\.0\.1: 64 CPUs, 8 GPUs",
    ):
        place(config(ranks=4, rollout_actors={"min": 5}), gpu(8))


@pytest.mark.parametrize(
    ("settings", "nodes", "message"),
    [
        (
            {"ranks": 9},
            gpu(4, 4),
            r"9 learner ranks with a GPU each: 10\.0\.0\.1: 64 CPUs, 4 GPUs; 10\.0\.0\.2: "
            r"64 CPUs, 4 GPUs",
        ),
        (
            {"ranks": 4, "layout": "split"},
            gpu(4),
            "4 learner ranks with a GPU each, 1 GPU per engine and 1 rollout actor, the "
            "cluster has room for 0",
        ),
        ({"ranks": 2, "size": 4}, gpu(4, 2, 2), None),
        (
            {"ranks": 4, "size": 8},
            gpu(4, 4, 4),
            "8 GPUs per engine and 1 rollout actor, the cluster has room for 0",
        ),
        (
            {"ranks": 2, "layout": "colocated"},
            gpu(1),
            "2 GPUs that a learner rank and an engine share",
        ),
        ({"device": "cuda"}, cpu(4), "1 learner rank with a GPU each: 10.0.0.1: 4 CPUs, 0 GPUs"),
        ({}, [], "the cluster has no nodes"),
        (
            {},
            [Node("n0", "10.0.0.1", 0.0, 0.0)],
            "1 learner rank and 1 rollout actor on CPU: 10.0.0.1: 0 CPUs",
        ),
        (
            {"layout": "colocated"},
            cpu(4),
            "cluster.layout: colocated needs GPUs and the run would be on CPU: 10.0.0.1: 4 CPUs",
        ),
        ({"backend": "nccl"}, cpu(4), "weight_sync.backend: nccl needs GPUs"),
        ({"size": 2}, cpu(4), "cluster.engine.tensor_parallel_size: 2 needs GPUs"),
    ],
)
def test_too_small_or_contradictory(
    settings: dict[str, Any], nodes: list[Node], message: str | None
) -> None:
    if message is None:
        assert nodes_of(place(config(**settings), nodes)) == (["n1"] * 2, ["n0"])
        return
    with pytest.raises(PlacementError, match=message):
        place(config(**settings), nodes)


@pytest.mark.parametrize(
    ("settings", "nodes", "gpus"),
    [
        ({"device": "cuda", "ranks": 2, "rollout_actors": {"min": 3}}, cpu(4), [1, 1, 1, 1, 1]),
        ({"ranks": 2, "size": 4, "rollout_actors": {"min": 2}}, gpu(1), [1, 1, 4, 4]),
        ({"size": 2}, cpu(4), [1, 2]),
        ({"ranks": 2, "layout": "colocated"}, cpu(4), [1, 1]),
        ({"rollout_actors": {"min": 3}}, cpu(1), []),
        ({"device": "cpu"}, gpu(8), []),
    ],
)
def test_what_a_cluster_that_grows_is_asked_for(
    settings: dict[str, Any], nodes: list[Node], gpus: list[int]
) -> None:
    bundles = least(config(**settings), nodes)
    assert bundles == [{"CPU": 1.0, "GPU": float(count)} for count in gpus]


def grown(
    settings: Config, start: Placement, nodes: Sequence[Node], engines: Sequence[Slot]
) -> list[Slot]:
    """`engines` and all that find room beside them."""
    everyone = list(engines)
    while (slot := another(settings, start, nodes, everyone)) is not None:
        everyone.append(slot)
        assert len(everyone) < 100, "there is no end to the room"
    return everyone


def test_cpu_engines_go_to_other_nodes_when_the_first_has_no_core() -> None:
    nodes = [*cpu(2), Node("n1", "10.0.0.2", 4.0, 0.0), Node("n2", "10.0.0.3", 1.0, 0.0)]
    learners, engines = nodes_of(place(config(), nodes))
    assert (learners, engines) == (["n0"], ["n0", "n1", "n1", "n2"]), (
        "two on a node, unless more are asked for"
    )
    assert nodes_of(place(config(rollout_actors={"max": 5}), nodes))[1] == [
        "n0",
        "n1",
        "n1",
        "n1",
        "n1",
    ]
    assert nodes_of(place(config(rollout_actors={"max": 2}), nodes))[1] == ["n0", "n1"]
    busy = [nodes[0], replace(nodes[1], used_cpus=3.5), nodes[2]]
    assert nodes_of(place(config(rollout_actors={"max": 3}), busy))[1] == ["n0", "n2"], (
        "half a core is no room"
    )


@pytest.mark.parametrize(
    ("before", "after", "size", "engines"),
    [
        ((4,), (4, 8), 2, ["n0"] + ["n1"] * 4),
        ((8,), (8,), 4, ["n0"]),
        ((8, 8), (8, 8, 8), 4, ["n0", "n1", "n1", "n2", "n2"]),
        ((2,), (2, 1), 1, ["n0", "n1"]),
        ((3,), (3, 1), 2, ["n0"]),  # the newcomer is too small
    ],
)
def test_a_gpu_node_that_comes_is_filled(
    before: tuple[int, ...], after: tuple[int, ...], size: int, engines: list[str]
) -> None:
    settings = config(ranks=2 if before[0] > 3 else 1, size=size, layout="split")
    start = place(settings, gpu(*before))
    assert [slot.node_id for slot in grown(settings, start, gpu(*after), start.engines)] == engines


def test_a_gpu_node_that_is_lost_and_comes_back() -> None:
    settings = config(ranks=4, size=2)
    start = place(settings, gpu(8, 8))
    left = [slot for slot in start.engines if slot.node_id == "n0"]
    assert (len(start.engines), len(left)) == (6, 2)
    assert grown(settings, start, gpu(8), left) == left, "nothing fits on what is left"
    back = [*gpu(8), Node("n9", "10.0.0.9", 64.0, 8.0)]
    assert [slot.node_id for slot in grown(settings, start, back, left)] == ["n0"] * 2 + ["n9"] * 4


def test_room_that_others_have_reserved_is_none() -> None:
    settings = config(ranks=1, size=2)
    start = place(settings, [replace(gpu(8)[0], used_gpus=3.0)])
    assert len(start.engines) == 2
    busy = replace(gpu(8)[0], used_gpus=7.0)  # one rank, two engines, two GPUs of somebody else
    assert another(settings, start, [busy], start.engines) is None
    assert another(settings, start, [replace(busy, used_gpus=6.0)], start.engines) is not None
    assert (
        another(settings, start, [replace(busy, used_gpus=0.0)], [*start.engines, start.engines[0]])
        is None
    ), "not yet reported, but taken"


def test_colocated_does_not_grow_elsewhere() -> None:
    shared = config(ranks=2, layout="colocated")
    start = place(shared, gpu(2))
    assert another(shared, start, gpu(2, 8), start.engines) is None


def test_a_cpu_engine_takes_the_cores_that_one_left() -> None:
    settings = config(rollout_actors={"max": 3})
    start = place(settings, cpu(8))
    assert another(settings, start, cpu(8), start.engines) is None
    gone = start.engines[1]
    slot = another(settings, start, cpu(8), [start.engines[0], start.engines[2]])
    assert slot == gone and slot.cores


def test_on_cpu_an_engine_that_is_asked_for_may_share_cores() -> None:
    nodes = [replace(cpu(2)[0], cpus=4.0)]
    start = place(config(), nodes)
    assert another(config(), start, nodes, start.engines) is None
    assert another(config(), start, nodes, start.engines, crowd=True) == Slot("n0", 1.0, 0.0)
    assert another(config(), start, cpu(2), start.engines, crowd=True) is None, (
        "Ray has no CPU left"
    )


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        ({"layout": "split"}, gpu(1)),
        ({"backend": "nccl"}, gpu(1)),
        ({"size": 4, "rollout_actors": {"min": 3}}, gpu(1)),
        ({"size": 2}, cpu(4)),
        ({"layout": "colocated"}, cpu(4)),
    ],
)
def test_a_learner_alone_needs_no_room_for_engines(
    settings: dict[str, Any], nodes: list[Node]
) -> None:
    with pytest.raises(PlacementError):
        place(config(**settings), nodes)
    alone = without_engines(config(**settings))
    assert len(place(alone, nodes).learners) == 1
    assert [one["GPU"] for one in least(alone, gpu(1))] == [1.0]


def taught(sizes: Sequence[int] = (1,), **changes: Any) -> Config:
    """A run with frozen models of so many GPUs; only the placement is asked."""
    models = {
        f"m{number}": FrozenModel(path="a/b", engine=EngineConfig(tensor_parallel_size=size))
        for number, size in enumerate(sizes)
    }
    return config(**changes).unchecked_copy(update={"frozen": models})


def test_a_frozen_model_shares_the_cpus_and_owns_no_core() -> None:
    placement = place(taught(), cpu(2))
    slots = [*placement.learners, *placement.engines, *placement.frozen]
    assert len(slots) == 3 and sum(slot.cpus for slot in slots) <= 2
    assert placement.frozen[0].cores == () and all(slot.cores for slot in slots[:2])


def test_frozen_models_have_gpus_of_their_own_in_the_order_of_the_settings() -> None:
    placement = place(taught([1, 4]), gpu(4, 4))
    assert [(slot.node_id, slot.gpus) for slot in placement.frozen] == [("n1", 1.0), ("n0", 4.0)]
    assert not placement.colocated
    assert nodes_of(placement) == (["n1"], ["n1", "n1"])


def test_ranks_that_take_all_other_gpus_share_them_with_engines() -> None:
    placement = place(taught(ranks=1), gpu(2))
    assert placement.colocated and [slot.gpus for slot in placement.frozen] == [1.0]


@pytest.mark.parametrize("gpus", [(1,), (2, 2)])
def test_a_frozen_model_without_gpus_of_its_own_is_refused(gpus: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError, match=r"`frozen.m0` needs 4 GPUs of its own"):
        place(taught([4]), gpu(*gpus))


def test_a_learner_alone_needs_no_frozen_model() -> None:
    assert place(without_engines(taught([4])), gpu(1)).frozen == ()


def test_a_group_of_bundles_has_one_for_each_frozen_model() -> None:
    settings = taught(rollout_actors={"min": 1, "max": 1}, device="cpu")
    assert len(bundles(settings, gpus=0.0)) == 4
    given = [Bundle(f"n{index}", 1.0, 0.0) for index in range(4)]
    placement = place_given(settings, given)
    found = placement.learners, placement.frozen, placement.engines
    assert [[slot.node_id for slot in part] for part in found] == [["n1"], ["n2"], ["n3"]]
    with pytest.raises(PlacementError, match="it needs"):
        place_given(settings, given[:3])


@pytest.mark.parametrize(
    ("changes", "device", "backend", "said"),
    [
        ({"weight_sync": {"files": "/copies"}}, "cuda", "nccl", "with nccl engines read no files"),
        ({"weight_sync": {"delta": "always"}}, "cuda", "ipc", "with ipc engines read the learner"),
        ({"learner": {"routing_replay": "r3"}}, "cpu", "shared_memory", "on CPU vLLM does not say"),
    ],
)
def test_what_has_no_effect_where_auto_leads_is_refused(
    changes: dict[str, Any], device: str, backend: str, said: str
) -> None:
    values = {"run": {"total_steps": 1}, "model": {"path": "m"}} | changes
    with pytest.raises(SetupError, match=said):
        refuse(Config.model_validate(values), device=device, backend=backend)
    other = "cuda" if device == "cpu" else device
    refuse(Config.model_validate(values), device=other, backend="shared_memory")
