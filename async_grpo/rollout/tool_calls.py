"""Reads calls of tools out of what the policy said.

Runs in: rollout actors. Hides vLLM's tool parsers and the `response_template` of a tokenizer.
Invariant: what cannot be read is never guessed: it is content, or said to be unreadable.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_grpo.errors import SetupError


@dataclass(frozen=True)
class ReadTurn:
    """Content beside calls; calls with `name`, `arguments` and perhaps `id`; what is wrong with
    one that cannot be read.
    """

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    unreadable: str = ""


class ToolCallReader(Protocol):
    """Reads the tool calls of one turn."""

    def read(self, text: str, ids: Sequence[int]) -> ReadTurn:
        """Read a turn: text with its special tokens, without the one that ended it; its ids."""


def parser_of(tokenizer: Any, wanted: str) -> str | None:
    """Return the parser of vLLM that `environment.tool_parser` means; None for the tokenizer's own
    `response_template`. Raises SetupError where `auto` finds none.
    """
    if wanted != "auto":
        return wanted
    if getattr(tokenizer, "response_template", None):
        return None
    template = str(tokenizer.chat_template)
    if "<tool_call>" in template and "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "hermes"
    raise SetupError(
        "there are tools, but nothing here says how this model writes tool calls: set "
        "`environment.tool_parser` to a parser of vLLM, for example hermes or llama3_json "
        "(docs/agents.md), and use a model whose chat template knows tools"
    )


def tool_call_reader(
    tokenizer: Any, tools: Sequence[dict[str, Any]], parser: str | None
) -> ToolCallReader:
    """Return a reader; parser: of `parser_of`. Raises SetupError for one that there is not."""
    if parser is None:
        return _ByTemplate(tokenizer, tools)
    return _ByParser(tokenizer, tools, parser)


class _ByTemplate:
    """The tokenizer's own `response_template`."""

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)

    def read(self, text: str, ids: Sequence[int]) -> ReadTurn:
        try:
            found = self._tokenizer.parse_response(text, tools=self._tools)
        except ValueError as error:
            return ReadTurn(text, [], f"{error}"[:200])
        return _made(found.get("content") or "", found.get("tool_calls") or [])


class _ByParser:
    """One of vLLM's parsers."""

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]], name: str) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            kind = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise SetupError(
                f"`environment.tool_parser` is {name!r}, which vLLM does not know; it has {known}"
            ) from error
        self._request = ChatCompletionRequest(messages=[], tools=list(tools))
        try:
            self._parser = kind(tokenizer, self._request.tools)
        except Exception as error:
            raise SetupError(
                f"`environment.tool_parser` {name!r} does not fit this model: {error}"
            ) from error
        begin = getattr(self._parser, "tool_call_start_token", None)
        self._begin = begin if isinstance(begin, str) and begin else None

    def read(self, text: str, ids: Sequence[int]) -> ReadTurn:
        found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            begun = self._begin is not None and self._begin in text
            return ReadTurn(text, [], "a tool call cannot be read" if begun else "")
        calls = [
            {"id": call.id, "function": {"name": one.name, "arguments": one.arguments}}
            for call in found.tool_calls
            for one in [call.function]
        ]
        return _made(found.content or "", calls)


def _made(content: str, calls: Sequence[dict[str, Any]]) -> ReadTurn:
    """Bring calls as the chat interfaces write them into our form."""
    read, wrong = [], ""
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = None
        if isinstance(arguments, dict) and isinstance(function.get("name"), str):
            one = {"name": function["name"], "arguments": arguments}
            read.append(one | ({"id": call["id"]} if call.get("id") else {}))
        else:
            wrong = f"the arguments of {function.get('name')!r:.60} are no JSON object"
    return ReadTurn(content, read, wrong)
