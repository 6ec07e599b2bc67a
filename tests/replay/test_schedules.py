"""The replay queue under random schedules of every hazard: no order breaks its bound, loses a
group, trains one twice, or stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from async_grpo.replay import events
from async_grpo.replay import order as order_module
from async_grpo.replay import queue as queue_module
from async_grpo.replay.journal import Writer
from async_grpo.replay.ledger import Ledger
from async_grpo.replay.order import Oldest
from async_grpo.replay.rules import QueueSettings
from async_grpo.tools.predict.engine import Speed
from tests.support.simulation.scenario import Scenario
from tests.support.simulation.simulator import simulate

MODES = [
    ("oldest", "wait"),
    ("fifo", "wait"),
    *((order, stale) for stale in ("mask", "expire") for order in ("oldest", "fifo", "ready")),
]
FAST = (("oldest", "wait"), ("fifo", "mask"), ("ready", "expire"))
"""Every order and every rule for stale groups once; the rest is slow."""
SCHEDULES = 130
SHARED = Speed(((1, 4.0), (4, 8.0)), prompt=40.0)
"""Of an engine that is four times as fast full as a response is in it."""
HAZARDS = {
    "reject": (0.0, 0.05, 0.3),
    "fail": (0.0, 0.05, 0.3),
    "invalid": (0.0, 0.05, 0.2),
    "lost_reply": (0.0, 0.05, 0.3),
    "lost_ack": (0.0, 0.3),
    "death": (0.0, 0.02, 0.1),
    "queue_death": (0.0, 0.0, 0.005, 0.02),
}


@st.composite
def scenarios(draw: Callable, order: str, on_stale: str, any_limit: bool) -> Scenario:
    """Short runs with small groups: what can go wrong goes wrong within a few steps."""

    def one_of(*values: object) -> object:
        return draw(st.sampled_from(values))

    max_staleness, timeout = one_of(0, 1, 1, 1, 2, 3, 4), one_of(None, None, 1.0, 12.0)
    problems = one_of(0, 0, 0, 2, 9, 25)
    return Scenario(
        seed=draw(st.integers(0, 2**32)),
        order=order,
        on_stale=on_stale,
        max_staleness=max_staleness,
        any_limit=any_limit,
        rollout_batch_size=draw(st.integers(1, 4)),
        total_steps=draw(st.integers(5, 8)),
        max_attempts=draw(st.integers(2, 4)),
        ticket_timeout_s=timeout,
        baseline=draw(st.booleans()),
        problems=problems,
        weights=() if problems else one_of((), (1.0, 2.0), (5.0, 3.0, 1.0), (0.7, 0.3)),
        retire_at=one_of(0.5, 1.0),
        spread=one_of(1.0, 2.0),
        speed=one_of(Speed.alone(1.0), Speed.alone(4.0), SHARED),
        turns=one_of((1, 1), (1, 1), (1, 3)),
        environment_s=one_of(0.0, 1.0),
        prompt_tokens=one_of(0.0, 2.0),
        pause_s=one_of(0.0, 0.5),
        call_s=one_of(0.0, 0.0, 0.01),
        actors=draw(st.integers(1, 4)),
        places=draw(st.integers(1, 16)),
        learner_s=one_of(0.1, 1.0, 5.0),
        publish_every=draw(st.integers(1, max_staleness + 1)),
        late_live_s=one_of(0.0, 3.0),
        overlap=draw(st.booleans()),
        hang=0.0 if timeout is None else one_of(0.0, 0.1),
        restarts=one_of((), (), (3,), (2, 4)),
        lost_steps=draw(st.integers(0, 2)),
        **{name: one_of(*chances) for name, chances in HAZARDS.items()},
    )


def run_schedules(
    order: str, on_stale: str, count: int, *, any_limit: bool
) -> tuple[Counter[str], Counter[str]]:
    """How the schedules ended, and what happened in them. any_limit: the number of groups that may
    be outstanding changes at random all the time; else by the queue's own rule.
    """
    ended: Counter[str] = Counter()
    seen: Counter[str] = Counter()

    # Not reduced: the error names the scenario, and reducing takes minutes.
    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(scenario=scenarios(order, on_stale, any_limit))
    def one(scenario: Scenario) -> None:
        result = simulate(scenario)
        ended[result.ended] += 1
        seen.update(result.seen)

    one()
    return ended, seen


def check_that_it_shows_something(on_stale: str, ended: Counter[str], seen: Counter[str]) -> None:
    happened = [
        "accepted",
        "rejected",
        "fail",
        "invalid",
        "lost_reply",
        "lost_ack",
        "death",
        "forfeited",
        "last_frame",
        "late",
        "overdue",
        "hang",
        "spans",
        "skipped",
        "queue_death",
        "restart",
        "lost_steps",
        "owed",
        *{"expire": ["expired"], "mask": ["masked"]}.get(on_stale, []),
    ]
    missing = [name for name in happened if seen[name] < 5]
    assert not missing, f"the schedules do not show {missing}: {seen}"
    assert ended["trained"] > sum(ended.values()) / 2 and ended["retired"] > 0, (
        f"the schedules end too soon: {ended}"
    )


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("order", "on_stale"),
    [mode if mode in FAST else pytest.param(*mode, marks=pytest.mark.slow) for mode in MODES],
)
def test_no_schedule_breaks_a_rule_or_stops_the_run(order: str, on_stale: str, times: int) -> None:
    found = run_schedules(order, on_stale, times * SCHEDULES, any_limit=True)
    check_that_it_shows_something(on_stale, *found)


@pytest.mark.parametrize("times", [0.2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("order", "on_stale"),
    [mode if mode in FAST else pytest.param(*mode, marks=pytest.mark.slow) for mode in MODES],
)
def test_nor_does_one_under_the_limit_of_the_queue(order: str, on_stale: str, times: float) -> None:
    ended, seen = run_schedules(order, on_stale, int(times * SCHEDULES), any_limit=False)
    assert ended["trained"] > sum(ended.values()) / 2
    if times > 1:
        check_that_it_shows_something(on_stale, ended, seen)


def test_a_scenario_always_gives_the_same_run() -> None:
    scenario = Scenario(
        seed=3,
        death=0.05,
        fail=0.1,
        lost_ack=0.2,
        queue_death=0.02,
        restarts=(3,),
        lost_steps=1,
        on_stale="mask",
    )
    first, second = simulate(scenario), simulate(scenario)
    assert first == second and first.seen["queue_death"] > 0
    assert simulate(replace(scenario, seed=4)).trained != first.trained


@pytest.mark.slow
def test_two_thousand_actors() -> None:
    result = simulate(
        Scenario(
            actors=2_000,
            places=2,
            rollout_batch_size=200,
            max_staleness=1,
            total_steps=3,
            poll_s=8.0,
            death=0.01,
        )
    )
    assert result.counts["trained"] == 600 and result.seen["death"] > 20


HANGING = Scenario(seed=1, hang=0.15, actors=4, total_steps=8)


def test_without_a_deadline_a_hanging_producer_stops_the_run() -> None:
    with pytest.raises(AssertionError, match="stuck at step"):
        simulate(HANGING)


@pytest.mark.parametrize(("order", "on_stale"), MODES)
def test_with_a_deadline_a_hanging_producer_does_not_stop_the_run(
    order: str, on_stale: str
) -> None:
    results = [
        simulate(replace(HANGING, seed=seed, order=order, on_stale=on_stale, ticket_timeout_s=5.0))
        for seed in range(5)
    ]
    assert {result.ended for result in results} == {"trained"}
    assert (
        sum(result.seen["hang"] for result in results) > 3
        and sum(result.counts["overdue"] for result in results) > 3
    )


# ---- the simulator finds what is broken ----

OLD = Scenario(max_staleness=1, total_steps=8, spread=1.5, learner_s=0.1)
ROUGH = replace(
    OLD,
    fail=0.1,
    death=0.05,
    lost_reply=0.1,
    lost_ack=0.2,
    queue_death=0.02,
    restarts=(3,),
    lost_steps=1,
)
apply_event, append_event, by_age = Ledger.apply, Writer.append_event, Oldest.sorted


def without(*kinds: type) -> Callable:
    """A ledger that does not notice these events."""
    return lambda self, event, **rest: (
        None if isinstance(event, kinds) else apply_event(self, event, **rest)
    )


def unwritten(*kinds: type) -> Callable:
    """A journal that does not write these events."""
    return lambda self, event, payload=b"": (
        None if isinstance(event, kinds) else append_event(self, event, payload)
    )


BROKEN = {
    "every batch leaves": (OLD, order_module, "can_leave", lambda *_, **__: True, "StalenessError"),
    "the order is reversed": (
        replace(OLD, on_stale="mask", learner_s=5.0, max_staleness=3),
        Oldest,
        "sorted",
        lambda *rest: by_age(*rest)[::-1],
        "the order says",
    ),
    "nothing is too old": (
        replace(OLD, on_stale="expire"),
        order_module,
        "is_too_old",
        lambda *_, **__: False,
        "StalenessError",
    ),
    "a slot too many": (
        OLD,
        QueueSettings,
        "capacity",
        property(lambda self: 2 * self.rollout_batch_size + 1),
        "outstanding",
    ),
    "slots are not freed": (OLD, Ledger, "apply", without(events.Live), "stuck|cannot be live"),
    "failed groups are forgotten": (
        ROUGH,
        Ledger,
        "apply",
        without(events.Fail),
        "stuck|taken away",
    ),
    "the journal misses results": (
        ROUGH,
        Writer,
        "append_event",
        unwritten(events.Put),
        "has no frame|cannot have happened",
    ),
    "the journal misses publications": (
        ROUGH,
        Writer,
        "append_event",
        unwritten(events.Live),
        "knows",
    ),
    "the journal misses tickets": (
        ROUGH,
        Writer,
        "append_event",
        unwritten(events.Issue),
        "ids given|cannot have happened",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    scenario, owner, attribute, value, found = BROKEN[name]
    monkeypatch.setattr(owner, attribute, value)
    with pytest.raises(AssertionError, match=found):
        for seed in range(20):
            simulate(replace(scenario, seed=seed))


def test_the_bound_is_checked_by_the_simulator_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "can_leave", lambda *_, **__: True)
    monkeypatch.setattr(queue_module, "check_bound", lambda *_, **__: None)
    with pytest.raises(AssertionError, match=r"trains group \d+ at lag [23]"):
        for seed in range(20):
            simulate(replace(OLD, seed=seed))
