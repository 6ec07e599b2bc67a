"""In which words a client asks: chat completions, and what is written over into them and back.

Runs in: rollout actors. Hides that there are several interfaces to the same tree of turns:

    body --asked--> a chat request --> ServedEpisode --> a chat completion --whole, events--> reply

Each has a module: `responses_api` (OpenAI's /v1/responses) and `messages_api` (Anthropic's
/v1/messages). Invariant: only the words differ; tokens, limits and refusals are those of the chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.agents.endpoint import replies
from async_grpo.agents.endpoint.messages import DECIDED, ChatRequest, RequestError

Body = dict[str, Any]
EXTRA = ("prompt_token_ids", "weights", "forked")
"""Fields of a chat completion that are not the interface's own, and stand in every reply."""


@dataclass(frozen=True)
class Dialect:
    """An interface. asked: a chat request of its body, behind what `previous_response_id` names;
    whole: its reply of a chat completion; events: the same as a stream.
    """

    path: str
    asked: Callable[[Body, Sequence[Body]], Body]
    whole: Callable[[Body], Body]
    events: Callable[[ChatRequest, Body], Iterator[bytes]]
    failure: Callable[[RequestError], Body] = replies.failure


CHAT = Dialect(
    "/v1/chat/completions",
    asked=lambda found, before: found,
    whole=lambda completion: completion,
    events=replies.events,
)


def extra(completion: Body) -> Body:
    """Return what was asked for with `return_token_ids`, and why a row began."""
    found = {name: completion[name] for name in EXTRA if name in completion}
    [choice] = completion["choices"]
    return found | ({"token_ids": choice["token_ids"]} if "token_ids" in choice else {})


def passed(found: Body, names: Mapping[str, str]) -> Body:
    """Return fields of a body under their names in a chat request, where they are set; with those
    that no interface leaves to its clients.
    """
    names = {name: name for name in DECIDED} | dict(names)
    return {new: found[old] for old, new in names.items() if found.get(old) is not None}


def text_of(content: Any, kinds: Sequence[str]) -> str:
    """Join text, or parts of text of these kinds. Raises RequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise RequestError(400, f"content must be text, or parts of type {' or '.join(kinds)}")
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(400, "a part of the content has no text")
        parts.append(text)
    return "".join(parts)


def event(name: str, value: Body) -> bytes:
    """Write a named server-sent event, whose type is its name."""
    return (
        f"event: {name}\n".encode()
        + b"data: "
        + json.dumps({"type": name} | value).encode()
        + (b"\n\n")
    )


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
