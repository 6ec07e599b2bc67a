"""Which request goes on from which turn: rows, forks, limits, and clients that come again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.agents.endpoint.messages import ChatRequest, RequestError, parse
from async_grpo.agents.endpoint.served import OWED_S, Reply, ServedEpisode
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.rollout.chat_format import Message, PlainFormat, Said
from async_grpo.rollout.engine.base import EngineError
from async_grpo.rollout.episodes import as_rows
from tests.support.scripted_policy import Letters
from tests.support.served_episodes import Policy, served

pytestmark = pytest.mark.timeout(90)  # they wait for each other


def request(messages: list[Message], *, retried: bool = False, **more: Any) -> ChatRequest:
    body = json.dumps({"model": "m", "messages": messages} | more).encode()
    return parse(body, sampling="ignore", retried=retried)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def say(episode: ServedEpisode, messages: list[Message], **more: Any) -> Reply:
    wanted = request(messages, **more)
    reply = await episode.answer(wanted)
    reply.turn.read = True
    return reply


async def test_an_equal_beginning_goes_on_in_its_row() -> None:
    policy = Policy("one", "two")
    episode = served(policy)
    first = await say(episode, [user("a?")])
    again = [user("a?"), first.message | {"refusal": None, "audio": None}, user("b?")]
    await say(episode, again)
    [row] = episode.episode.session.rows
    assert policy.asked == ["a?", "a?one\x01b?"]
    assert row.segments == [(0, 4), (2, 4)]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]
    third = [{"role": "user", "content": parts}, *again[1:], {"role": "assistant"}]
    third[-1] |= {"content": "two", "tool_calls": None}
    await say(episode, [*third, user("c?")])
    assert len(episode.episode.session.rows) == 1, "parts of text are the text"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda known: [user("A?"), *known[1:]], "edited"),
        (lambda known: [known[0], known[1] | {"content": "0ne"}, *known[2:]], "edited"),
        (lambda known: [known[0], user("and")], "edited"),
        (lambda known: [user("a?")], "branch"),
        (lambda known: known, "branch"),
        (lambda known: [*known[:2], user("c?")], "branch"),
        (lambda known: [*known, {"role": "assistant", "content": "tw0"}, user("c?")], "edited"),
        (lambda known: [known[0], known[2]], "shortened"),
        (
            lambda known: [known[2], {"role": "assistant", "content": "two"}, user("c?")],
            "shortened",
        ),
        (lambda known: [{"role": "system", "content": "be good"}, *known], "edited"),
        (lambda known: [user("what else?")], ""),
    ],
)
async def test_a_client_that_changes_history_forks_and_it_is_said(change: Any, why: str) -> None:
    episode = served(Policy("one", "two", "three"))
    first = await say(episode, [user("a?")])
    known = [user("a?"), first.message, user("b?")]
    await say(episode, known)
    reply = await say(episode, change(known))
    assert reply.turn.forked == why
    rows = episode.episode.session.rows
    assert len(rows) == 2 and rows[1].segments == [(0, 6)]


async def test_reasoning_and_calls_count_as_they_were_said() -> None:
    episode = served(Policy("<plan>one", "!look", "<x>y", "<x>y", "<x>y"), reasons=True)
    first = await say(episode, [user("a?")])
    assert first.message["reasoning_content"] == "plan"
    dropped = {"role": "assistant", "content": "one"}
    second = await say(episode, [user("a?"), first.message, user("b?")])
    assert second.turn.forked == ""
    assert (await say(episode, [user("a?"), dropped, user("c?")])).turn.forked == "reasoning"
    calls = second.message
    tool = {"role": "tool", "content": "7", "tool_call_id": calls["tool_calls"][0]["id"]}
    known = [user("a?"), first.message, user("b?"), calls, tool]
    other = json.loads(json.dumps(calls))
    other["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": 1}'
    reordered = await say(episode, [*known[:3], other, tool])
    assert reordered.turn.forked == "calls"
    assert reordered.turn.parent == first.turn.number, "it goes on from the turn before"
    assert (await say(episode, known)).turn.forked == ""


async def test_labels_are_agents_with_rows_of_their_own() -> None:
    """Two models of one episode: what the one was given is no beginning for the other."""
    policy = Policy("one", "two", "three", "four", "five")
    episode = served(policy)
    solver = await say(episode, [user("a?")], model="solver")
    judge = await say(episode, [user("a?")], model="judge")
    assert (judge.turn.forked, judge.turn.parent) == ("", None), "it is no draft of the solver"
    for name, reply in (("solver", solver), ("judge", judge)):
        more = await say(episode, [user("a?"), reply.message, user("b?")], model=name)
        assert (more.turn.label, more.turn.forked) == (name, "")
        assert more.turn.parent == reply.turn.number
    handed = [user("a?"), solver.message, user("right?")]
    assert (await say(episode, handed, model="judge")).turn.forked == "label"
    rows = episode.episode.session.rows
    assert [row.segments for row in rows] == [[(0, 4), (2, 6)], [(0, 4), (2, 5)], [(0, 5)]]
    assert bytes(rows[2].prompt) == b"a?oneright?", "rendered anew"
    assert episode._counts["forks"] == episode._counts["forks_label"] == 1
    _, made = as_rows([episode.episode], trained=1, weights={"correct": 1.0})
    assert [one.episode for one in made] == [0, 0, 0]


async def test_other_tools_begin_a_row() -> None:
    episode = served(Policy("one", "two", "three"))
    tool = {"type": "function", "function": {"name": "look"}}
    first = await say(episode, [user("a?")])
    known = [user("a?"), first.message, user("b?")]
    assert (await say(episode, known, tools=[tool])).turn.forked == "tools"
    assert (await say(episode, [user("else?")], tools=[tool])).turn.forked == ""


async def test_branches_begin_with_the_tokens_of_their_beginning() -> None:
    """A sampled token is trained in one row; what begins with it has it in its prompt."""
    policy = Policy("one", "two", "three", "four")
    episode = served(policy)
    first = await say(episode, [user("a?")])
    known = [user("a?"), first.message]
    await say(episode, [*known, user("b?")])
    assert (await say(episode, [*known, user("c?")])).turn.forked == "branch"
    rows = episode.episode.session.rows
    assert bytes(rows[1].prompt) == b"a?one\x01c?" and rows[1].segments == [(0, 6)]
    episode.episode.finish_reason = "env_done"
    prompts, made = as_rows([episode.episode], trained=1, weights={"correct": 1.0})
    assert [one.episode for one in made] == [0, 0] and len(prompts) == 2
    assert sum(count for one in made for _, count in one.segments) == 14


async def test_a_request_that_is_repeated_is_one_turn() -> None:
    policy = Policy("one", "two", "three")
    episode = served(policy)
    policy.hold.clear()
    asked = request([user("a?")])
    first = asyncio.ensure_future(episode.answer(asked))
    await asyncio.sleep(0.01)
    again = asyncio.ensure_future(episode.answer(request([user("a?")], retried=True)))
    await asyncio.sleep(0.01)
    policy.hold.set()
    assert (await first).message == (await again).message
    assert (await episode.answer(request([user("a?")], retried=True))) is await first
    assert len(policy.asked) == 1
    (await first).turn.read = True
    other = await say(episode, [user("a?")])
    assert len(policy.asked) == 2, "two drafts of one beginning are two turns"
    assert other.turn.forked


async def test_retries_of_equal_drafts_take_one_turn_each() -> None:
    """Whether the endpoint has noticed that their clients went away, or not."""
    for noticed in (True, False):
        policy = Policy("one", "two", "three")
        episode = served(policy)
        policy.hold.clear()
        first = [asyncio.ensure_future(say(episode, [user("a?")])) for _ in range(2)]
        await asyncio.sleep(0.01)
        for draft in first if noticed else ():
            draft.cancel()
        await asyncio.sleep(0.01)
        again = [
            asyncio.ensure_future(episode.answer(request([user("a?")], retried=True)))
            for _ in range(3)
        ]
        await asyncio.sleep(0.01)
        policy.hold.set()
        replies = [(await one).message["content"] for one in again]
        assert replies[:2] == ["one", "two"] and len(policy.asked) == 2, noticed
        await asyncio.gather(*first, return_exceptions=True)


async def test_a_retry_of_a_refused_request_is_a_turn_of_its_own() -> None:
    policy = Policy("one", "two", "three")
    episode = served(policy)
    await say(episode, [user("a?")])
    episode.note_refused(request([user("a?")]).digest, retried=False)
    other = await say(episode, [user("a?")], retried=True)
    assert other.message["content"] == "two"
    again = await episode.answer(request([user("a?")], retried=True))
    assert again is other, "the reply of the newest one was lost on its way"
    assert len(policy.asked) == 2


async def test_a_retry_of_another_body_than_was_refused_is_one_turn() -> None:
    policy = Policy("one", "two")
    episode = served(policy)
    first = await say(episode, [user("a?")])
    episode.note_refused(request([user("b?")]).digest, retried=False)
    assert await say(episode, [user("a?")], retried=True) is first
    await episode.close()
    assert len(policy.asked) == len(episode.episode.session.rows) == 1


def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop the clock of episodes; what is returned moves it by seconds."""
    now = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("async_grpo.agents.endpoint.served.time", clock)

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


