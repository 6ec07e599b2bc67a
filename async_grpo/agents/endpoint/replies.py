"""Turns as the chat interface writes them: one JSON object, or server-sent events after the fact.

Runs in: rollout actors. Hides the JSON. With `return_token_ids` (vLLM's name) a reply has the ids
of its prompt and of its tokens, and the weights that sampled them, by span of tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from async_grpo.agents.endpoint.messages import ChatRequest, RequestError
from async_grpo.agents.endpoint.served import Reply


def completion(
    request: ChatRequest, reply: Reply, number: str, words: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Write a reply. number: of it, for `id`; words: of token ids."""
    done = reply.done
    ids = done.token_ids.tolist()
    choice: dict[str, Any] = {
        "index": 0,
        "message": _message(reply),
        "finish_reason": _finish_reason(reply),
        "logprobs": None,
    }
    if request.wants_logprobs:
        content: list[dict[str, Any]] = [
            {"token": words([token]), "logprob": float(logprob), "bytes": None, "top_logprobs": []}
            for token, logprob in zip(ids, done.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    found = _head("chat.completion", request, number) | {
        "choices": [choice],
        "usage": _usage(reply),
    }
    if request.wants_ids:
        choice["token_ids"] = ids
        found["prompt_token_ids"] = reply.prompt
        found["weights"] = [list(span) for span in done.labels]
    if reply.turn.forked:
        found["forked"] = reply.turn.forked
    return found


def events(request: ChatRequest, whole: dict[str, Any]) -> Iterator[bytes]:
    """Write a reply as the events of a stream: its message at once, its end, and its usage."""
    [choice] = whole["choices"]
    head = {name: whole[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    extra = {
        name: whole[name] for name in ("prompt_token_ids", "weights", "forked") if name in whole
    }
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
        ]
    first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
    if "token_ids" in choice:
        first["token_ids"] = choice["token_ids"]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    yield _event(head | extra | {"choices": [first]})
    yield _event(head | {"choices": [last]})
    if request.stream_usage:
        yield _event(head | {"choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def failure(error: RequestError) -> dict[str, Any]:
    """Write a refusal."""
    return {"error": {"message": str(error), "type": error.code, "code": error.code, "param": None}}


def _head(kind: str, request: ChatRequest, number: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": request.label,
    }


def _message(reply: Reply) -> dict[str, Any]:
    """Write the message; a turn that only calls has no content."""
    found = dict(reply.message)
    if found.get("tool_calls") and not found["content"]:
        found["content"] = None
    return found


def _finish_reason(reply: Reply) -> str:
    if reply.message.get("tool_calls"):
        return "tool_calls"
    return "length" if reply.done.finish_reason == "length" else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    count = len(reply.done.token_ids)
    return {
        "prompt_tokens": len(reply.prompt),
        "completion_tokens": count,
        "total_tokens": len(reply.prompt) + count,
        "prompt_tokens_details": {"cached_tokens": reply.done.cached_tokens},
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
