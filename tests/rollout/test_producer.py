"""A rollout actor with a fake engine, verifiers and queue: what becomes of a group, and of a
held-out problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.schema import Deadlines
from async_grpo.errors import SetupError, VerifierFailed
from async_grpo.replay.actor_reports import ActorReport, ActorReports
from async_grpo.rollout.engine.base import Completion, EngineError, Sampling
from async_grpo.rollout.engine.vllm.engine import CountedRequests, VllmEngine
from async_grpo.rollout.producer import GroupProducer
from async_grpo.tasks.base import Problem, Score
from async_grpo.tasks.mixture import ProblemOrder, load_tasks
from async_grpo.tasks.verifier import VerifierError
from async_grpo.wire.codec import GroupTicket, decode_group
from async_grpo.wire.kept import KeptSets
from tests.support.rollout_parts import Parts, actor_of


def run(parts: Parts, **settings: Any) -> None:
    asyncio.run(asyncio.wait_for(actor_of(parts, **settings).run(), 10))


def test_an_actor_that_was_not_started_says_so() -> None:
    actor = actor_of(Parts())
    actor._parts = None
    assert asyncio.run(actor.status())["serving"] == "it is starting"
    with pytest.raises(RuntimeError, match=r"a has not loaded its engine; call start\(\) first"):
        asyncio.run(actor.health())


def test_every_ticket_becomes_a_frame() -> None:
    parts = Parts()
    run(parts)
    assert sorted(meta.group_id for meta in parts.frames) == [0, 1]
    assert {tuple(row.role for row in meta.rows) for meta in parts.frames} == {("train", "train")}
    assert not parts.failed and len(parts.asked) == 2


@pytest.mark.parametrize("seeded", [True, False])
async def test_remax_adds_one_greedy_response_to_the_same_prompt(seeded: bool) -> None:
    parts = Parts()
    actor = actor_of(parts, adv_estimator="remax", seeded=seeded)

    await asyncio.wait_for(actor.run(), 10)
    told = dict((await actor.final_report()).counters)
    assert {tuple((row.role, row.length) for row in meta.rows) for meta in parts.frames} == {
        (("train", 2), ("train", 2), ("baseline", 3))
    }
    assert parts.scored == [3, 3]  # with the others, in one call
    assert (told["groups"], told["tokens"], told["baseline_tokens"]) == (2, 8, 6)
    greedy = [(prompt, sampling) for prompt, sampling in parts.asked if sampling.temperature == 0]
    samples = [(prompt, sampling) for prompt, sampling in parts.asked if sampling.temperature > 0]
    assert [prompt for prompt, _ in greedy] == [prompt for prompt, _ in samples] == [[0, 1, 2]] * 2
    assert all(
        (sampling.n, sampling.seed, sampling.max_tokens) == (1, None, 8) for _, sampling in greedy
    )
    assert all(sampling.n == 2 and (sampling.seed is not None) == seeded for _, sampling in samples)
    assert (
        parts.most_running == 4
    )  # both groups, and in each the samples beside the greedy response


async def test_a_group_without_its_baseline_is_failed_and_its_samples_are_aborted() -> None:
    parts = Parts(engine=EngineError("aborted"))
    parts.only_greedy_fails = True

    await asyncio.wait_for(actor_of(parts, adv_estimator="remax").run(), 10)
    assert parts.cancelled == 2, "before the loop closes, which cancels what is left"
    assert (
        parts.failed == {0: "EngineError: aborted", 1: "EngineError: aborted"} and not parts.frames
    )


def test_a_group_that_cannot_be_generated_is_failed_by_name_and_a_dead_engine_ends_the_actor() -> (
    None
):
    parts = Parts(engine=EngineError("aborted"))
    run(parts)
    assert parts.failed == {0: "EngineError: aborted", 1: "EngineError: aborted"}
    with pytest.raises(EngineError, match="not healthy"):
        run(Parts(engine=EngineError("aborted"), dead=True))


def test_an_engine_that_hangs_ends_the_actor() -> None:
    parts = Parts()
    parts.hangs = True
    with pytest.raises(
        EngineError, match=r"no group came out of the engine for rollout.group_timeout_s = 0.2 s"
    ):
        run(parts, group_timeout_s=0.2)


def test_a_verifier_that_takes_too_long_costs_groups_and_not_the_engine() -> None:
    parts = Parts()
    parts.score_many = lambda pairs: asyncio.sleep(60)
    run(parts, group_timeout_s=0.2)
    assert parts.failed == dict.fromkeys(
        (0, 1), "timeout: no result within rollout.group_timeout_s = 0.2 s, it was verifying"
    )


def test_what_a_verifier_error_does_is_configured() -> None:
    broken = VerifierError("crash", "out of order")
    dropped, zeros = Parts(verifier=broken), Parts(verifier=broken)
    run(dropped)
    assert dropped.failed == dict.fromkeys((0, 1), "verifier: crash: out of order")
    run(zeros, on_error="zero")
    assert [row.rewards for meta in zeros.frames for row in meta.rows] == [{"correct": 0.0}] * 4
    with pytest.raises(VerifierFailed, match="out of order"):
        run(Parts(verifier=broken), on_error="fail")


def test_a_component_without_a_value_is_not_in_the_frame() -> None:
    parts = Parts(verifier=Score({"correct": None, "format": 0.5}, None))
    run(parts)
    assert [row.rewards for meta in parts.frames for row in meta.rows] == [{"format": 0.5}] * 4


def asked_for_300() -> tuple[Parts, list[int]]:
    """Parts with 300 tickets, and how many of them the actor wanted each time that it asked."""
    parts = Parts()
    wanted: list[int] = []
    parts.tickets = [GroupTicket(number, 1, 0) for number in range(300)]
    acquire = parts.acquire

    async def answer(
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket]:
        wanted.append(want)
        return await acquire(actor_id, version, holding, want, report) or []

    parts.acquire = answer
    return parts, wanted


def test_a_resting_actor_hands_in_what_it_holds_and_goes_on_when_told() -> None:
    parts, wanted = asked_for_300()

    async def rested() -> tuple[int, int]:
        actor = actor_of(parts)
        running = asyncio.create_task(actor.run())
        while not actor._groups:
            await asyncio.sleep(0)
        await asyncio.wait_for(actor.rest(), 10)
        assert actor._groups, "nobody has to wait for them"
        while actor._groups:
            await asyncio.sleep(0)
        handed_in, left = len(parts.frames), len(parts.tickets)
        assert not running.done() and handed_in + left == 300 and left, (
            "it holds nothing, and its run goes on"
        )
        del wanted[:]
        await actor._wait_for_change(0.6)  # a heartbeat
        assert set(wanted) <= {0}
        await actor.go_on()
        while len(parts.frames) < 300:
            await asyncio.sleep(0)
        await actor.rest()
        await asyncio.wait_for(actor.drain(), 10)
        return handed_in, len(parts.frames)

    handed_in, all_of_them = asyncio.run(asyncio.wait_for(rested(), 30))
    assert 0 < handed_in < all_of_them == 300


async def test_an_actor_that_drains_hands_in_what_it_holds_and_takes_no_more() -> None:
    parts, wanted = asked_for_300()

    actor = actor_of(parts)
    running = asyncio.create_task(actor.run())
    while not wanted or not actor._groups:
        await asyncio.sleep(0)
    await asyncio.wait_for(actor.drain(), 10)
    await asyncio.wait_for(running, 1)
    given = 300 - len(parts.tickets)
    assert sorted(meta.group_id for meta in parts.frames) == list(range(given)), (
        "what it held is handed in"
    )
    assert 0 < given < 300 and set(wanted[1:]) <= {0}, "and nothing was asked for any more"


async def test_long_responses_hold_their_own_places_only() -> None:
    """Of the engine's 8 places, groups of 2 whose short response has ended take one each; a group
    waits, so that none is ever empty.
    """
    parts, wanted = Parts(), []
    parts.hangs = True
    tickets = iter(GroupTicket(number, 1, 0) for number in range(100))

    async def acquire(
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket]:
        wanted.append(want)
        return [next(tickets) for _ in range(want)]

    actor = actor_of(parts)
    parts.max_num_seqs, parts.acquire, parts.per_group, told = 8, acquire, 2, []
    running = asyncio.create_task(actor.run())
    for parts.per_group in (2, 1, 0):
        asked = -1
        while asked != len(wanted):  # until it asks no more
            asked = len(wanted)
            await asyncio.sleep(0.3)
        told.append((parts.running, parts.unfinished))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (groups, places), (more, ones), (most, none) = told
    assert (groups, places) == (5, 10) and (more, ones) == (9, 9), "one group, of 2 or of 1, waits"
    assert none == 0 and most == 9, (
        "groups without an open response are being verified: there are no more of them than places"
    )


def test_the_more_actors_there_are_the_more_rarely_each_reports() -> None:
    """Together they report at most 250 times a second, and no actor more often than twice."""

    config = load_config("configs/quickstart.yaml")

    def interval(actors: int) -> float:
        place = {"queue": None, "model_dir": "m", "device": "cpu", "cores": ()}
        return GroupProducer(config, actor_id="a", actors=actors, **place)._heartbeat_s

    assert [interval(actors) for actors in (1, 125, 1_000)] == [0.5, 0.5, 4.0]


def test_other_training_data_than_the_runs_are_refused() -> None:
    """On another node, or after a file has changed and the actor has started again."""
    config = load_config("configs/quickstart.yaml")
    order = ProblemOrder.of(config, load_tasks(config))
    other = replace(order, parts=(("", "another", order.problems),))
    place = {"queue": None, "model_dir": "m", "device": "cpu", "cores": ()}
    task, _ = GroupProducer(config, actor_id="a", order=order, **place)._task()
    assert len(task) == order.problems
    with pytest.raises(SetupError, match="training data of arithmetic are not here what they were"):
        GroupProducer(config, actor_id="a", order=other, **place)._task()


def test_what_a_failed_attempt_and_the_engine_sampled_is_told() -> None:
    parts = Parts(engine=EngineError("no token"))
    parts.only_greedy_fails = True
    run(parts, adv_estimator="remax")
    assert parts.wasted == {0: 10, 1: 10}, "what there was of both requests when they were aborted"
    assert parts.reports and {
        (report.tokens.sampled, report.tokens.probes) for report in parts.reports
    } == {(7, 3)}
    late = Parts(verifier=VerifierError("crash", "gone"))
    run(late)
    assert late.wasted == {0: 4, 1: 4}, "two responses of two tokens"


async def test_a_request_that_is_cancelled_is_counted_as_far_as_it_came() -> None:
    """What vLLM's front end keeps of three responses to one prompt: one has ended, one gets another
    token while the abort is under way.
    """
    parent = SimpleNamespace(output_aggregator=[SimpleNamespace(token_ids=[1, 2, 3]), None, None])
    states = {
        name: SimpleNamespace(
            parent_req=parent, detokenizer=SimpleNamespace(output_token_ids=[1] * size)
        )
        for name, size in (("b", 2), ("c", 5))
    }
    processor = SimpleNamespace(request_states=states, external_req_ids={"p0": ["b", "c"]})

    async def generate(
        prompt: object, params: object, name: str, **_: object
    ) -> AsyncIterator[object]:
        try:
            await asyncio.Event().wait()
        finally:
            processor.request_states.pop("b").detokenizer.output_token_ids.append(7)
            processor.external_req_ids.clear()
        yield

    requests = CountedRequests()
    for purpose in ("rollouts", "evaluated"):
        task = asyncio.create_task(
            requests.final(
                SimpleNamespace(generate=generate, output_processor=processor),
                {},
                None,
                "p0",
                purpose,
            )
        )
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        processor.request_states = {}
        states.clear()
        processor.request_states["b"] = SimpleNamespace(
            parent_req=None, detokenizer=SimpleNamespace(output_token_ids=[1])
        )
        processor.external_req_ids["p0"] = ["b"]
    assert requests.sampled == {"rollouts": 3 + 3 + 5, "evaluated": 2}
    assert requests.cut_off == {"p0": 11}


def test_what_vllm_says_to_a_request_is_an_error_of_the_engine() -> None:
    """With which the actor fails a group and goes on, if the engine is healthy."""
    from vllm.exceptions import VLLMError, VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError

    async def ask(error: VLLMError) -> None:
        async def generate(
            prompt: object, params: object, name: str, **_: object
        ) -> AsyncIterator[object]:
            raise error
            yield

        llm = SimpleNamespace(
            generate=generate, output_processor=SimpleNamespace(external_req_ids={})
        )
        engine = VllmEngine(
            llm,  # type: ignore[arg-type]
            stop_token_ids=[1],
            kv_cache="recompute",
            deadlines=Deadlines(),
        )
        await engine.generate([], Sampling(n=1, max_tokens=4, temperature=1.0), name="a")
        assert engine.cut_off("a") == 0

    for error in (VLLMValidationError("The prompt cannot be empty"), EngineDeadError()):
        with pytest.raises(EngineError, match="vLLM does not answer the request: "):
            asyncio.run(ask(error))


# ---- sets of which tokens were sampled ----


class Cutting(Parts):
    """An engine that says of which tokens each was sampled, where it is asked to; of `unknown`, the
    number of a response's token, it does not know it.
    """

    def __init__(self, *, silent: bool = False, unknown: int | None = None) -> None:
        super().__init__()
        self.silent, self.unknown = silent, unknown

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, **options: Any
    ) -> list[Completion]:
        found = await super().generate(prompt_ids, sampling, **options)
        if not sampling.kept or self.silent:
            return found
        sets = [[token, 50 + token] for token in found[0].token_ids.tolist()]
        if self.unknown is not None:
            sets[self.unknown] = []
        return [replace(one, kept=KeptSets.of(sets)) for one in found]


CUT = {"top_p": 0.9, "min_p": 0.05}


def test_groups_have_the_sets_of_their_samples_and_of_nothing_else() -> None:
    parts = Cutting()
    run(parts, adv_estimator="remax", rollout=CUT)
    asked = [one for _, one in parts.asked]
    samples, greedy = ([one for one in asked if one.kept is kept] for kept in (True, False))
    assert {(one.top_p, one.top_k, one.min_p) for one in samples} == {(0.9, 512, 0.05)}
    assert {one.temperature for one in samples} == {1.0}
    assert len(greedy) == 2 and all(one.temperature == 0 for one in greedy)
    for frame in parts.sent:
        kept = KeptSets.in_planes(decode_group(frame).planes)
        assert kept is not None
        assert kept.counts.tolist() == [2, 2, 2, 2, 0, 0, 0]
        assert kept.ids.tolist() == [0, 50, 1, 51] * 2


def test_a_demonstration_behind_the_samples_has_no_sets() -> None:
    parts, limit = Cutting(), 4
    actor = actor_of(parts, algorithm={"sft_loss_coef": 0.1}, rollout=CUT)
    problem = Problem("ask", 1, solution="of some words")
    actor._parts.task.train = lambda index: problem
    asyncio.run(asyncio.wait_for(actor.run(), 10))
    for frame in parts.sent:
        group = decode_group(frame)
        kept, given = KeptSets.in_planes(group.planes), group.rows[-1]
        assert given.role == "demonstration" and kept is not None
        assert kept.counts.tolist() == [2] * limit + [0] * len(given.response_ids)


@pytest.mark.parametrize("fault", [{"silent": True}, {"unknown": 1}])
async def test_a_group_with_a_token_whose_set_is_not_known_is_failed_and_counted(
    fault: dict[str, Any],
) -> None:
    parts = Cutting(**fault)
    actor = actor_of(parts, rollout=CUT)
    await asyncio.wait_for(actor.run(), 10)
    assert set(parts.failed) == {0, 1} and not parts.frames
    assert all("beyond rollout.top_k" in reason for reason in parts.failed.values())
    report = await actor.final_report()
    known = ActorReports()
    known.tell("a", report)
    assert known.metrics()["rollout/kept_overflows"] == 2
    assert known.metrics()["rollout/attempts_failed"] == 2


def test_without_cut_sampling_nobody_asks_for_sets_and_no_group_has_any() -> None:
    parts = Cutting()
    run(parts)
    assert not any(sampling.kept or sampling.top_k for _, sampling in parts.asked)
    assert all(not decode_group(frame).planes for frame in parts.sent)
