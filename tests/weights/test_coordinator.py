"""The order of a publication, with a fake learner and fake engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_grpo.errors import SetupError, Stalled, TransferMismatch
from async_grpo.weights import deliveries, fan_out
from async_grpo.weights.checks import SelfCheckFailed
from async_grpo.weights.deliveries import WeightDelivery
from async_grpo.weights.transport import SELF_CHECK, Announcement, Receipt, TornTransfer
from tests.support.publishing import FakeEngine, Fixture, config, torn, until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "GRACE_S", 0.05)


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_publication_is_staged_received_and_then_live(overlap: bool) -> None:
    run = Fixture(config(overlap=overlap))
    await run.coordinator.start(3)
    run.learner.weight = 2.0
    await run.coordinator.publish(4)
    await run.coordinator.wait()
    assert run.events == [
        "rendezvous",
        "stage v0.3",
        "a0 takes v0.3",
        "a1 takes v0.3",
        "live 3",
        "stage v0.4",
        "a0 takes v0.4",
        "a1 takes v0.4",
        "live 4",
    ]
    assert [engine.weight for engine in run.members] == [2.0, 2.0]
    measured = run.coordinator.weight_metrics()
    assert measured["weights/syncs"] == 1  # of the run, without its start
    assert measured["weights/engine_paused_s"] == pytest.approx(0.25)
    assert measured["weights/recomputed_tokens"] == 14
    assert measured["weights/repeated"] == measured["weights/dropped_engines"] == 0


async def test_what_becomes_of_caches_is_said_once_and_counted() -> None:
    """Not before responses are running, and once of both engines."""
    run = Fixture()
    first, second = run.members
    await run.coordinator.start(0)
    for version, (kept, again) in enumerate([(0, 0), (5, 0), (0, 6), (5, 0)], 1):
        for engine in (first, second):
            engine.kept_tokens, engine.recomputed_tokens = kept, again
            engine.kv_cache = f"{'kept' if kept else 'computed again'} (because {version})"
        await run.coordinator.publish(version)
        await run.coordinator.wait()
    assert run.notes == [
        "first weight sync while responses are running: their KV caches are kept (because 2); "
        "the summary counts every choice"
    ]
    times = run.coordinator.times
    assert (times.caches_kept, times.caches_recomputed) == (4, 2)
    assert run.coordinator.weight_metrics()["weights/caches_kept"] == 4


async def test_with_overlap_the_learner_waits_for_the_one_before_only() -> None:
    run = Fixture()
    await run.coordinator.start(0)
    gate = run.members[0].gate = asyncio.Event()
    await run.coordinator.publish(1)
    assert run.events[-1] == "stage v0.1", "it returns as soon as the weights are staged"
    await until(lambda: "a0 takes v0.1" in run.events)
    second = asyncio.create_task(run.coordinator.publish(2))
    await asyncio.sleep(0.01)
    assert "stage v0.2" not in run.events, (
        "at most one publication is under way: a segment may still be read"
    )
    assert "live 1" not in run.events, "a0 does not serve it yet"
    gate.set()
    await second
    await run.coordinator.wait()
    assert [event for event in run.events if event.startswith(("live", "stage"))] == [
        "stage v0.0",
        "live 0",
        "stage v0.1",
        "live 1",
        "stage v0.2",
        "live 2",
    ]


@pytest.mark.parametrize(("overlap", "streamed"), [(False, False), (True, True)])
async def test_without_overlap_and_without_a_copy_publish_is_complete(
    overlap: bool, streamed: bool
) -> None:
    run = Fixture(config(overlap=overlap), backend="nccl")
    run.learner.streamed = streamed
    await run.coordinator.start(0)
    await run.coordinator.publish(1)
    assert run.events[-1] == "live 1"


async def test_a_waiter_that_gives_up_leaves_the_publication_alone() -> None:
    run = Fixture()
    await run.coordinator.start(0)
    gate = run.members[0].gate = asyncio.Event()
    await run.coordinator.publish(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run.coordinator.wait(), 0.01)
    gate.set()
    await run.coordinator.wait()
    assert run.events[-1] == "live 1"


@pytest.mark.parametrize("late", [True, False])
async def test_an_engine_that_dies_or_says_nothing_is_dropped_and_the_others_go_live(
    late: bool,
) -> None:
    run = Fixture(config(acknowledge_s=0.1))
    await run.coordinator.start(0)
    if late:
        run.members[0].gate = asyncio.Event()
    else:
        run.members[0].error = RuntimeError("gone")
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert list(run.dropped) == ["a0"]
    if late:
        assert "a0 did not answer weight sync v0.1 within its deadline (0.1 s at most)" in str(
            run.dropped["a0"]
        )
    assert run.members[0].label == "v0.1"
    assert run.events[-1] == "live 1"
    assert run.coordinator.weight_metrics()["weights/dropped_engines"] == 1


async def test_a_publication_that_takes_long_says_for_whom_it_waits(monkeypatch) -> None:
    monkeypatch.setattr(deliveries, "LATE_S", 0.05)
    run = Fixture()
    await run.coordinator.start(0)
    gate = run.members[1].gate = asyncio.Event()
    await run.coordinator.publish(1)
    await asyncio.sleep(0.5)
    gate.set()
    await run.coordinator.wait()
    first, *more = run.notes
    assert first == "weight sync v0.1 waits for a1 on h, 0 s", "a0 has answered"
    assert 1 <= len(more) <= 3, "it says so whenever the wait has doubled"


async def test_an_engine_that_fails_at_the_start_ends_the_run() -> None:
    run = Fixture()
    run.members[1].error = RuntimeError("no such tensor")
    with pytest.raises(RuntimeError, match="no such tensor"):
        await run.coordinator.start(0)
    assert "live 0" not in run.events


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_failed_send_ends_the_publication(streamed: bool) -> None:
    run = Fixture(backend="nccl")
    await run.coordinator.start(0)
    run.learner.streamed = streamed
    run.learner.send_error = RuntimeError("the learner died")
    for version in (1, 2):
        with pytest.raises(RuntimeError, match="the learner died"):
            await run.coordinator.publish(version)
    assert run.events[-1] != "live 1"


async def test_refresh_raises_what_a_publication_under_way_raised() -> None:
    run = Fixture()
    await run.coordinator.start(0)
    run.live_error = RuntimeError("the queue is gone")
    await run.coordinator.publish(1)
    await until(run.coordinator._running.done)
    with pytest.raises(RuntimeError, match="the queue is gone"):
        await run.coordinator.refresh(1)


# ---- torn weight syncs ----


async def test_a_torn_engine_takes_the_publication_again_before_it_is_live() -> None:
    run = Fixture()
    await run.coordinator.start(0)
    run.members[1].failures = [torn(), torn()]
    run.learner.weight = 2.0
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert not run.dropped
    assert [engine.received[1:] for engine in run.members] == [["v0.1"]] * 2, (
        "the other one took it once"
    )
    assert run.members[1].weight == 2.0
    assert run.events[-1] == "live 1"
    assert run.coordinator.weight_metrics()["weights/repeated"] == 2
    assert run.notes == ["weight sync v0.1 was cut off and is repeated: a1: cut off"], "once"


async def test_an_engine_that_stays_torn_is_dropped_where_it_tears_nobody_else() -> None:
    run = Fixture()
    await run.coordinator.start(0)
    run.members[1].failures = [torn("segment gone")] * 3
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert str(run.dropped["a1"]) == "segment gone" and run.events[-1] == "live 1"


async def test_a_group_that_stays_torn_ends_the_run() -> None:
    run = Fixture(backend="nccl")
    await run.coordinator.start(0)
    run.members[1].failures = [torn("no bucket moved")] * 3
    await run.coordinator.publish(1)
    with pytest.raises(Stalled, match=r"v0\.1 was cut off 3 times: a1: no bucket moved"):
        await run.coordinator.wait()
    assert "live 1" not in run.events and not run.dropped


async def test_nccl_forms_the_group_again_without_the_culprit_and_repeats_for_all() -> None:
    run = Fixture(config(acknowledge_s=1.0), engines=3, backend="nccl")
    await run.coordinator.start(0)
    silent = run.members[1]
    silent.gate = asyncio.Event()
    for engine in (run.members[0], run.members[2]):
        engine.failures = [torn("no bucket moved")]
    run.learner.weight = 2.0
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert list(run.dropped) == ["a1"], "those that say that they are torn are not to blame"
    assert run.learner.groups == [[1, 1, 1], [1, 1]]
    assert [(engine.group, engine.weight, engine.label) for engine in run.members] == [
        (2, 2.0, "v0.1")
    ] * 2
    assert run.events[-1] == "live 1"


async def test_nccl_repeats_for_all_when_the_learner_is_torn() -> None:
    run = Fixture(backend="nccl")
    await run.coordinator.start(0)
    run.learner.torn, run.learner.streamed = ["no bucket moved"], True
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert [engine.received for engine in run.members] == [["v0.0", "v0.1", "v0.1"]] * 2
    assert run.learner.groups == [[1, 1]] * 2
    assert run.events[-1] == "live 1"


async def test_nccl_drops_an_engine_that_dies_in_the_rendezvous() -> None:
    run = Fixture(engines=3, backend="nccl")
    await run.coordinator.start(0)
    run.members.pop(0)
    run.members[0].connecting = RuntimeError("killed")
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert list(run.dropped) == ["a1"]
    assert run.learner.groups == [[1, 1, 1], [1, 1], [1]]
    assert run.events[-1] == "live 1"


@pytest.mark.parametrize(("groups", "times"), [(0, 1), (1, 1), (4, 4)])
async def test_engines_have_time_to_join_every_group(
    monkeypatch: pytest.MonkeyPatch, groups: int, times: int
) -> None:
    """With several senders they join one group after another."""
    run, waits = Fixture(engines=2, backend="nccl"), []
    ask, connect = WeightDelivery._ask, run.learner.connect

    async def asked(self: Any, *args: Any, seconds: float, what: str, **more: Any) -> Any:
        if what == "the rendezvous":
            waits.append(seconds - deliveries.GRACE_S)
        return await ask(self, *args, seconds=seconds, what=what, **more)

    async def connected(sizes: list[int]) -> list[dict[str, Any]]:
        return [one | {"groups": [{}] * groups} for one in await connect(sizes)]

    monkeypatch.setattr(WeightDelivery, "_ask", asked)
    monkeypatch.setattr(run.learner, "connect", connected)
    await run.coordinator.start(0)
    assert waits == [pytest.approx(0.1 * times)]


async def test_the_last_engine_may_die_and_the_publication_still_ends() -> None:
    run = Fixture(engines=1)
    await run.coordinator.start(0)
    run.members[0].error = RuntimeError("gone")
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    newcomer = FakeEngine("b0", run.events)
    await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    assert newcomer.label == "v0.1"


@pytest.mark.parametrize(
    ("failure", "error"), [("mismatch", TransferMismatch), ("names", SetupError)]
)
async def test_wrong_bytes_and_wrong_names_end_the_run(
    failure: str, error: type[Exception]
) -> None:
    run = Fixture()
    await run.coordinator.start(0)
    run.members[1].failures = [Receipt("v0.0", failure, "bucket 2 of 3")]
    await run.coordinator.publish(1)
    with pytest.raises(error, match="engine a1: bucket 2 of 3"):
        await run.coordinator.wait()
    assert "live 1" not in run.events


async def test_an_engine_that_acknowledges_another_version_is_dropped() -> None:
    async def acknowledges_version_0(announcement: Announcement) -> Receipt:
        return Receipt("v0.0", seconds={"total": 0.0})

    run = Fixture()
    await run.coordinator.start(0)
    run.members[0].receive = acknowledges_version_0
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert "acknowledges v0.0 where v0.1 was sent" in str(run.dropped["a0"])


# ---- newcomers ----


async def test_no_publication_slips_between_a_newcomers_weights_and_its_admission() -> None:
    run = Fixture()
    await run.coordinator.start(0)
    newcomer = FakeEngine("b0", run.events, gate=asyncio.Event())
    joining = asyncio.create_task(
        run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    )
    await until(lambda: "b0 takes v0.0" in run.events)
    run.learner.weight = 2.0
    publishing = asyncio.create_task(run.coordinator.publish(1))
    await asyncio.sleep(0.01)
    assert "stage v0.1" not in run.events, (
        "a publication began while a newcomer was reading the one before"
    )
    newcomer.gate.set()
    await asyncio.gather(joining, publishing)
    await run.coordinator.wait()
    assert newcomer.received == ["v0.0", "v0.1"]
    assert newcomer.weight == 2.0


async def test_a_newcomer_is_checked_while_a_publication_goes_on_and_learns_of_it() -> None:
    run = Fixture(config(self_check=True))
    await run.coordinator.start(0)
    newcomer = FakeEngine("b0", run.events)
    newcomer.gate = asyncio.Event()
    joining = asyncio.create_task(
        run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    )
    await until(lambda: f"b0 takes {SELF_CHECK}" in run.events)
    run.learner.weight = 2.0
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert run.events[-1] == "live 1", "the check of a newcomer holds nobody up"
    newcomer.gate.set()
    await joining
    assert newcomer.received == [SELF_CHECK, "v0.1"]
    assert newcomer.weight == 2.0


async def test_a_newcomer_that_ignores_weights_ends_the_run() -> None:
    run = Fixture(config(self_check=True))
    await run.coordinator.start(0)
    newcomer = FakeEngine("b0", run.events, deaf=True)
    with pytest.raises(SelfCheckFailed, match="engine b0"):
        await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    assert newcomer not in run.members


@pytest.mark.parametrize("limit_s", [30.0, 0.05])
async def test_responses_of_a_test_have_the_time_of_a_group(limit_s: float) -> None:
    """Where prompts are long, they take longer than weights do to arrive."""
    run = Fixture(config(acknowledge_s=0.05, group_timeout_s=limit_s, verify_every=1))
    say = run.members[0].probe_sequences

    async def slow() -> Any:
        await asyncio.sleep(0.2)
        return await say()

    run.members[0].probe_sequences = slow
    if limit_s > 1:
        await run.coordinator.start(0)
    else:
        with pytest.raises(
            TimeoutError, match=r"of a0 took longer than 0\.05 s: .*group_timeout_s"
        ):
            await run.coordinator.start(0)


@pytest.mark.parametrize("failure", ["late", "torn"])
async def test_a_newcomer_that_cannot_take_the_weights_is_not_admitted(failure: str) -> None:
    run = Fixture(config(acknowledge_s=0.05))
    await run.coordinator.start(0)
    newcomer = FakeEngine("b0", run.events)
    if failure == "late":
        newcomer.gate = asyncio.Event()
    else:
        newcomer.failures = [torn()]
    with pytest.raises(TimeoutError if failure == "late" else TornTransfer, match="b0"):
        await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    assert newcomer not in run.members
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert run.events[-1] == "live 1", "the lock is free again"


async def test_nccl_forms_a_new_group_when_a_member_is_gone() -> None:
    run = Fixture(engines=3, backend="nccl")
    await run.coordinator.start(0)
    assert run.learner.groups == [[1, 1, 1]]
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert len(run.learner.groups) == 1, "the same members keep their group"
    run.members.pop(1)
    await run.coordinator.refresh(1)
    assert len(run.learner.groups) == 1, "a member less needs nothing before the next publication"
    await run.coordinator.publish(2)
    assert run.learner.groups[1:] == [[1, 1]]
    assert [engine.group for engine in run.members] == [2, 2]


@pytest.mark.parametrize("self_check", [False, True])
async def test_nccl_refresh_serves_a_newcomer_and_makes_the_version_live(self_check: bool) -> None:
    run = Fixture(config(every=2, self_check=self_check), backend="nccl")
    await run.coordinator.start(0)
    newcomer = FakeEngine("b0", run.events)
    await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    assert newcomer.label == "unpublished"
    assert newcomer not in run.coordinator.serving(), (
        "an evaluation must not ask an engine that holds the first weights"
    )
    # The learner is one step past the last weight sync: what is sent now is version 1 and has
    # to be live, or nobody gets tickets.
    await run.coordinator.refresh(1)
    assert run.learner.groups[-1] == [1, 1, 1]
    assert [engine.label for engine in run.members] == ["v0.1"] * 3
    assert newcomer.received == [SELF_CHECK] * self_check + ["v0.1"], (
        "the check is its own, in a group of its own"
    )
    assert [engine.received.count(SELF_CHECK) for engine in run.members] == [int(self_check)] * 3
    assert newcomer in run.coordinator.serving()
    assert run.events[-1] == "live 1"
    sent = len(run.events)
    await run.coordinator.refresh(1)
    assert len(run.events) == sent, "nothing changed, nothing is sent"


async def test_nccl_newcomer_that_arrives_while_weights_are_staged_waits_for_its_group() -> None:
    run = Fixture(backend="nccl")
    await run.coordinator.start(0)
    newcomer = FakeEngine("b0", run.events)
    run.learner.at_stage = lambda: None if newcomer in run.members else run.members.append(newcomer)
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert not run.dropped
    assert newcomer.received == [], "it is in no group yet"
    await run.coordinator.publish(2)
    await run.coordinator.wait()
    assert newcomer.received == ["v0.2"]


# ---- what the numbers must show ----


async def test_self_check_passes_for_honest_engines_and_leaves_the_true_weights() -> None:
    run = Fixture(config(self_check=True))
    measured = await run.coordinator.start(0)
    assert measured["weights/self_check_error"] < 1e-6
    assert measured["weights/self_check_moved"] == pytest.approx(0.1, rel=1e-3)
    assert measured["weights/self_check_sampler_error"] < 1e-6
    assert [engine.received for engine in run.members] == [[SELF_CHECK, "v0.0"]] * 2
    assert [engine.weight for engine in run.members] == [1.0, 1.0]
    assert SELF_CHECK not in [event.removeprefix("live ") for event in run.events]


@pytest.mark.parametrize(("exact", "moves"), [(True, 1.0), (False, 1.0), (False, 40.0)])
async def test_self_check_finds_an_engine_that_ignores_updates(exact: bool, moves: float) -> None:
    run = Fixture(config(self_check=True), moves=moves, exact=exact)
    run.members[1].deaf = True
    with pytest.raises(SelfCheckFailed, match="engine a1"):
        await run.coordinator.start(0)
    assert "live 0" not in run.events


async def test_self_check_allows_rounding_and_looks_harder_when_it_hides_the_test() -> None:
    run = Fixture(config(self_check=True), moves=1.2, exact=False)
    run.members[0].noise = 0.02
    measured = await run.coordinator.start(0)
    # the true weights; then perturbations that move 0.36, 0.5, 0.72 and 1.0: smaller ones show
    # nothing, and the last moves 12 times what is allowed, four times the noise
    assert run.members[0].received == [SELF_CHECK] * 5 + ["v0.0"]
    assert measured["weights/self_check_moved"] == pytest.approx(1.008, rel=1e-3)
    assert measured["weights/self_check_sampler_error"] == pytest.approx(0.02, rel=1e-3)
    assert run.learner.weight == 1.0


@pytest.mark.parametrize(
    ("noise", "exact"), [(1e-3, True), (float("nan"), True), (0.2, False), (float("nan"), False)]
)
async def test_self_check_refuses_wrong_logprobs(noise: float, exact: bool) -> None:
    run = Fixture(config(self_check=True), exact=exact)
    run.members[0].noise = noise
    with pytest.raises(SelfCheckFailed, match="engine a0"):
        await run.coordinator.start(0)


@pytest.mark.parametrize(
    ("moves", "message"),
    [(0.0, "too little to tell"), (1e-4, "too little to tell"), (float("nan"), "disagree")],
)
@pytest.mark.parametrize("exact", [True, False])
async def test_self_check_refuses_a_perturbation_that_shows_nothing(
    moves: float, message: str, exact: bool
) -> None:
    run = Fixture(config(self_check=True), moves=moves, exact=exact)
    with pytest.raises(SelfCheckFailed, match=message):
        await run.coordinator.start(0)


async def test_a_newcomer_is_checked_when_the_noise_has_raised_the_bound() -> None:
    run = Fixture(config(self_check=True), moves=2.0, exact=False)
    run.members[0].noise = 0.004
    await run.coordinator.start(0)
    assert run.members[0].received == [SELF_CHECK] * 4 + ["v0.0"]
    newcomer = FakeEngine("b0", run.events, noise=0.009)
    await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    assert newcomer.received == [SELF_CHECK] * 4 + ["v0.0"], (
        "the true weights, and what showed enough at the start, which is not enough for a "
        "newcomer with more noise"
    )


@pytest.mark.parametrize("how", ["dies", "torn"])
async def test_nccl_newcomer_that_dies_in_its_check_is_dropped(how: str) -> None:
    run = Fixture(config(self_check=True), backend="nccl")
    await run.coordinator.start(0)
    newcomer = FakeEngine("b0", run.events)
    if how == "dies":
        newcomer.error = RuntimeError("killed")
    else:
        newcomer.failures = [torn()]
    await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
    await run.coordinator.publish(1)
    await run.coordinator.wait()
    assert list(run.dropped) == ["b0"] and run.events[-1] == "live 1"
    assert [engine.received for engine in run.members] == [[SELF_CHECK, "v0.0", "v0.1"]] * 2


async def test_the_last_probes_are_waited_for_and_their_findings_raised() -> None:
    run = Fixture(config(verify_every=2))
    await run.coordinator.start(0)
    await run.coordinator.publish(1)
    run.learner.weight, run.members[1].deaf = 5.0, True
    await run.coordinator.publish(2)
    with pytest.raises(
        TransferMismatch, match=r"engine a1 does not compute with the weights v0\.2"
    ):
        await run.coordinator.settle()


async def train(run: Fixture, *versions: int) -> None:
    """Publish these versions, each with other weights, and let the probes answer."""
    for version in versions:
        run.learner.weight = 1.0 + version
        await run.coordinator.publish(version)
        await run.coordinator.wait()
        for _ in range(10):
            await asyncio.sleep(0)


async def test_every_nth_publication_is_verified_and_probed() -> None:
    run = Fixture(config(verify_every=3))
    await run.coordinator.start(0)
    await train(run, 1, 2, 3, 4, 5, 6, 7)
    assert run.learner.verified == ["v0.0", "v0.3", "v0.6"]
    assert [engine.scored for engine in run.members] == [["v0.3", "v0.6"]] * 2
    measured = run.coordinator.weight_metrics()
    assert (measured["weights/probes"], measured["weights/probes_owed"]) == (4, 0)
    assert measured["weights/drift"] < 1e-6
    await run.coordinator.close()


async def test_a_drift_probe_allows_for_the_noise_that_the_start_has_measured() -> None:
    run = Fixture(config(self_check=True, verify_every=1), moves=1.2, exact=False)
    run.members[0].noise = 0.02
    await run.coordinator.start(0)
    run.members[0].noise = 0.05
    await run.coordinator.publish(1)
    await run.coordinator.settle()
    assert run.coordinator.weight_metrics()["weights/drift"] > 0.03


@pytest.mark.parametrize("way", ["deaf", "noise"])
async def test_the_drift_alarm_ends_the_run_at_the_next_boundary(way: str) -> None:
    run = Fixture(config(verify_every=2))
    await run.coordinator.start(0)
    if way == "deaf":
        run.members[1].deaf = True
    else:
        run.members[1].noise = 1e-3
    await train(run, 1, 2)
    with pytest.raises(
        TransferMismatch,
        match=r"engine a1 does not compute with the weights v0\.2 that it acknowledged: "
        r"log-probs differ by",
    ):
        await run.coordinator.refresh(2)
    with pytest.raises(TransferMismatch):
        await run.coordinator.publish(3)


async def test_a_probe_that_spans_two_versions_or_an_unknown_one_is_repeated() -> None:
    run = Fixture(config(verify_every=4))
    await run.coordinator.start(0)
    run.members[0].spans = [["v0.4", "v0.5"], ["v0.3"]]
    await train(run, 1, 2, 3, 4)
    assert run.coordinator.weight_metrics()["weights/probes_owed"] == 1
    await train(run, 5)
    assert run.coordinator.weight_metrics()["weights/probes_owed"] == 1
    run.members[0].deaf = True
    await train(run, 6)  # asked a third time, and now it can be compared
    assert run.members[0].scored == ["v0.4", "v0.5", "v0.6"]
    assert run.members[1].scored == ["v0.4"]
    with pytest.raises(TransferMismatch, match="engine a0"):
        run.coordinator._probe.raise_findings()
