"""What the front end is told of, and when, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from async_grpo.rollout.engine.vllm.scheduler import HELD, HeldOutputs, _joined


def output(name: str, token: int, **more: Any) -> EngineCoreOutput:
    """A token, whose log-prob is a hundredth of it."""
    ids, values = np.array([[token]], np.int32), np.array([[token / 100]], np.float32)
    logprobs = LogprobsLists(ids, values, np.array([token]), None)
    return EngineCoreOutput(name, [token], logprobs, **more)


class Steps:
    """The scheduler over a stub of vLLM's: `step` is what it makes of a step's outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool = False) -> None:
        self._made: dict[int, EngineCoreOutputs] = {}
        for base in (Scheduler, AsyncScheduler):
            monkeypatch.setattr(base, "__init__", lambda scheduler, **_: None)
        monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: self._made)
        monkeypatch.setattr(Scheduler, "has_requests", lambda _: False)
        monkeypatch.setattr(
            Scheduler,
            "finish_requests",
            lambda _, names, status: [SimpleNamespace(request_id=name) for name in names],
        )
        settings = SimpleNamespace(async_scheduling=overlaps)
        self.scheduler = HeldOutputs(vllm_config=SimpleNamespace(scheduler_config=settings))
        self.scheduler._pause_state = PauseState.UNPAUSED
        self.scheduler.requests = {
            name: SimpleNamespace(max_tokens=tokens)
            for name, tokens in {"a": 100, "b": 100, "short": HELD}.items()
        }
        self.told: dict[str, list[int]] = {}
        self.outputs = 0

    def step(self, *outputs: EngineCoreOutput) -> int:
        """Make a step; return how many tokens it says that it has sampled."""
        self._made = (
            {0: EngineCoreOutputs(outputs=list(outputs), scheduler_stats=SchedulerStats())}
            if outputs
            else {}
        )
        told = self.scheduler.update_from_output(None, None)[0]
        for one in told.outputs:
            self.outputs += 1
            ids, values, ranks, _ = one.new_logprobs
            assert ids[:, 0].tolist() == one.new_token_ids == ranks.tolist()
            np.testing.assert_array_equal(values[:, 0], np.float32(ids[:, 0] / 100))
            self.told.setdefault(one.request_id, []).extend(one.new_token_ids)
        stats = told.scheduler_stats
        return stats.iteration_details.num_generation_tokens if stats else 0


def test_a_response_is_told_of_once_in_so_many_steps_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, length = Steps(monkeypatch), 3 * HELD + 5
    for token in range(length):
        end = {"finish_reason": FinishReason.LENGTH} if token == length - 1 else {}
        begun = {"prefill_stats": PrefillStats()} if token == 0 else {}
        assert steps.step(output("a", token, **end, **begun), output("b", token + 50)) == 2
        if token in (0, HELD - 1, HELD):
            assert len(steps.told["a"]) == (HELD + 1 if token == HELD else 1)
    assert steps.told["a"] == list(range(length)), "an ending takes what is held along"
    assert steps.told["b"] == list(range(50, 50 + 3 * HELD + 1))
    assert steps.outputs == 5 + 4


def test_a_short_response_goes_as_a_whole_with_what_its_beginning_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, told = Steps(monkeypatch), []
    own = steps.scheduler._pass
    monkeypatch.setattr(steps.scheduler, "_pass", lambda new: told.append(own(new)) or told[-1])
    begun = {"prefill_stats": PrefillStats(), "events": ["scheduled"]}
    assert steps.step(output("short", 0, **begun)) == 1, "it is counted when it is sampled"
    steps.step(output("short", 1))
    assert not steps.told
    steps.step(output("short", 2, events=["preempted"]))
    assert steps.told["short"] == [0, 1, 2]
    steps.step(output("short", 3))
    steps.step(output("short", 4, finish_reason=FinishReason.STOP))
    assert steps.told["short"] == [0, 1, 2, 3, 4]
    joined, last = [one for one in told if one is not None]
    assert joined.prefill_stats is begun["prefill_stats"]
    assert joined.events == ["scheduled", "preempted"]
    assert last.events is last.prefill_stats is None
    steps.step(output("short", 5, **begun, finish_reason=FinishReason.STOP))
    assert steps.outputs == 3


def test_what_carries_more_than_tokens_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for token in range(4):
        steps.step(output("a", token))
    steps.step(output("a", 4, routed_experts=np.zeros((1, 1, 1))))
    assert steps.told["a"] == [0, 1, 2, 3, 4]
    steps.step(output("a", 5))
    assert len(steps.told["a"]) == 5


