"""What a chat request says, in the form in which it is compared with what was said before.

Runs in: rollout actors. Hides the JSON of the chat interface: which fields there are, in how many
ways a message can be written, and which settings a client may not have.

    body (bytes) -> ChatRequest: messages, tools, most tokens, stream
                    or RequestError, which says what to change

Two messages are equal if role, text, reasoning, and calls with their arguments in order are: what a
client writes down in another way (`null` for "", a list of text parts for one text, JSON with other
spaces) is the same, what it changes is not. Invariant: nothing of a request is logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from async_grpo.rollout.chat_format import Message

Refusal = Literal["ignore", "refuse"]
ROLES = ("system", "developer", "user", "assistant", "tool")
FIXED: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (-1,),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([], ""),
    "seed": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "verbosity": (),
    "thinking": ({"type": "disabled"},),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
}
"""Settings that would change what is sampled, or how a chat is rendered: they are those of the run.
Values of each that change nothing.
"""
_STOPS = (
    "a stop string may end a turn inside a token, and the run decides which tokens end a turn; let "
    "the model end its turns, and cut the text off in the client"
)
_GRAMMAR = "a grammar would change what is sampled; ask for the form in the prompt"
_LOGPROBS = (
    "leave it out: `logprobs: true` gives the log-probs of the sampled tokens, and no others"
)
_OWN_TEMPLATE = "chats are rendered with the model's chat template; say it in a message"
_NOTHING_STORED = "the endpoint stores nothing for later; send what is said, and wait for the reply"
_NEVER = {
    "stop": _STOPS,
    "stop_token_ids": _STOPS,
    "response_format": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "guided_choice": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "allowed_token_ids": _GRAMMAR,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "chat_template": _OWN_TEMPLATE,
    "documents": _OWN_TEMPLATE,
    "continue_final_message": "the policy begins a new turn; end with a message of another role",
    "functions": "use `tools`",
    "function_call": "use `tools`",
    "mcp_servers": "there are tools of the client alone",
    "web_search_options": "there are tools of the client alone",
    "audio": "there is text only",
    "prediction": "leave it out",
    "conversation": "send the history, or `previous_response_id`",
    "prompt": _NOTHING_STORED,
    "background": _NOTHING_STORED,
}
_NO_MATTER: tuple[Any, ...] = (None, "", [], {}, False, {"type": "text"})
_OFF: dict[str, tuple[Any, ...]] = {"function_call": ("none",)}
"""Values that matter elsewhere, and not in these fields."""
DECIDED = (*FIXED, *_NEVER)
"""Fields of every interface that are refused, or the run's."""
_LONGEST_LABEL = 64
MOST_ENTRIES, MOST_TOOLS = 4_096, 1_024
"""Of a list in a request, and of its tools: reading more would hold up all episodes of an actor."""


class RequestError(Exception):
    """A request that is not answered. status: of HTTP; code: for programs."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be answered. messages: in one form; most_tokens: that the client wants;
    changed: settings that the client has and the run overrides; label: the model that it asks for;
    digest: of its body; retried: the client has sent it before.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    most_tokens: int | None = None
    stream: bool = False
    stream_usage: bool = False
    wants_logprobs: bool = False
    wants_ids: bool = False
    changed: tuple[str, ...] = ()
    label: str = ""
    digest: bytes = b""
    retried: bool = False
    chain: tuple[bytes, ...] = field(default=(), repr=False)
    """Digests of label, tools and the first 0, 1, 2 ... messages."""


def read(body: bytes) -> dict[str, Any]:
    """Read a body. Raises RequestError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "the body is no JSON") from error
    if not isinstance(found, dict):
        raise RequestError(400, "the body must be a JSON object")
    return found


