"""The chat interface as clients meet it: an unmodified SDK, wrong keys, floods, hostile bodies."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.config.endpoint import EndpointConfig
from async_grpo.rollout.engine.base import EngineError
from tests.support.scripted_policy import Letters
from tests.support.served_episodes import Policy, served

pytestmark = pytest.mark.timeout(90)  # they wait for each other

ASK = [{"role": "user", "content": "a?"}]


class Open:
    """An endpoint with one episode."""

    def __init__(self, endpoint: Endpoint, policy: Policy, key: str, episode: Any) -> None:
        self.endpoint, self.policy = endpoint, policy
        self.key, self.episode = key, episode
        self.counts = endpoint._counts

    def sdk(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.endpoint.url, api_key=self.key, **more)

    def raw(self, length: int) -> tuple[tuple[str, int], bytes]:
        """Where to connect, and the head of a request with a body of so many bytes."""
        host, port = self.endpoint.url.split("//")[1].split("/")[0].split(":")
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Length: {length}\r\n\r\n"
        )
        return (host, int(port)), head.encode()

    async def post(self, content: bytes | None = None, *, key: str | None = None) -> httpx.Response:
        body = body_of() if content is None else content
        async with httpx.AsyncClient() as client:
            return await client.post(
                self.endpoint.url + "/chat/completions",
                content=body,
                headers={"Authorization": f"Bearer {self.key if key is None else key}"},
                timeout=20,
            )


@asynccontextmanager
async def opened(policy: Policy, *, reasons: bool = False, **settings: Any) -> AsyncIterator[Open]:
    endpoint = Endpoint(
        EndpointConfig.model_validate(settings),
        words=lambda ids: Letters().decode(ids, skip_special_tokens=False),
        counts=Counter(),
    )
    await endpoint.start()
    episode = served(policy, reasons=reasons)
    try:
        async with asyncio.timeout(40), endpoint.serving(episode) as key:
            yield Open(endpoint, policy, key, episode)
    finally:
        await endpoint.close()


async def test_an_unmodified_sdk() -> None:
    async with opened(Policy("one", "two", "!look"), reasons=True) as one, one.sdk() as client:
        reply = await client.chat.completions.create(
            model="gpt-4o",
            messages=ASK,
            logprobs=True,
            temperature=0.3,
            extra_body={"return_token_ids": True},
        )
        [choice] = reply.choices
        assert (choice.message.content, choice.finish_reason) == ("one", "stop")
        assert choice.model_extra["token_ids"] == [*b"one", 1]
        assert reply.model_extra["prompt_token_ids"] == [*b"a?"]
        assert reply.model_extra["weights"] == [["v0.0", 0, 4]]
        assert [entry.logprob for entry in choice.logprobs.content] == [0, -1, -2, -3]
        assert reply.usage.prompt_tokens == 2 and reply.usage.completion_tokens == 4
        assert one.counts["requests_overridden"] == 1
        asked = [*ASK, choice.message, {"role": "user", "content": "b?"}]
        stream = await client.chat.completions.create(
            model="gpt-4o", messages=asked, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == "two"
        assert events[-1].usage.completion_tokens == 4
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        called = await client.chat.completions.create(model="gpt-4o", messages=ASK, tools=tools)
        [choice] = called.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 2, "b": 1}
        assert [model.id for model in (await client.models.list()).data] == ["policy"]


async def test_an_sdk_that_retries_is_one_turn() -> None:
    policy = Policy("one", "two")
    policy.hold.clear()
    async with opened(policy) as one, one.sdk(timeout=0.5, max_retries=3) as client:
        asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=ASK))
        await asyncio.sleep(1.2)
        policy.hold.set()
        assert (await asked).choices[0].message.content == "one"
        assert len(policy.asked) == 1 and one.counts["requests_left"] >= 1
        [row] = one.episode.episode.session.rows
        assert row.segments == [(0, 4)]


async def test_equal_drafts_of_an_sdk_stay_apart() -> None:
    """Two are refused at first, for there are two places; all are sampled, and each is answered
    with its own turn.
    """
    policy = Policy("one", "two", "three", "four")
    policy.hold.clear()
    async with opened(policy, requests=2) as one, one.sdk(max_retries=9) as client:
        drafts = []
        for _ in range(4):
            draft = client.chat.completions.create(model="m", messages=ASK)
            drafts.append(asyncio.ensure_future(draft))
            await asyncio.sleep(0.05)
        while one.counts["requests_429"] < 2:
            await asyncio.sleep(0.01)
        policy.hold.set()
        said = [(await draft).choices[0].message.content for draft in drafts]
        assert sorted(said) == ["four", "one", "three", "two"]
        assert len(policy.asked) == 4


async def test_a_lost_answer_is_one_turn_while_other_requests_are_refused() -> None:
    policy = Policy("one", "two")
    async with opened(policy, requests=1) as one, one.sdk(max_retries=0) as client:
        again = {"x-stainless-retry-count": "1"}
        for headers in ({}, again):
            reply = await client.chat.completions.create(
                model="m", messages=ASK, extra_headers=headers
            )
            assert reply.choices[0].message.content == "one"
            policy.hold.clear()
            other = [{"role": "user", "content": "other?"}]
            held = asyncio.ensure_future(one.post(body_of(messages=other)))
            while not one.episode.open:
                await asyncio.sleep(0.01)
            for content in ("b?", "c?"):
                asked = [{"role": "user", "content": content}]
                assert (await one.post(body_of(messages=asked))).status_code == 429
            policy.hold.set()
            assert (await held).status_code == 200
        assert len(policy.asked) == 3


async def test_equal_drafts_that_an_sdk_sends_again_stay_apart() -> None:
    policy = Policy("one", "two", "three")
    policy.hold.clear()
    async with opened(policy) as one, one.sdk(timeout=0.5, max_retries=9) as client:
        asked = client.chat.completions.create
        drafts = [asyncio.ensure_future(asked(model="m", messages=ASK)) for _ in range(2)]
        while one.counts["requests_left"] < 2:
            await asyncio.sleep(0.01)
        policy.hold.set()
        assert {(await draft).choices[0].message.content for draft in drafts} == {"one", "two"}
        assert len(policy.asked) == 2


async def test_a_key_is_good_for_its_episode_while_that_lasts() -> None:
    async with opened(Policy("one")) as one:
        for key in ("x", "nonsense", one.key[:-1], one.key + "x"):
            assert (await one.post(key=key)).status_code == 401
        other = served(Policy("two"))
        async with one.endpoint.serving(other) as key:
            reply = await one.post(key=key)
            assert reply.json()["choices"][0]["message"]["content"] == "two"
        assert (await one.post(key=key)).status_code == 401
        assert one.policy.asked == [] and one.counts["requests_401"] == 5


def body_of(**changed: Any) -> bytes:
    return json.dumps({"model": "m", "messages": ASK} | changed).encode()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        (b"[]", "JSON object"),
        (body_of(messages=None), "`messages` is empty"),
        (body_of(messages={"role": "user"}), "must be a list"),
        (body_of(messages=[3]), "message 0"),
        (body_of(messages=[{"role": "user", "content": ""}]), "without a token"),
        (body_of(messages=[{"role": "root", "content": "x"}]), "`role`"),
        (body_of(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "text"),
        (body_of(messages=[{"role": "user", "content": "\ud800"}]), "Unicode"),
        (body_of(messages=[{"role": "assistant", "content": "x"}]), "last message"),
        (body_of(model=3), "`model`"),
        (body_of(n=2), "`n`"),
        (body_of(stop=["y"]), "`stop`"),
        (body_of(max_tokens=0), "`max_tokens`"),
        (body_of(tools=[1]), "`tools`"),
        (body_of(tool_choice="required"), "`tool_choice`"),
        (body_of(stop_token_ids=[3]), "`stop_token_ids` is not"),
        (body_of(guided_regex="[0-9]+"), "`guided_regex` is not"),
        (body_of(guided_json={"type": "object"}), "`guided_json` is not"),
        (body_of(structured_outputs={"regex": "x"}), "`structured_outputs` is not"),
        (body_of(allowed_token_ids=[3]), "`allowed_token_ids` is not"),
        (body_of(continue_final_message=True), "`continue_final_message` is not"),
        (body_of(chat_template="{{ messages }}"), "`chat_template` is not"),
        (body_of(function_call="auto"), "`function_call` is not"),
        (
            body_of(logprobs=True, top_logprobs=1),
            "`top_logprobs` is not possible: leave it out: `logprobs: true` gives",
        ),
    ],
)
async def test_hostile_bodies_are_answered_with_a_sentence(body: bytes, says: str) -> None:
    async with opened(Policy("one")) as one:
        reply = await one.post(body)
        assert reply.status_code == 400 and says in reply.json()["error"]["message"]
        assert (await one.post()).status_code == 200, "and the next one is answered"


async def test_what_is_not_there_is_said_in_json() -> None:
    async with opened(Policy()) as one, httpx.AsyncClient(base_url=one.endpoint.url) as client:
        for reply, status in (
            (await client.post("/embeddings"), 404),
            (await client.get("/chat/completions"), 405),
        ):
            error = reply.json()["error"]
            assert reply.status_code == status and error["code"] == "not_found"
            assert reply.request.url.path in error["message"]


DECIDED_BY_THE_RUN = {
    "temperature": 0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 0,
    "min_p": 0.1,
    "typical_p": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"3": 1},
    "bad_words": ["no"],
    "min_tokens": 3,
    "ignore_eos": True,
    "best_of": 2,
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.mark.parametrize("sampling", ["ignore", "refuse"])
async def test_every_setting_of_the_run_is_refused_or_counted(sampling: str) -> None:
    """Also where its value is one that Python takes for false."""
    async with opened(Policy(), sampling=sampling) as one:
        for number, (name, value) in enumerate(DECIDED_BY_THE_RUN.items(), 1):
            reply = await one.post(body_of(**{name: value}))
            if sampling == "ignore":
                assert reply.status_code == 200 and one.counts["requests_overridden"] == number
            else:
                assert reply.status_code == 400 and name in reply.json()["error"]["message"]


async def test_settings_that_change_nothing_are_the_runs_own() -> None:
    plain = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    more = {"logit_bias": {}, "min_p": 0, "best_of": 1, "seed": None, "top_logprobs": 0}
    more |= {"thinking": {"type": "disabled"}, "top_k": -1, "function_call": "none"}
    async with opened(Policy("one"), sampling="refuse") as one:
        assert (await one.post(body_of(**plain, **more))).status_code == 200
        assert one.counts["requests_overridden"] == 0


async def test_bodies_that_are_nested_deeply_are_refused() -> None:
    """Also where the parser just takes them, and what comes after it does not."""
    async with opened(Policy()) as one:

        async def says(depth: int) -> str:
            deep = b"[" * depth + b"]" * depth
            tool = b'[{"type": "function", "function": {"name": "f", "parameters": %b}}]' % deep
            reply = await one.post(body_of(tools="DEEP").replace(b'"DEEP"', tool))
            assert reply.status_code in (200, 400), depth
            return reply.text

        taken, refused = 10, 200_000
        while refused - taken > 1:
            middle = (taken + refused) // 2
            if "no JSON" in await says(middle):
                refused = middle
            else:
                taken = middle
        for less in range(5):
            await says(taken - less)
        assert one.episode.failure is None


async def test_long_lists_are_refused() -> None:
    async with opened(Policy("one")) as one:
        tool = {"type": "function", "function": {"name": "f"}}
        for name, values in {"messages": ASK * 4_097, "tools": [tool] * 1_025}.items():
            reply = await one.post(body_of(**{name: values}))
            said = reply.json()["error"]["message"]
            assert reply.status_code == 400 and f"`{name}` has {len(values):,} entries" in said
        assert (await one.post(body_of(tools=[tool] * 1_024))).status_code == 200


async def test_nothing_of_a_request_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """Whether it is answered, refused, hostile, or met by an error that nobody has foreseen."""
    caplog.set_level(logging.DEBUG)
    said = [{"role": "user", "content": "a secret?"}]
    async with opened(Policy()) as one:
        assert (await one.post(body_of(messages=said))).status_code == 200
        assert (await one.post(body_of(messages=said, stop="secret"))).status_code == 400
        assert (await one.post(b"secret" * 9)).status_code == 400
        assert (await one.post(key="secret")).status_code == 401

        def fails(*_: object) -> None:
            raise ValueError("what a secret")

        with monkeypatch.context() as patch:
            patch.setattr("async_grpo.agents.endpoint.dialects.completion", fails)
            reply = await one.post(body_of(messages=said))
        assert reply.status_code == 500 and "ValueError" in reply.json()["error"]["message"]
        assert one.counts["requests_500"] == 1
        assert (await one.post(body_of(messages=said, user="other"))).status_code == 200
    assert one.counts["requests_answered"] == len(one.episode.episode.session.rows) == 2
    written = caplog.text + "".join(capfd.readouterr())
    assert "answered a request with 500: ValueError" in written
    assert "secret" not in written and one.key not in written


async def test_a_body_without_an_end_is_cut_off() -> None:
    async with opened(Policy("one"), body_mb=0.25) as one:

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(2**14):
                yield b" " * 2**16  # 1 GiB, if anybody took it

        async with httpx.AsyncClient() as client:
            try:
                reply = await client.post(
                    one.endpoint.url + "/chat/completions",
                    content=parts(),
                    headers={"Authorization": f"Bearer {one.key}"},
                    timeout=20,
                )
                assert reply.status_code == 413
            except httpx.WriteError:  # the connection was closed while it still wrote
                pass
        assert one.counts["requests_413"] == 1
        assert (await one.post()).status_code == 200


async def test_floods_are_refused_and_others_are_served() -> None:
    policy = Policy()
    policy.hold.clear()
    async with opened(policy, requests=3, per_minute=12) as one:
        held = [asyncio.ensure_future(one.post()) for _ in range(3)]
        while one.episode.open < 3:
            await asyncio.sleep(0.01)
        assert (await one.post()).status_code == 429
        other = served(Policy("two"))
        async with one.endpoint.serving(other) as key:
            assert (await one.post(key=key)).status_code == 200
        policy.hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*held)} == {200}
        codes = [(await one.post()).status_code for _ in range(12)]
        assert codes == [200] * 9 + [429] * 3


async def test_a_body_that_is_still_to_come_holds_a_place() -> None:
    """So that bodies that never end take the memory of `endpoint.requests` bodies."""
    async with opened(Policy(), requests=2) as one, AsyncExitStack() as slow:
        address, head = one.raw(900_000)
        for _ in range(2):
            _, writer = await asyncio.open_connection(*address)
            slow.callback(writer.close)
            writer.write(head + b"{")
        while (await one.post()).status_code != 429:
            await asyncio.sleep(0.01)
        assert one.episode.open == 0
        await slow.aclose()
        while (await one.post()).status_code != 200:
            await asyncio.sleep(0.01)


async def test_a_client_that_never_reads_harms_nobody() -> None:
    async with opened(Policy("one", "two")) as one:
        address, head = one.raw(len(body_of()))
        with socket.create_connection(address) as quiet:
            quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            quiet.sendall(head + body_of())
            while not one.policy.asked:
                await asyncio.sleep(0.01)
            assert (await one.post()).status_code == 200


async def test_an_engine_that_fails_is_no_answer() -> None:
    policy = Policy()

    async def fails(tokens: object, sampling: object) -> None:
        raise EngineError("it is gone")

    policy.sample = fails  # type: ignore[method-assign, assignment]
    async with opened(policy) as one:
        reply = await one.post()
        assert reply.status_code == 503 and "it is gone" in reply.json()["error"]["message"]


async def test_settings_of_a_client_are_refused_where_that_is_configured() -> None:
    async with opened(Policy("one"), sampling="refuse") as one:
        body = json.dumps({"model": "m", "messages": ASK, "temperature": 0.5, "seed": 1}).encode()
        reply = await one.post(body)
        assert reply.status_code == 400 and "temperature, seed" in reply.json()["error"]["message"]