async def test_clients_that_have_given_up_are_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither those that were refused, nor those whose answer another one has taken."""
    wait = waiting(monkeypatch)
    policy = Policy("one", "two")
    episode = served(policy)
    policy.hold.clear()
    left = asyncio.ensure_future(say(episode, [user("a?")]))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.sleep(0.01)
    policy.hold.set()
    first = await say(episode, [user("a?")])
    episode.note_refused(request([user("a?")]).digest, retried=False)
    wait(1.5 * OWED_S)
    for retried in (True, True, True):
        assert await say(episode, [user("a?")], retried=retried) is first
    assert len(policy.asked) == 1


async def test_a_client_that_is_refused_again_is_waited_for_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One turn is owed to it, however often it was refused."""
    wait = waiting(monkeypatch)
    policy = Policy("one", "two", "three")
    episode = served(policy)
    await say(episode, [user("a?")])
    digest = request([user("a?")]).digest
    for retried in (False, True, True):
        episode.note_refused(digest, retried=retried)
        wait(0.6 * OWED_S)
    second = await say(episode, [user("a?")], retried=True)
    assert second.message["content"] == "two"
    episode.note_refused(digest, retried=True)
    assert await say(episode, [user("a?")], retried=True) is second, "its answer was lost"


async def test_a_draft_that_takes_a_turn_over_leaves_one_to_its_client() -> None:
    """It came while the client of another one, which went away, had not come again yet."""
    policy = Policy("one", "two", "three")
    episode = served(policy)
    policy.hold.clear()
    left = asyncio.ensure_future(say(episode, [user("a?")]))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.sleep(0.01)
    draft = asyncio.ensure_future(say(episode, [user("a?")]))
    await asyncio.sleep(0.01)
    again = asyncio.ensure_future(say(episode, [user("a?")], retried=True))
    await asyncio.sleep(0.01)
    policy.hold.set()
    assert (await draft).message["content"] == "one"
    assert (await again).message["content"] == "two"


