"""Clients of other interfaces than chat completions, unmodified, on a policy that says what it is
told to: the same turns, the same rows.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic, AuthenticationError, BadRequestError
from openai import AsyncOpenAI
from openai import BadRequestError as OpenAIBadRequestError

from async_grpo.agents.endpoint.messages_api import _blocks
from async_grpo.agents.endpoint.served import ServedEpisode
from async_grpo.agents.endpoint.server import Endpoint, _json
from async_grpo.config.endpoint import EndpointConfig
from tests.support.scripted_policy import Letters
from tests.support.served_episodes import Policy, served

pytestmark = pytest.mark.timeout(90)  # they wait for each other

LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}


class Asking:
    """Clients of an episode, each as its program would make it."""

    def __init__(self, episode: ServedEpisode, endpoint: Endpoint, key: str) -> None:
        self.episode, self.url, self.key = episode, endpoint.url, key
        self.anthropic = AsyncAnthropic(
            base_url=endpoint.url.removesuffix("/v1"), api_key=key, max_retries=0
        )
        self.openai = AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0)

    @property
    def segments(self) -> list[list[tuple[int, int]]]:
        return [row.segments for row in self.episode.episode.session.rows]

    async def message(self, messages: list[Any], **more: Any) -> Any:
        known = {"model": "m", "max_tokens": 50}
        return await self.anthropic.messages.create(messages=messages, **(known | more))


@asynccontextmanager
async def asking(
    *turns: str, reasons: bool = False, sampling: str = "ignore", **limits: int
) -> AsyncIterator[Asking]:
    settings = EndpointConfig(sampling=sampling)  # type: ignore[arg-type]
    endpoint = Endpoint(settings, words=Letters().decode, counts=Counter())
    await endpoint.start()
    episode = served(Policy(*turns), reasons=reasons, **limits)
    try:
        async with endpoint.serving(episode) as key:
            yield Asking(episode, endpoint, key)
    finally:
        await endpoint.close()


async def test_messages_go_on_in_one_row() -> None:
    async with asking("one", "two", "three") as ask:
        messages: list[Any] = [{"role": "user", "content": "a?"}]
        for number, said in enumerate(("one", "two", "three")):
            reply = await ask.message(messages, system="be good", extra_body={"temperature": 0.3})
            assert [block.text for block in reply.content] == [said]
            assert (reply.stop_reason, reply.usage.output_tokens) == ("end_turn", len(said) + 1)
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": [{"type": "text", "text": f"b{number}"}]},
            ]
        assert ask.segments == [[(0, 4), (2, 4), (2, 6)]]
        assert bytes(ask.episode.episode.session.row(0).prompt) == b"be gooda?"


async def test_thoughts_and_tools_of_messages_come_back_as_they_were() -> None:
    async with asking("<why>said"[:8], "!look", "end", reasons=True) as ask:
        messages: list[Any] = [{"role": "user", "content": "a?"}]
        thought = await ask.message(messages, tools=[LOOK])
        assert [block.type for block in thought.content] == ["thinking", "text"]
        messages += [{"role": "assistant", "content": thought.content}]
        messages += [{"role": "user", "content": "b?"}]
        called = await ask.message(messages, tools=[LOOK])
        [block] = called.content
        assert (block.type, block.name, block.input) == ("tool_use", "look", {"b": 1, "a": 2})
        assert called.stop_reason == "tool_use"
        seen = {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
        messages += [{"role": "assistant", "content": called.content}]
        messages += [{"role": "user", "content": [seen]}]
        assert (await ask.message(messages, tools=[LOOK])).content[0].text == "end"
        assert ask.segments == [[(0, 9), (2, 6), (1, 4)]]


async def test_messages_are_streamed() -> None:
    async with asking("one", "!look", reasons=True) as ask:
        asked: list[Any] = [{"role": "user", "content": "a?"}]
        async with ask.anthropic.messages.stream(
            model="m", max_tokens=9, messages=asked, tools=[LOOK]
        ) as stream:
            words = [text async for text in stream.text_stream]
            whole = await stream.get_final_message()
        assert words == ["one"] and whole.content[0].text == "one"
        assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 4)
        async with ask.anthropic.messages.stream(
            model="m",
            max_tokens=9,
            messages=[*asked, {"role": "assistant", "content": whole.content}, *asked],
            tools=[LOOK],
        ) as stream:
            called = await stream.get_final_message()
        assert called.content[0].input == {"b": 1, "a": 2} and called.stop_reason == "tool_use"
        assert ask.segments == [[(0, 4), (2, 6)]]


async def test_messages_that_cannot_be_answered_are_errors_of_the_client() -> None:
    async with asking("one", sampling="refuse", max_turns=1) as ask:
        asked: list[Any] = [{"role": "user", "content": "a?"}]
        with pytest.raises(BadRequestError, match="stop"):
            await ask.message(asked, stop_sequences=["x"])
        with pytest.raises(BadRequestError, match="image"):
            await ask.message([{"role": "user", "content": [{"type": "image", "source": {}}]}])
        with pytest.raises(BadRequestError, match="tool_choice"):
            await ask.message(asked, tools=[LOOK], tool_choice={"type": "any"})
        with pytest.raises(BadRequestError, match="temperature"):
            await ask.message(asked, extra_body={"temperature": 0.5})
        await ask.message(asked)
        with pytest.raises(BadRequestError, match="used up"):
            await ask.message([*asked, {"role": "assistant", "content": "one"}, *asked])
        other = AsyncAnthropic(base_url=ask.url.removesuffix("/v1"), api_key="no", max_retries=0)
        with pytest.raises(AuthenticationError, match="belongs to no episode"):
            await other.messages.create(model="m", max_tokens=9, messages=asked)


@pytest.mark.parametrize("by_id", [True, False])
async def test_responses_go_on_in_one_row(by_id: bool) -> None:
    async with asking("one", "two", "three") as ask:
        items: list[Any] = [{"role": "user", "content": "a?"}]
        previous = None
        for number, said in enumerate(("one", "two", "three")):
            reply = await ask.openai.responses.create(
                model="m", instructions="be good", input=items, previous_response_id=previous
            )
            assert (reply.output_text, reply.status) == (said, "completed")
            assert reply.usage is not None and reply.usage.output_tokens == len(said) + 1
            new = {"role": "user", "content": [{"type": "input_text", "text": f"b{number}"}]}
            previous = reply.id if by_id else None
            items = [new] if by_id else [*items, *reply.output, new]
        assert ask.segments == [[(0, 4), (2, 4), (2, 6)]]


async def test_thoughts_and_calls_of_responses_come_back_as_they_were() -> None:
    async with asking("<why>said"[:8], "!look", "end", reasons=True) as ask:
        items: list[Any] = [{"role": "user", "content": "a?"}]
        thought = await ask.openai.responses.create(model="m", input=items, tools=[FUNCTION])
        assert [item.type for item in thought.output] == ["reasoning", "message"]
        items += [*thought.output, {"role": "user", "content": "b?"}]
        called = await ask.openai.responses.create(model="m", input=items, tools=[FUNCTION])
        [made] = called.output
        assert (made.type, made.name) == ("function_call", "look")
        assert json.loads(made.arguments) == {"b": 1, "a": 2}
        items += [made, {"type": "function_call_output", "call_id": made.call_id, "output": "7"}]
        last = await ask.openai.responses.create(model="m", input=items, tools=[FUNCTION])
        assert last.output_text == "end"
        assert ask.segments == [[(0, 9), (2, 6), (1, 4)]]


async def test_responses_are_streamed() -> None:
    async with asking("one", "!look", reasons=True) as ask:
        async with ask.openai.responses.stream(model="m", input="a?", tools=[FUNCTION]) as stream:
            kinds = [one.type async for one in stream]
            whole = await stream.get_final_response()
        assert whole.output_text == "one" and whole.status == "completed"
        assert kinds.count("response.output_text.delta") == 1 and kinds[-1] == "response.completed"
        async with ask.openai.responses.stream(
            model="m", previous_response_id=whole.id, input="b?", tools=[FUNCTION]
        ) as stream:
            called = await stream.get_final_response()
        assert called.output[0].type == "function_call"
        assert ask.segments == [[(0, 4), (2, 6)]]


async def test_responses_that_cannot_be_answered_are_errors_of_the_client() -> None:
    async with asking("one") as ask:
        create = ask.openai.responses.create
        with pytest.raises(OpenAIBadRequestError, match="no reply of this episode"):
            await create(model="m", input="a?", previous_response_id="resp_9")
        with pytest.raises(OpenAIBadRequestError, match="no built-in tools"):
            await create(model="m", input="a?", tools=[{"type": "web_search"}])
        with pytest.raises(OpenAIBadRequestError, match="response_format"):
            schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
            await create(model="m", input="a?", text={"format": schema})
        cut = await create(model="m", input="a?", max_output_tokens=2)
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/responses", {"input": "a?"}),
        ("/messages", {"messages": [{"role": "user", "content": "a?"}], "max_tokens": 9}),
    ],
)
async def test_what_the_run_decides_it_decides_in_every_interface(path: str, asked: Any) -> None:
    async with asking("one", sampling="refuse") as ask:
        async with httpx.AsyncClient(headers={"x-api-key": ask.key}, timeout=20) as client:

            async def says(**more: Any) -> str:
                body = {"model": "m"} | asked | more
                reply = await client.post(ask.url + path, content=json.dumps(body))
                assert reply.status_code == 400, reply.text
                return str(reply.json()["error"]["message"])

            for name, value in {"temperature": 0, "seed": 0, "ignore_eos": True}.items():
                assert name in await says(**{name: value})
            assert "stop_token_ids" in await says(stop_token_ids=[3])
            assert "guided_regex" in await says(guided_regex="x")
            if path == "/responses":
                assert "`conversation`" in await says(conversation="conv_1")
                assert "reasoning_effort" in await says(reasoning={"effort": "low"})
                assert "verbosity" in await says(text={"verbosity": "low"})
            else:
                assert "thinking" in await says(thinking={"type": "enabled", "budget_tokens": 9})
        assert ask.segments == []


def some(draw: random.Random, depth: int = 0) -> Any:
    """A value as hostile clients send it."""
    plain: list[Any] = [
        None,
        True,
        0,
        -1.5,
        10**30,
        "",
        "text",
        "user",
        "function_call",
        "thinking",
    ]
    kind = draw.random()
    if depth > 3 or kind < 0.4:
        return draw.choice(plain)
    if kind < 0.65:
        return [some(draw, depth + 1) for _ in range(draw.randrange(3))]
    names = ("type", "role", "content", "text", "name", "id", "input", "arguments", "format")
    return {draw.choice(names): some(draw, depth + 1) for _ in range(draw.randrange(4))}


async def test_hostile_bodies_are_refused_or_answered() -> None:
    """None is an error of the server, and the episode goes on."""
    draw = random.Random(1)
    fields = ("messages", "input", "tools", "system", "instructions", "tool_choice", "text")

    async with asking(response_length=100_000, context_length=200_000, max_turns=1_000) as ask:
        head = {"Authorization": f"Bearer {ask.key}"}
        codes: Counter[int] = Counter()
        async with httpx.AsyncClient(headers=head, timeout=20) as client:
            for number in range(120):
                body = {"model": "m"} | {name: some(draw) for name in draw.sample(fields, 4)}
                path = ("/responses", "/messages", "/chat/completions")[number % 3]
                reply = await client.post(ask.url + path, content=json.dumps(body))
                codes[reply.status_code] += 1
        assert set(codes) <= {200, 400}, codes
        assert codes[400] > 60


def test_a_call_with_numbers_that_are_none_is_an_answer() -> None:
    """The policy may say `NaN`, or half a surrogate pair; no client gets an error of the server."""
    message = {
        "tool_calls": [
            {"id": "c", "function": {"name": "look", "arguments": said}}
            for said in ('{"a": NaN, "b": 1e999, "c": [Infinity, 1.5]}', "{no JSON", "[1]")
        ],
        "content": "\ud800",
    }
    blocks = list(_blocks(message))
    assert [one.get("input") for one in blocks[1:]] == [
        {"a": None, "b": None, "c": [None, 1.5]},
        {},
        {},
    ]
    assert _json({"content": blocks}).body.decode("ascii")
