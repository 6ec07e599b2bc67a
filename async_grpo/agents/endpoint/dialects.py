"""In which words a client asks: chat completions, and what is written over into them and back.

Runs in: rollout actors. Hides that there are several interfaces to the same tree of turns:

    body --asked--> a chat request --> ServedEpisode --> a chat completion --whole, events--> reply

The others have a module each: `responses_api` (OpenAI's /v1/responses) and `messages_api`
(Anthropic's /v1/messages). A stream is written after the fact. With `return_token_ids` (vLLM's
name) a reply has the ids of its prompt and of its tokens, and the weights that sampled them, by
span of tokens. Invariant: only the words differ; tokens, limits and refusals are those of the chat.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.agents.endpoint.messages import DECIDED, ChatRequest, RequestError
from async_grpo.agents.endpoint.served import Reply

Body = dict[str, Any]
EXTRA = ("prompt_token_ids", "weights", "forked")
"""Fields of a chat completion that are not the interface's own, and stand in every reply."""


def failure(error: RequestError) -> Body:
    """Write a refusal."""
    return {"error": {"message": str(error), "type": error.code, "code": error.code, "param": None}}


@dataclass(frozen=True)
class Dialect:
    """An interface. asked: a chat request of its body, behind what `previous_response_id` names;
    whole: its reply of a chat completion; events: the same as a stream.
    """

    path: str
    asked: Callable[[Body, Sequence[Body]], Body]
    whole: Callable[[Body], Body]
    events: Callable[[ChatRequest, Body], Iterator[bytes]]
    failure: Callable[[RequestError], Body] = failure


def extra(completion: Body) -> Body:
    """Return what was asked for with `return_token_ids`, and why a row began."""
    found = {name: completion[name] for name in EXTRA if name in completion}
    [choice] = completion["choices"]
    return found | ({"token_ids": choice["token_ids"]} if "token_ids" in choice else {})


def passed(found: Body, *names: str, **renamed: str) -> Body:
    """Return fields of a body under their names in a chat request, where they are set; with those
    that no interface leaves to its clients.
    """
    known = {name: name for name in (*DECIDED, *names)} | renamed
    return {new: found[old] for old, new in known.items() if found.get(old) is not None}


def event(value: Body, name: str = "") -> bytes:
    """Write a server-sent event; one with a name has it as its type, too."""
    head, value = (f"event: {name}\n", {"type": name} | value) if name else ("", value)
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def function(name: Any, description: Any, parameters: Any) -> Body:
    """Write a tool as chat completions have it."""
    known = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in known.items() if value is not None},
    }


def call(number: Any, name: Any, arguments: Any) -> Body:
    """Write a call as chat completions have it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---- chat completions ----


def completion(
    request: ChatRequest, reply: Reply, number: str, words: Callable[[Sequence[int]], str]
) -> Body:
    """Write a reply. number: of it, for `id`; words: of token ids."""
    done = reply.done
    ids = done.token_ids.tolist()
    choice: Body = {
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
    found: Body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.label,
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


def events(request: ChatRequest, whole: Body) -> Iterator[bytes]:
    """Write a reply as the events of a stream: its message at once, its end, and its usage."""
    [choice] = whole["choices"]
    head = {name: whole[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    known = {name: whole[name] for name in EXTRA if name in whole}
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
        ]
    first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
    if "token_ids" in choice:
        first["token_ids"] = choice["token_ids"]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    yield event(head | known | {"choices": [first]})
    yield event(head | {"choices": [last]})
    if request.stream_usage:
        yield event(head | {"choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def _message(reply: Reply) -> Body:
    """Write the message; a turn that only calls has no content."""
    found = dict(reply.message)
    if found.get("tool_calls") and not found["content"]:
        found["content"] = None
    return found


def _finish_reason(reply: Reply) -> str:
    if reply.message.get("tool_calls"):
        return "tool_calls"
    return "length" if reply.done.finish_reason == "length" else "stop"


def _usage(reply: Reply) -> Body:
    count = len(reply.done.token_ids)
    return {
        "prompt_tokens": len(reply.prompt),
        "completion_tokens": count,
        "total_tokens": len(reply.prompt) + count,
        "prompt_tokens_details": {"cached_tokens": reply.done.cached_tokens},
    }


CHAT = Dialect(
    "/v1/chat/completions",
    asked=lambda found, before: found,
    whole=lambda completion: completion,
    events=events,
)