async def test_a_client_that_went_away_gets_its_turn_when_it_comes_again() -> None:
    policy = Policy("one", "two")
    episode = served(policy)
    policy.hold.clear()
    left = asyncio.ensure_future(episode.answer(request([user("a?")])))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.sleep(0.01)
    policy.hold.set()
    assert (await say(episode, [user("a?")])).message["content"] == "one"
    assert len(policy.asked) == 1
    unread = asyncio.ensure_future(episode.answer(request([user("b?")])))
    await asyncio.sleep(0.01)
    unread.cancel()
    await asyncio.sleep(0.01)
    await episode.close()
    [row] = episode.episode.session.rows
    assert row.segments == [(0, 4)], "a turn that nobody has read is in no row"


async def test_of_two_equal_drafts_the_one_that_nobody_read_is_not_trained() -> None:
    policy = Policy("one", "one")
    episode = served(policy)
    # it is answered, and its client does not say that it has the answer
    await asyncio.wait_for(episode.answer(request([user("a?")], user="first")), 10)
    await say(episode, [user("a?")], user="second")
    await episode.close()
    assert [row.segments for row in episode.episode.session.rows] == [[(0, 4)]]


async def test_equal_drafts_at_once_are_all_trained_once_they_are_read() -> None:
    policy = Policy("one", "two", "three", "four")
    episode = served(policy)
    policy.hold.clear()
    drafts = [asyncio.ensure_future(say(episode, [user("a?")])) for _ in range(4)]
    await asyncio.sleep(0.01)
    policy.hold.set()
    replies = await asyncio.gather(*drafts)
    assert [one.turn.forked for one in replies] == ["", "branch", "branch", "branch"]
    await episode.close()
    assert len(episode.episode.session.rows) == 4 and episode.failure is None