def parse(
    body: bytes, *, sampling: Refusal, retried: bool = False, asked: dict[str, Any] | None = None
) -> ChatRequest:
    """Read a request. sampling: what happens to settings that are the run's; asked: the body as a
    chat request, where it is none. Raises RequestError.
    """
    found = read(body) if asked is None else asked
    for name, why in _NEVER.items():
        if found.get(name) not in (*_NO_MATTER, *_OFF.get(name, ())):
            raise RequestError(400, f"`{name}` is not possible: {why}")
    if found.get("n") not in (None, 1):
        raise RequestError(400, "`n` must be 1: send as many requests as you want answers")
    changed = tuple(name for name, plain in FIXED.items() if found.get(name) not in (None, *plain))
    if changed and sampling == "refuse":
        raise RequestError(
            400,
            f"the client sets {', '.join(changed)}, which the run decides (endpoint.sampling: "
            "refuse); leave them out",
        )
    label = found.get("model")
    if not isinstance(label, str) or not 0 < len(label) <= _LONGEST_LABEL:
        raise RequestError(400, f"`model` must be a name of at most {_LONGEST_LABEL} characters")
    messages = tuple(one_form(one, at) for at, one in enumerate(listed(found, "messages")))
    if not messages:
        raise RequestError(400, "`messages` is empty")
    if messages[-1]["role"] == "assistant":
        raise RequestError(400, "the last message is the assistant's: nothing asks for an answer")
    tools = tuple(_tools(found))
    options = found.get("stream_options")
    return ChatRequest(
        messages,
        tools,
        _most_tokens(found),
        bool(found.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
        bool(found.get("logprobs")),
        bool(found.get("return_token_ids")),
        changed,
        label,
        hasher(body).digest(),
        retried,
        tuple(chain(messages, tools, label)),
    )


def hasher(begin: bytes = b"") -> blake2b:
    """Begin the digest of a body."""
    return blake2b(begin, digest_size=16)


def chain(messages: Sequence[Message], tools: Sequence[Message], label: str) -> list[bytes]:
    """Digest label and tools, and after that message by message: equal beginnings are equal."""
    digests = [after(b"", [label, list(tools)])]
    for message in messages:
        digests.append(after(digests[-1], message))
    return digests


def after(before: bytes, message: Any) -> bytes:
    """Digest one more message."""
    return hasher(before + json.dumps(message, sort_keys=True).encode()).digest()


def listed(found: Mapping[str, Any], name: str, most: int = MOST_ENTRIES) -> list[Any]:
    """Return a list of a body; an empty one where there is none. Raises RequestError."""
    value = found.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(400, f"`{name}` must be a list")
    if len(value) > most:
        raise RequestError(400, f"`{name}` has {len(value):,} entries; send at most {most:,}")
    return value


def _most_tokens(found: Mapping[str, Any]) -> int | None:
    value = found.get("max_completion_tokens")
    value = found.get("max_tokens") if value is None else value
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(400, "`max_tokens` must be a number of at least 1")
    return value


def _tools(found: Mapping[str, Any]) -> list[Message]:
    tools = listed(found, "tools", MOST_TOOLS)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, "each of `tools` must be a function with a name")
    choice = found.get("tool_choice")
    if choice not in (None, "auto") and not (choice == "none" and not tools):
        raise RequestError(400, '`tool_choice` must be "auto": the policy decides what it calls')
    return tools


def one_form(found: Any, at: int = 0) -> Message:
    """Bring a message, or a turn of ours, into the form in which it is compared. `developer` is
    `system`. Raises RequestError.
    """
    if not isinstance(found, dict) or found.get("role") not in ROLES:
        raise RequestError(400, f"message {at}: `role` must be one of {', '.join(ROLES)}")
    role = "system" if found["role"] == "developer" else found["role"]
    message: Message = {
        "role": role,
        "content": text_of(found.get("content"), where=f"message {at}: "),
    }
    if role == "assistant":
        reasoning = found.get("reasoning_content") or found.get("reasoning")
        if reasoning:
            message["reasoning_content"] = _string(reasoning, f"message {at}: the reasoning")
        if found.get("tool_calls"):
            message["tool_calls"] = [_call(one, at) for one in listed(found, "tool_calls")]
    elif role == "tool":
        call = found.get("tool_call_id")
        if call is not None:
            message["tool_call_id"] = _string(call, f"message {at}: `tool_call_id`")
    if found.get("name"):
        message["name"] = _string(found["name"], f"message {at}: `name`")
    return message


def text_of(content: Any, kinds: Sequence[str] = ("text",), *, where: str = "") -> str:
    """Join text, or parts of text of these kinds. where: in what. Raises RequestError."""
    if content is None or isinstance(content, str):
        return _string(content or "", f"{where}`content`")
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            listed_kinds = " or ".join(kinds)
            raise RequestError(400, f"{where}content must be text, or parts of type {listed_kinds}")
        parts.append(_string(part.get("text"), f"{where}a part of `content`"))
    return "".join(parts)


def _call(found: Any, at: int) -> Message:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict):
        raise RequestError(400, f"message {at}: each of `tool_calls` must call a function")
    where = f"message {at}: a call's"
    return {
        "id": _string(found.get("id") or "", f"{where} id"),
        "type": "function",
        "function": {
            "name": _string(function.get("name"), f"{where} name"),
            "arguments": _arguments(_string(function.get("arguments") or "", f"{where} arguments")),
        },
    }


def _arguments(text: str) -> str:
    """Write arguments without the spaces that clients leave out or put in; their keys stay in
    order.
    """
    try:
        return json.dumps(json.loads(text), separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RequestError(400, f"{what} must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise RequestError(400, f"{what} is no valid Unicode") from error
    return value
