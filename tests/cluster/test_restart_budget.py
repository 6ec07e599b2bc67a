"""The budget of rollout actors: what is decided after each fault. No process, an invented clock."""

from __future__ import annotations

import pytest

from async_grpo.cluster.restart_budget import FORGIVEN_S, Decision, RestartBudget, back_off_s
from async_grpo.config.operation import Cluster


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def budget_of(budget: int, *, least: int = 1, clock: Clock | None = None) -> RestartBudget:
    settings = Cluster.model_validate(
        {"restart_budget": budget, "resources_timeout_s": 20, "rollout_actors": {"min": least}}
    )
    return RestartBudget(settings, clock=clock or Clock())


def test_a_death_within_the_budget_gets_a_successor_after_a_pause() -> None:
    budget = budget_of(5)
    pauses = [budget.died(f"actor-0.{count} died", deaths=count).after_s for count in range(1, 6)]
    assert pauses == [0.0, 2.0, 10.0, 30.0, 30.0] == [back_off_s(count) for count in range(1, 6)]
    assert (budget.faults, budget.spent) == (5, 5)
    assert budget.deaths[0] == "actor-0.1 died" and len(budget.deaths) == 5


def test_a_death_beyond_the_budget_gets_none_and_is_no_fault_of_it() -> None:
    budget = budget_of(1)
    assert budget.died("a died", deaths=1) == Decision(again=True)
    none = budget.died("b died", deaths=1)
    assert none == Decision(again=False, why="b died; the restart budget is spent")
    assert budget.faults == 1 and budget.deaths == ["a died", "b died"]
    assert not budget_of(0).died("a died", deaths=1).again


def test_a_fault_of_long_ago_is_forgiven_and_still_counted() -> None:
    clock = Clock()
    budget = budget_of(1, clock=clock)
    budget.died("a died", deaths=1)
    clock.now += FORGIVEN_S - 1
    assert not budget.died("b died", deaths=2).again and budget.spent == 1
    clock.now += 1
    assert budget.spent == 0
    assert budget.died("c died", deaths=3) == Decision(again=True, after_s=10.0)
    assert (budget.faults, budget.spent) == (2, 1)


def test_a_place_without_resources_is_not_a_second_fault() -> None:
    budget = budget_of(3)
    budget.died("a died", deaths=1)
    assert budget.unplaced("a died") == Decision(
        again=False, why="a died; it got no resources within cluster.resources_timeout_s = 20 s"
    )
    assert budget.faults == 1 == len(budget.deaths)


@pytest.mark.parametrize(
    ("lost", "said"),
    [(["actor-1.0", "actor-2.3"], "actor-1.0, actor-2.3"), ([], "a free engine slot")],
)
def test_a_node_is_one_fault_whatever_was_on_it(lost: list[str], said: str) -> None:
    budget = budget_of(1)
    sentence = f"node 10.0.0.2 left the cluster, and with it {said}"
    assert budget.node_left("10.0.0.2", lost) == sentence == budget.deaths[-1]
    assert budget.faults == 1
    assert not budget.died("a died", deaths=1).again, "it was the budget"
    budget.node_left("10.0.0.3", lost)
    assert budget.faults == 2, "nodes go, whatever the budget is"


def test_a_run_with_fewer_than_the_least_number_ends_in_a_sentence() -> None:
    budget = budget_of(2, least=2)
    assert budget.enough(2) and not budget.enough(1)
    early = budget.too_few(1, "the run has not begun", cluster="1 node")
    assert early.exit_code == 4 and str(early) == (
        "1 rollout actors are alive, cluster.rollout_actors.min is 2, and the run has not begun; "
        "0 faults count against cluster.restart_budget = 2; the cluster has 1 node"
    )
    budget.died("a died", deaths=1)
    budget.node_left("n", [])
    late = budget.too_few(0, "the cluster has no room for another", cluster="no node")
    assert "; node n left the cluster, and with it a free engine slot; 2 faults count" in str(late)