async def test_an_episode_that_is_closed_stays_as_it_is() -> None:
    """Also where equal requests are under way, and for one that comes afterwards."""
    policy = Policy("one", "two", "three")
    episode = served(policy)
    await say(episode, [user("a?")])
    policy.hold.clear()
    late = [asyncio.ensure_future(say(episode, [user("b?")])) for _ in range(2)]
    await asyncio.sleep(0.01)
    await episode.close()
    policy.hold.set()
    await asyncio.gather(*late, return_exceptions=True)
    with pytest.raises(RequestError, match="has ended"):
        await say(episode, [user("c?")])
    assert [row.segments for row in episode.episode.session.rows] == [[(0, 4)]]


@pytest.mark.parametrize(
    ("raised", "kept", "says"),
    [
        (EngineError("it is gone"), EngineError, "it is gone"),
        (KeyError("odd"), EnvironmentFailed, r"answer: .* KeyError: 'odd'"),
    ],
)
async def test_what_no_client_can_have_caused_is_kept(
    raised: Exception, kept: type[Exception], says: str
) -> None:
    class Broken(Policy):
        async def sample(self, tokens: list[int], sampling: Any) -> Any:
            raise raised

    episode = served(Broken())
    for _ in range(2):
        with pytest.raises(kept, match=says):
            await say(episode, [user("a?")])
    assert isinstance(episode.failure, kept) and not episode._asked


async def test_messages_without_a_token_are_refused_and_the_episode_goes_on() -> None:
    policy = Policy("one", "two")
    episode = served(policy)
    for messages in ([user("")], [{"role": "system", "content": ""}, user("")]):
        with pytest.raises(RequestError, match="without a token") as refused:
            await say(episode, messages)
        assert refused.value.status == 400
    assert not policy.asked and episode.failure is None and not episode.used_up
    first = await say(episode, [user("a?")])
    await say(episode, [user("a?"), first.message, user("")])
    assert [row.segments for row in episode.episode.session.rows] == [[(0, 4), (0, 4)]]


class Unspeakable(PlainFormat):
    """Reads a call whose name no message may have."""

    def read(self, prompt: Sequence[int], ids: Sequence[int], text: str) -> Said:
        return Said("", [{"name": "\ud800", "arguments": {}}])