def test_a_pause_lets_go_of_everything_before_labels_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    for token in range(5):
        steps.step(output("a", token), output("b", token + 50))
    assert not steps.scheduler.has_requests(), "while it runs, its responses keep it going"
    steps.scheduler._pause_state = PauseState.PAUSED_ALL
    assert steps.scheduler.has_requests(), "it makes one more step, without responses"
    steps.step()
    assert steps.told == {"a": [0, 1, 2, 3, 4], "b": [50, 51, 52, 53, 54]}
    assert not steps.scheduler.has_requests()
    steps.scheduler._pause_state = PauseState.UNPAUSED
    steps.step(output("a", 5), output("b", 55))
    assert steps.told["a"][-1] == 5 and steps.told["b"][-1] == 55, "the first one after it"
    steps.step(output("a", 6))
    assert steps.told["a"][-1] == 5


def test_nothing_is_kept_of_a_request_that_was_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for token in range(5):
        steps.step(output("a", token))
    steps.scheduler.finish_requests(["a", "unknown"], None)
    assert not steps.scheduler._held
    steps.scheduler._pause_state = PauseState.PAUSED_ALL
    assert not steps.scheduler.has_requests()
    steps.step()
    assert steps.told == {"a": [0]}


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_overlap_where_vllm_chose_that(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """A class of one's own would switch it off, and a GPU would wait between steps."""
    scheduler = Steps(monkeypatch, overlaps=overlaps).scheduler
    assert isinstance(scheduler, AsyncScheduler) == overlaps


# ---- sets of which tokens were sampled ----


def sampled(
    name: str, token: int, among: dict[int, float], *, width: int = 4, **more: Any
) -> EngineCoreOutput:
    """A token with the most probable ones in its place, as vLLM gives them: by falling log-prob,
    those that were cut with minus infinity.
    """
    best = sorted(among.items(), key=lambda one: -one[1])[:width]
    best += [(90 + at, -np.inf) for at in range(width - len(best))]
    with np.errstate(divide="ignore"):
        ids = np.array([[token, *[one for one, _ in best]]], np.int32)
        values = np.array([[np.log(among.get(token, 0.0)), *[0.0] * width]], np.float32)
        values[0, 1:] = [np.log(p) if p > 0 else -np.inf for _, p in best]
    return EngineCoreOutput(name, [token], LogprobsLists(ids, values, np.array([1]), None), **more)


def test_the_set_of_each_token_goes_and_no_other_log_prob() -> None:
    last = _joined(
        [
            sampled("short", 7, {7: 0.5, 3: 0.5}),
            sampled("short", 4, {4: 1.0}),
            sampled("short", 2, {9: 0.7, 2: 0.2, 1: 0.1}),
        ]
    )
    assert last.new_token_ids == [7, 4, 2]
    assert [sorted(one) for one in last.new_sampling_mask.to_nested_list()] == [
        [3, 7],
        [4],
        [1, 2, 9],
    ]
    ids, values, _, _ = last.new_logprobs
    assert ids.tolist() == [[7], [4], [2]]
    np.testing.assert_allclose(values[:, 0], np.log([0.5, 1.0, 0.2]), rtol=1e-6)


@pytest.mark.parametrize(
    "lost",
    [
        # equally probable ones beyond those that were asked for
        sampled("short", 1, dict.fromkeys(range(1, 6), 0.2)),
        # the sampled one is among them
        sampled("short", 5, {1: 0.4, 2: 0.2, 3: 0.2, 4: 0.1999, 5: 0.0001}),
        sampled("short", 8, {1: 0.5, 2: 0.5}),
    ],
)
def test_a_set_that_is_not_whole_is_empty(lost: EngineCoreOutput) -> None:
    whole = sampled("short", 7, {7: 0.5, 3: 0.5})
    last = _joined([whole, lost])
    assert [sorted(one) for one in last.new_sampling_mask.to_nested_list()] == [[3, 7], []]


def test_rounding_and_what_is_as_improbable_as_that_may_be_missing() -> None:
    last = _joined([sampled("short", 1, {1: 0.6, 2: 0.2, 3: 0.1995, 4: 0.0001})])
    assert [len(one) for one in last.new_sampling_mask.to_nested_list()] == [4]


def test_others_in_the_batch_do_not_change_what_a_response_is_told() -> None:
    """vLLM gives each response of a step as many columns as the one that asks for most."""
    plain = output("short", 5)
    last = _joined([plain, sampled("short", 7, {7: 0.5, 3: 0.5})])
    assert last.new_sampling_mask is None and last.new_logprobs[0].tolist() == [[5], [7]]
    wider = sampled("short", 7, {7: 0.5, 3: 0.5}, width=9)
    last = _joined([wider, sampled("short", 3, {7: 0.5, 3: 0.5})])
    assert [sorted(one) for one in last.new_sampling_mask.to_nested_list()] == [[3, 7], [3, 7]]


def test_sets_survive_the_way_to_the_front_end() -> None:
    """vLLM's own encoding of what its processes tell each other, of no token too."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    for among in ({7: 0.5, 3: 0.5}, dict.fromkeys(range(7, 12), 0.2)):
        last = _joined([sampled("short", 7, among)])
        sent = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[last]))
        [back] = MsgpackDecoder(EngineCoreOutputs).decode(sent).outputs
        wanted = last.new_sampling_mask.to_nested_list()
        assert back.new_sampling_mask.to_nested_list() == wanted
