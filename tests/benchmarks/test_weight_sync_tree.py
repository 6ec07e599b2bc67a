"""The simulation of a publication tree against closed formulas: chains, depths, bytes, failures."""

from __future__ import annotations

import pytest

from async_grpo.weights.transport import PACKED_BYTES
from benchmarks.weight_sync import tree
from benchmarks.weight_sync.tree import GPUS, INIT_S, MODELS, Tree, Way, hop, sending

BANDWIDTH, BUCKETS = 50e9, 40
NBYTES = float(BUCKETS * PACKED_BYTES)
BUCKET_S = PACKED_BYTES / BANDWIDTH


@pytest.mark.parametrize("machines", [1, 2, 17, 512])
def test_the_flat_one_is_a_pipeline_of_steps(machines: int) -> None:
    found = sending(Tree(machines, machines), NBYTES, BANDWIDTH)
    assert found == pytest.approx(NBYTES / BANDWIDTH + machines * hop(BANDWIDTH))


@pytest.mark.parametrize("machines", [1, 2, 17])
def test_a_chain_stores_a_bucket_on_every_machine(machines: int) -> None:
    found = sending(Tree(machines, 1), NBYTES, BANDWIDTH)
    assert found == pytest.approx((BUCKETS + machines - 1) * BUCKET_S + machines * hop(BANDWIDTH))


@pytest.mark.parametrize(("fan_out", "depth"), [(2, 2), (2, 4), (3, 3), (8, 2)])
def test_a_full_tree_takes_twice_the_time_and_a_bucket_a_level(fan_out: int, depth: int) -> None:
    """The head of a family shares its card with the family above; the last of a ring does not, so
    the slowest family is that of the one before it.
    """
    machines = sum(fan_out**level for level in range(1, depth + 1))
    found = Tree(machines, fan_out)
    times = 2 * (BUCKETS + depth - 1) * BUCKET_S + (depth * fan_out - 1) * hop(BANDWIDTH)
    assert sending(found, NBYTES, BANDWIDTH) == pytest.approx(times)
    assert len(found.families) == sum(fan_out**level for level in range(depth))


@pytest.mark.parametrize("machines", [1, 2, 5, 100])
@pytest.mark.parametrize("fan_out", [1, 2, 7, 100])
def test_what_is_sent_is_what_is_received(machines: int, fan_out: int) -> None:
    """Each machine receives the weights once; none sends more than twice."""
    found = Tree(machines, fan_out)
    times = [found.sends(machine) for machine in range(machines + 1)]
    assert sum(times) == machines and max(times) <= 2
    received = [machine for family in found.families for machine in family.members]
    assert sorted(received) == list(range(1, machines + 1))
    assert all(family.head < family.members[0] for family in found.families)


def test_buckets_arrive_in_order_and_the_last_may_be_small() -> None:
    nbytes = 2.5 * PACKED_BYTES
    [_, arrived] = Tree(1, 1).arrivals(nbytes, BANDWIDTH)
    assert arrived == pytest.approx([part * BUCKET_S + hop(BANDWIDTH) for part in (1, 2, 2.5)])


def test_a_failure_tears_the_families_of_the_machine() -> None:
    flat, binary = Tree(14, 14), Tree(14, 2)
    assert [len(one.members) for one in flat.torn(9)] == [14]
    assert [(one.head, list(one.members)) for one in binary.torn(3)] == [(1, [3, 4]), (3, [7, 8])]
    assert (flat.torn_communicators, flat.torn_machines) == (1.0, 14.0)
    heads = 6  # machines 1 to 6 have a family of their own
    assert binary.torn_communicators == pytest.approx(1 + heads / 14)
    assert binary.torn_machines == pytest.approx(2 + 2 * heads / 14)


def costs(machines: int, way: Way, *, failures: float = 0.5) -> tree.Cost:
    found = Tree(machines, machines)
    return tree.cost(MODELS[2], found, way, bandwidth=BANDWIDTH, per_rank=0.01, failures=failures)


def test_a_failure_costs_two_joins_the_checks_and_now_and_then_a_deadline() -> None:
    found, model = costs(512, Way()), MODELS[2]
    per_rank = 0.01 + tree.STORE_S_PER_RANK
    assert found.rejoin_s == pytest.approx(4 * (INIT_S + per_rank * (1 + GPUS * 512)))
    alone = model.nbytes / BANDWIDTH + hop(BANDWIDTH)
    checks = 2 * (4 * (INIT_S + per_rank * 5) + 2 * alone)  # two engines of four GPUs
    seconds = model.nbytes / BANDWIDTH + 512 * hop(BANDWIDTH)
    torn = seconds / tree.EVERY_S * (2 * 20.0 + seconds)
    assert found.failure_s == pytest.approx(2 * found.rejoin_s + checks + torn)
    assert found.lost == pytest.approx(256 * found.failure_s / tree.EVERY_S)
    assert found.share == pytest.approx(seconds / tree.EVERY_S + 256 * found.failure_s / 3_600)


def test_one_sender_and_one_check_cost_less() -> None:
    usual, one, both = (costs(8, way) for way in (Way(), Way(senders=1), Way(1, together=True)))
    assert usual.rejoin_s == pytest.approx(4 * one.rejoin_s) and one.rejoin_s == both.rejoin_s
    assert usual.failure_s > one.failure_s > both.failure_s
    assert costs(8, Way(), failures=0.0).share == pytest.approx(usual.sending)


@pytest.mark.parametrize(
    ("failures", "engines", "does"),
    [
        ("Llama 3", (1_024, 1_024, 1_024), True),
        ("preemptible", (600, 200, 100), True),
        ("preemptible", (700, 260, 120), False),
    ],
)
def test_the_verdict_is_the_programs(failures: str, engines: tuple[int, ...], does: bool) -> None:
    """What the module says at its beginning, and docs/explanation/weight-sync.md after it."""
    for model, count in zip(MODELS, engines, strict=True):
        found = tree.flat_does(
            model,
            Way(),
            count,
            bandwidth=BANDWIDTH,
            per_rank=tree.INIT_S_PER_RANK["fast"],
            failures=tree.FAILURES[failures],
        )
        assert found == does, (model.name, count)


def test_the_search_ends_at_the_first_number_that_does_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree, "flat_does", lambda model, way, engines, **_: engines < 50)
    found = [
        tree.flat_does_until(model, Way(), bandwidth=1.0, per_rank=1.0, failures=1.0)
        for model in MODELS
    ]
    assert found == [48, 48, 48]
    assert [tree.GPUS // model.tensor_parallel for model in MODELS] == [8, 4, 2]
