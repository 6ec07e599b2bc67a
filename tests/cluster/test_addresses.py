"""A model behind an address: what is sent, what is repeated, and what its failures are called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from async_grpo.cluster.addresses import Address, addresses
from async_grpo.config.frozen import FrozenModel
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.rollout.frozen import FrozenFailed, Question, TextRefused
from tests.support.judge_models import Reply, completion, judge_server

SCHEMA = {"type": "object", "properties": {"score": {"enum": [1, 2]}}}
ASKED = Question([{"role": "user", "content": "Grade it."}], SCHEMA, 7)
KEY = "sk-of-this-test-" + "x" * 400
PAGE = (200, "text/html", b"<html>a portal</html>")


def address(url: str, key: str = KEY, **settings: Any) -> Address:
    return Address("gpt", FrozenModel(url=url, served_name="m", **settings), key)


def asked(reply: Callable[[Any], Reply], *, times: int = 1, **settings: Any) -> tuple[Any, Any]:
    async def ask(one: Address) -> list[str]:
        return await asyncio.gather(*[one.answer(ASKED) for _ in range(times)])

    with judge_server(reply) as (url, seen):
        return asyncio.run(asyncio.wait_for(ask(address(url, **settings)), 30)), seen


def test_the_question_goes_with_its_schema_and_the_key_in_the_header() -> None:
    answers, [(authorization, body)] = asked(lambda request: completion('{"score": 2}'))
    assert answers == ['{"score": 2}'] and authorization == f"Bearer {KEY}"
    assert body["model"] == "m" and body["temperature"] == 0 and body["max_tokens"] == 7
    assert body["messages"] == ASKED.messages
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


def test_what_may_pass_is_asked_again_as_often_as_set() -> None:
    replies = iter([(429, "text/plain", b"slow"), (500, "text/html", b"<p>"), completion("{}")])
    answers, seen = asked(lambda request: next(replies), retries=2)
    assert answers == ["{}"] and len(seen) == 3
    replies = iter([(429, "text/plain", b"slow"), (500, "text/html", b"<p>"), completion("{}")])
    with pytest.raises(FrozenFailed, match=r"^gpt: InternalServerError"):
        asked(lambda request: next(replies), retries=1)


@pytest.mark.parametrize(
    "reply",
    [
        (401, "application/json", b'{"error": {"message": "wrong key: %s"}}' % KEY.encode()),
        (404, "application/json", b'{"error": "no such model"}'),
        PAGE,
        (200, "application/json", b"{"),
        (200, "application/json", b"[]"),
        (200, "application/json", b"null"),
        (200, "application/json", b'{"choices": []}'),
        (200, "application/json", b'{"choices": [{"message": null}]}'),
        (200, "application/json", b""),
    ],
)
def test_what_is_no_answer_is_a_failure_without_the_key(reply: Reply) -> None:
    with pytest.raises(FrozenFailed) as caught:
        asked(lambda request: reply, retries=0)
    assert str(caught.value).startswith("gpt: ") and "x" * 20 not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_empty_answer_is_an_empty_text() -> None:
    answers, _ = asked(lambda request: completion(""))
    assert answers == [""]


def test_nobody_there_and_nothing_said() -> None:
    with pytest.raises(FrozenFailed, match="APIConnectionError"):
        asyncio.run(address("http://127.0.0.1:9/v1", retries=0).answer(ASKED))

    def silent(request: Any) -> Reply:
        time.sleep(0.5)
        return completion("{}")

    with pytest.raises(FrozenFailed, match=r"APITimeoutError|no answer within"):
        asked(silent, timeout_s=0.1, retries=0)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_text_that_an_address_refuses_is_one_text(status: int) -> None:
    with pytest.raises(TextRefused, match=f"gpt: .*{status}"):
        asked(lambda request: (status, "application/json", b'{"error": {"message": "long"}}'))


async def test_a_question_has_one_deadline_whatever_trickles_in() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        for _ in range(100):
            writer.write(b" ")
            await asyncio.sleep(0.05)

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    one = address(f"http://127.0.0.1:{port}/v1", timeout_s=0.3, retries=0)
    try:
        with pytest.raises(FrozenFailed, match=r"no answer within frozen.gpt.timeout_s = 0.3 s"):
            await asyncio.wait_for(one.answer(ASKED), 4)
    finally:
        server.close()


def test_so_many_are_asked_at_once() -> None:
    now, most = [0], [0]

    def slow(request: Any) -> Reply:
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.05)
        now[0] -= 1
        return completion("{}")

    asked(slow, times=8, max_concurrency=2)
    assert most[0] == 2


def config(**settings: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "policy"},
            "frozen": {"gpt": {"url": "http://h/v1", "served_name": "m", **settings}},
            "task": {"judges": {"nice": {"model": "gpt"}}},
        }
    )


def test_the_key_is_read_where_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "k")
    assert addresses(config(api_key_env="A_KEY"))["gpt"]._key == "k"
    assert addresses(config())["gpt"]._key == ""
    assert "k" not in repr(addresses(config(api_key_env="A_KEY"))["gpt"]).partition(" at ")[0][-3:]
    monkeypatch.delenv("A_KEY")
    with pytest.raises(SetupError, match=r"frozen.gpt.api_key_env is A_KEY, which is not set"):
        addresses(config(api_key_env="A_KEY"))
