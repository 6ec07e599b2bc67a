"""Chat templates that refuse, fail or lie: a client gets a sentence, and its episode goes on."""

from __future__ import annotations

import copy
import json

import pytest

from async_grpo.agents.endpoint.messages import RequestError, parse
from async_grpo.agents.endpoint.served import Reply, ServedEpisode
from async_grpo.rollout.chat_format import Message, TemplateFormat
from tests.support.chat_templates import TEMPLATES, tokenizer_of
from tests.support.served_episodes import Policy, served

pytestmark = pytest.mark.timeout(90)  # they wait for each other

LOOP = "{% for m in messages %}"
CHATML = TEMPLATES["chatml"].text
FAILS = {
    "refuses": "{{ raise_exception('no tools here') }}",
    "asks for what is not there": "{{ m.nothing.more }}",
    "asks for another type": "{{ m.content + 1 }}",
    "looks behind the scenes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "calls itself": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "divides by nothing": "{{ 1 // 0 }}",
}


def episode_of(template: str, policy: Policy) -> ServedEpisode:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = template
    limits = {"prompt_length": 200, "response_length": 500, "context_length": 900}
    return served(policy, chat=TemplateFormat(tokenizer), **limits)


async def say(episode: ServedEpisode, *messages: Message) -> Reply:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    reply = await episode.answer(parse(body, sampling="ignore"))
    reply.turn.read = True
    return reply


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("how", FAILS)
async def test_a_template_that_fails_refuses_the_request_alone(how: str) -> None:
    """At a message of a tool: in a new conversation, and behind a turn, where it goes on."""
    only = f"{LOOP}{{% if m.role == 'tool' %}}{FAILS[how]}{{% endif %}}{{% endfor %}}"

    policy = Policy("one", "two")
    episode = episode_of(only + CHATML, policy)
    tool = {"role": "tool", "content": "7"}
    first = await say(episode, user("a?"))
    for messages in ([user("b?"), tool], [user("a?"), first.message, tool]):
        with pytest.raises(RequestError, match="the chat template refuses") as refused:
            await say(episode, *messages)
        assert refused.value.status == 400
    assert episode.failure is None and len(policy.asked) == 1
    await say(episode, user("a?"), first.message, user("b?"))
    [row] = episode.episode.session.rows
    assert [count for _, count in row.segments] == [4, 4]


async def test_a_template_that_says_nothing_refuses_the_request() -> None:
    policy = Policy()
    episode = episode_of("", policy)
    with pytest.raises(RequestError, match="without a token"):
        await say(episode, user("a?"))
    assert not policy.asked and episode.failure is None


async def test_a_template_that_says_something_else_every_time_begins_a_row() -> None:
    """Nothing of what was sampled is told to be what it was not."""
    policy = Policy("one", "two")
    episode = episode_of("{{ strftime_now('%f') }}" + CHATML, policy)
    first = await say(episode, user("a?"))
    second = await say(episode, user("a?"), first.message, user("b?"))
    assert second.turn.forked == "template"
    rows = episode.episode.session.rows
    assert [row.segments for row in rows] == [[(0, 4)], [(0, 4)]]