async def test_a_client_gets_every_turn_that_is_trained() -> None:
    """Also one that is read as something that no message can say: then it gets the text."""
    episode = served(Policy("one", "two"), chat=Unspeakable(Letters()))
    first = await say(episode, [user("a?")])
    assert first.message == {"role": "assistant", "content": "one"}
    second = await say(episode, [user("a?"), first.message, user("b?")])
    assert second.message["content"] == "two"
    assert [row.segments for row in episode.episode.session.rows] == [[(0, 4), (2, 4)]]


async def test_requests_at_once_do_not_use_more_than_there_is() -> None:
    policy = Policy(*["x" * 100] * 9)
    episode = served(policy, response_length=50, turn_length=20)
    policy.hold.clear()
    asked = [asyncio.ensure_future(say(episode, [user(f"{number}?")])) for number in range(4)]
    await asyncio.sleep(0.02)
    assert policy.caps == [20, 20, 10], "the fourth one waits"
    policy.hold.set()
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(done[3], RequestError) and episode.used_up == "length"
    assert episode.episode.session.sampled == 50


def limits_of(episode: ServedEpisode) -> tuple[str, str]:
    return episode.used_up, episode.last_word


async def test_a_turn_behind_a_refused_request_is_the_last_word() -> None:
    """A program that shortens its history and goes on is not cut off; of two agents, the one that
    was refused may be why it fails.
    """
    episode = served(Policy(), context_length=12)
    first = await say(episode, [user("a?")])
    long = [user("a?"), first.message, user("b" * 20)]
    with pytest.raises(RequestError, match=r"the longest sequence, .*; messages take 25"):
        await say(episode, long)
    assert limits_of(episode) == ("context", "context")
    await say(episode, [user("a?"), user("in short")], model="other")
    assert limits_of(episode) == ("context", "")
    await say(episode, [user("a?"), user("in short")])
    assert limits_of(episode) == ("", "")


async def test_answers_to_earlier_requests_do_not_follow_a_refusal() -> None:
    policy = Policy()
    episode = served(policy, max_turns=2, turn_length=20)
    policy.hold.clear()
    drafts = [asyncio.ensure_future(say(episode, [user("a?")])) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match="max_turns: 2"):
        await say(episode, [user("b?")])
    policy.hold.set()
    await asyncio.gather(*drafts)
    assert limits_of(episode) == ("max_turns", "max_turns")


async def test_the_most_tokens_of_a_client_are_kept() -> None:
    policy = Policy("abcdefgh")
    reply = await say(served(policy), [user("a?")], max_tokens=3)
    assert reply.done.finish_reason == "length" and len(reply.done.token_ids) == 3


@pytest.mark.parametrize("seed", range(40))
async def test_random_conversations_are_append_only(seed: int) -> None:
    """Whatever clients do: rows only grow, every answered turn is in one row once, and what the
    policy was asked is the row before its turn.
    """
    chance = random.Random(seed)
    policy = Policy()
    episode = served(policy, response_length=10_000, context_length=10_000, max_turns=99)
    histories: list[list[Message]] = [[]]
    total, rows_before = 0, list[list[int]]()
    for number in range(30):
        history = chance.choice(histories)
        kind = chance.random()
        if kind < 0.15 and history:
            history = history[: chance.randrange(0, len(history), 2)]
        elif kind < 0.25 and history:
            at = chance.randrange(len(history))
            history = [*history[:at], history[at] | {"content": f"e{number}"}]
            history = history if len(history) % 2 == 0 else history[:-1]
        new = [*history, user(f"q{chance.randrange(6)}")]
        reply = await say(episode, new)
        total += len(reply.done.token_ids)
        histories.append([*new, reply.message])
        rows = episode.episode.session.rows
        for before, row in zip(rows_before, rows, strict=False):
            assert row.tokens[: len(before)] == before
        rows_before = [row.tokens for row in rows]
        assert policy.asked[-1] == bytes(reply.prompt).decode()
    assert sum(count for row in rows for _, count in row.segments) == total
