"""OpenAI's responses interface, over chat completions.

Runs in: rollout actors. Hides its items: messages, calls, their outputs, and reasoning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from async_grpo.agents.endpoint.dialects import Body, Dialect, call, event, extra, function, passed
from async_grpo.agents.endpoint.messages import (
    MOST_TOOLS,
    ChatRequest,
    RequestError,
    listed,
    text_of,
)

_SAME = ("model", "stream", "tool_choice", "return_token_ids")
_TEXT = ("input_text", "output_text", "text")


def _asked(found: Body, before: Sequence[Body]) -> Body:
    # instructions are those of one request: they are not carried over
    messages = [one for one in copy.deepcopy(list(before)) if not one.get("own")]
    if found.get("instructions"):
        messages.insert(0, {"role": "system", "content": found["instructions"], "own": True})
    given = found.get("input")
    if not isinstance(given, (str, list)):
        raise RequestError(400, "`input` must be text or a list of items")
    said = [{"role": "user", "content": given}] if isinstance(given, str) else None
    for item in said or listed(found, "input"):
        _add(messages, item)
    text, reasoning = found.get("text"), found.get("reasoning")
    text = text if isinstance(text, dict) else {"format": text}
    reasoning = reasoning if isinstance(reasoning, dict) else {}
    return (
        passed(found, *_SAME, max_output_tokens="max_tokens")
        | passed(text, format="response_format")
        | passed(reasoning, effort="reasoning_effort")
        | {
            "messages": messages,
            "tools": [_tool(tool) for tool in listed(found, "tools", MOST_TOOLS)],
        }
    )


def _tool(tool: Any) -> Body:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(400, "each of `tools` must be a function: there are no built-in tools")
    return function(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _add(messages: list[Body], item: Any) -> None:
    """Append an item. Calls and reasoning belong to the assistant's message beside them."""
    if not isinstance(item, dict):
        raise RequestError(400, "each item of `input` must be an object")
    kind = item.get("type", "message")
    if kind == "function_call":
        made = call(item.get("call_id"), item.get("name"), item.get("arguments"))
        _turn(messages).setdefault("tool_calls", []).append(made)
    elif kind == "function_call_output":
        output = text_of(item.get("output"), _TEXT)
        known = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        messages.append(known)
    elif kind == "reasoning":
        thought = text_of(item.get("content"), ("reasoning_text",))
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif kind == "message":
        content = text_of(item.get("content"), _TEXT)
        if item.get("role") == "assistant" and _is_thought(messages):
            messages[-1]["content"] = content
        else:
            messages.append({"role": item.get("role"), "content": content})
    else:
        raise RequestError(400, f"an item of type {kind!r} is not possible: there is text")


def _turn(messages: list[Body]) -> Body:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _is_thought(messages: list[Body]) -> bool:
    last = messages[-1] if messages else {}
    return bool(last.get("reasoning_content")) and not last["content"] and "tool_calls" not in last


def _whole(completion: Body) -> Body:
    [choice] = completion["choices"]
    usage = completion["usage"]
    cut = choice["finish_reason"] == "length"
    number = completion["id"].removeprefix("chatcmpl-")
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": completion["created"],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": completion["model"],
        "output": list(_items(choice["message"], number)),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    } | extra(completion)


def _items(message: Body, number: str) -> Iterator[Body]:
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [text]}
    if message.get("content"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        yield {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
    for one in message.get("tool_calls", ()):
        yield {
            "type": "function_call",
            "id": f"fc_{one['id']}",
            "call_id": one["id"],
            "name": one["function"]["name"],
            "arguments": one["function"]["arguments"],
            "status": "completed",
        }


def _events(request: ChatRequest, completion: Body) -> Iterator[bytes]:
    whole, numbers = _whole(completion), count()

    def write(kind: str, /, **value: Any) -> bytes:
        return event({"sequence_number": next(numbers)} | value, f"response.{kind}")

    head = whole | {"status": "in_progress", "output": [], "usage": None}
    yield write("created", response=head)
    yield write("in_progress", response=head)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        yield write("output_item.added", output_index=index, item=_empty(item))
        if item["type"] == "message":
            [part] = item["content"]
            at |= {"content_index": 0}
            yield write("content_part.added", part=part | {"text": ""}, **at)
            yield write("output_text.delta", delta=part["text"], logprobs=[], **at)
            yield write("output_text.done", text=part["text"], logprobs=[], **at)
            yield write("content_part.done", part=part, **at)
        elif item["type"] == "function_call":
            said = item["arguments"]
            yield write("function_call_arguments.delta", delta=said, **at)
            yield write("function_call_arguments.done", arguments=said, name=item["name"], **at)
        yield write("output_item.done", output_index=index, item=item)
    yield write("completed" if whole["status"] == "completed" else "incomplete", response=whole)


def _empty(item: Body) -> Body:
    if item["type"] == "function_call":
        return item | {"arguments": "", "status": "in_progress"}
    return item | {"content": []}


RESPONSES = Dialect("/v1/responses", _asked, _whole, _events)
