"""Anthropic's messages interface, over chat completions.

Runs in: rollout actors. Hides its blocks: text, thinking, `tool_use` and `tool_result`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from async_grpo.agents.endpoint.dialects import Body, Dialect, call, event, extra, function, passed
from async_grpo.agents.endpoint.messages import (
    MOST_TOOLS,
    ChatRequest,
    RequestError,
    listed,
    text_of,
)

_SAME = ("model", "max_tokens", "stream", "return_token_ids")
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _asked(found: Body, before: Sequence[Body]) -> Body:
    messages: list[Body] = []
    system = text_of(found.get("system"), ("text",))
    if system:
        messages.append({"role": "system", "content": system})
    for one in listed(found, "messages"):
        messages += _messages(one)
    choice = found.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return passed(found, *_SAME, stop_sequences="stop") | {
        "messages": messages,
        "tools": [_tool(tool) for tool in listed(found, "tools", MOST_TOOLS)],
        "tool_choice": kind,
    }


def _tool(tool: Any) -> Body:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise RequestError(400, "each of `tools` must be a tool of the client, with a name")
    return function(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _messages(one: Any) -> Iterator[Body]:
    """Write a message over: results of tools are messages of their own, before what a user says."""
    if not isinstance(one, dict) or one.get("role") not in ("user", "assistant"):
        raise RequestError(400, "each of `messages` must be a user's or an assistant's")
    content = one.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    text, thought, calls, results = [], [], [], False
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            text.append(text_of([block], ("text",)))
        elif kind == "thinking" and one["role"] == "assistant":
            thought.append(str(block.get("thinking") or ""))
        elif kind == "tool_use" and one["role"] == "assistant":
            calls.append(call(block.get("id"), block.get("name"), json.dumps(block.get("input"))))
        elif kind == "tool_result" and one["role"] == "user":
            results = True
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": text_of(block.get("content"), ("text",)),
            }
        else:
            raise RequestError(400, f"a block of type {kind!r} is not possible here: there is text")
    if results and not text:
        return
    message: Body = {"role": one["role"], "content": "".join(text)}
    if thought:
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["tool_calls"] = calls
    yield message


def _whole(completion: Body) -> Body:
    [choice] = completion["choices"]
    usage = completion["usage"]
    return {
        "id": completion["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": list(_blocks(choice["message"])),
        "stop_reason": _ENDS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    } | extra(completion)


def _blocks(message: Body) -> Iterator[Body]:
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    if message.get("content"):
        yield {"type": "text", "text": message["content"]}
    for one in message.get("tool_calls", ()):
        try:
            given = json.loads(
                one["function"]["arguments"], parse_constant=lambda word: None, parse_float=_finite
            )
        except ValueError:
            given = {}
        yield {
            "type": "tool_use",
            "id": one["id"],
            "name": one["function"]["name"],
            "input": given if isinstance(given, dict) else {},
        }


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _events(request: ChatRequest, completion: Body) -> Iterator[bytes]:
    whole = _whole(completion)
    usage = whole["usage"]
    head = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield event({"message": head}, "message_start")
    for index, block in enumerate(whole["content"]):
        empty, delta = _parts(block)
        at = {"index": index}
        yield event(at | {"content_block": empty}, "content_block_start")
        yield event(at | {"delta": delta}, "content_block_delta")
        yield event(at, "content_block_stop")
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    last = {"delta": end, "usage": {"output_tokens": usage["output_tokens"]}}
    yield event(last, "message_delta")
    yield event({}, "message_stop")


def _parts(block: Body) -> tuple[Body, Body]:
    """Split a block into its beginning and what is added."""
    if block["type"] == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return block | {"input": {}}, delta
    field = "thinking" if block["type"] == "thinking" else "text"
    return block | {field: ""}, {"type": f"{field}_delta", field: block[field]}


def _failure(error: RequestError) -> Body:
    kind = _ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error), "code": error.code}}


MESSAGES = Dialect("/v1/messages", _asked, _whole, _events, _failure)
