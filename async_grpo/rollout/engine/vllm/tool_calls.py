"""vLLM's parsers of tool calls.

Runs in: rollout actors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from async_grpo.errors import SetupError


def parser_for(template: str) -> str | None:
    """Name the parser for a chat template; None where none is known."""
    if "<tool_call>" in template and "<function=" in template:
        return "qwen3_coder"
    return "hermes" if "<tool_call>" in template and "<arg_key>" not in template else None


def call_reader(
    parser: str, tokenizer: Any, tools: Sequence[dict[str, Any]]
) -> Callable[[str], tuple[str, list[dict[str, Any]], str]]:
    """Return what reads a turn: content, calls, and what is wrong with one that cannot be read.
    Raises SetupError for a parser that there is not, or that does not fit the tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        kind = ToolParserManager.get_tool_parser(parser)
    except KeyError as error:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise SetupError(
            f"`environment.tool_parser` is {parser!r}, which vLLM does not know; it has {known}"
        ) from error
    request = ChatCompletionRequest(messages=[], tools=list(tools))
    try:
        made = kind(tokenizer, request.tools)
    except Exception as error:
        raise SetupError(
            f"`environment.tool_parser` {parser!r} does not fit this model: {error}"
        ) from error
    begin = getattr(made, "tool_call_start_token", None)

    def read(text: str) -> tuple[str, list[dict[str, Any]], str]:
        found = made.extract_tool_calls(text, request)
        if not found.tools_called:
            begun = isinstance(begin, str) and begin and begin in text
            return text, [], "a tool call cannot be read" if begun else ""
        calls = [
            {
                "id": call.id,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in found.tool_calls
        ]
        return found.content or "", calls, ""

    return read
