"""How chat messages become tokens, and what the policy says becomes a message again.

Runs in: rollout actors. Hides chat templates, the package `renderers`, and where tools stand in a
prompt. There are two formats: `TemplateFormat` for any model with a chat template, and
`RendererFormat` for those that `renderers` knows.

    messages -> prompt ids;    a turn's ids -> Said;    new messages -> suffix ids, or None

Invariant: a suffix is given only where what stands before it is sure to stay as it was sampled;
otherwise None, and the episode goes on in a new row. A tool call that cannot be read is never
guessed: it is content, or said to be unreadable.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_grpo.config.schema import Config
from async_grpo.environments.tools import TaskWithTools
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.tasks.base import Task
from async_grpo.tasks.chat import prompt_ids

Message = dict[str, Any]
_STAND_IN = "stand-in"
_CALLED = ("ok", "unknown_tool")
"""States in which a call can be made, or refused by name."""
_ASKED: Message = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Said:
    """One turn as a message: its content without calls, calls of tools, and why one of them cannot
    be read.
    """

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    unreadable: str = ""
    reasoning: str | None = None

    def message(self) -> Message:
        """Return the turn as templates know it."""
        found: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {"type": "function"}
                | ({"id": call["id"]} if call.get("id") else {})
                | {"function": {"name": call["name"], "arguments": call["arguments"]}}
                for call in self.calls
            ]
        return found


class ChatFormat(Protocol):
    """One model's way to write conversations down."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Render a whole conversation, up to where the policy speaks."""

    def read(self, prompt: Sequence[int], ids: Sequence[int], text: str) -> Said:
        """Understand a turn. ids: as sampled; text: of them, without the token that ended it."""

    def suffix(
        self, prompt: Sequence[int], ids: Sequence[int], said: Said, new: Sequence[Message]
    ) -> list[int] | None:
        """Render what follows the turn `ids` behind `prompt` up to where the policy speaks again;
        None where it cannot be proven that what stands before stays.
        """


class TemplateFormat:
    """The chat template of the model's tokenizer. New messages are rendered behind a short
    conversation that ends with the policy's turn, and only what is added counts:

        render([user, turn])        = head turn tail
        render([user, turn, *new])  = head turn tail more         -> the tokens of: tail more

    The template must keep what stands before the new messages, with the turn as the policy has said
    it and with another one, and must add the same behind both.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[dict[str, Any]] = (),
        reader: Callable[[str], Said] | None = None,
    ) -> None:
        """reader: of tool calls, where there are tools."""
        self._tokenizer, self._reader = tokenizer, reader
        self._tools = list(tools) or None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.prompt`."""
        return list(
            self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        )

    def read(self, prompt: Sequence[int], ids: Sequence[int], text: str) -> Said:
        """See `ChatFormat.read`."""
        return Said(text) if self._reader is None else self._reader(text)

    def suffix(
        self, prompt: Sequence[int], ids: Sequence[int], said: Said, new: Sequence[Message]
    ) -> list[int] | None:
        """See `ChatFormat.suffix`."""
        turn = said.message()
        added = self._added(turn, new)
        if added is None or added != self._added(turn | {"content": _STAND_IN}, new):
            return None
        plain = self._render([_ASKED, {"role": "assistant", "content": _STAND_IN}])
        tail = plain.rpartition(_STAND_IN)[2]
        if not self._render([_ASKED, turn]).endswith(tail):
            return None  # a turn with calls ends in another way
        text = tail + added
        found = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return list(found[1:] if found and found[0] == ids[-1] else found)

    def _added(self, turn: Message, new: Sequence[Message]) -> str | None:
        base = self._render([_ASKED, turn])
        whole = self._render([_ASKED, turn, *new], generate=True)
        return whole[len(base) :] if whole.startswith(base) else None

    def _render(self, messages: list[Message], *, generate: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=self._tools, tokenize=False, add_generation_prompt=generate
        )


class RendererFormat:
    """A renderer of the package `renderers`, which knows the model's family."""

    def __init__(self, renderer: Any, *, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._renderer = renderer
        self._tools = [tool.get("function", tool) for tool in tools] or None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.prompt`."""
        return list(
            self._renderer.render_ids(list(messages), tools=self._tools, add_generation_prompt=True)
        )

    def read(self, prompt: Sequence[int], ids: Sequence[int], text: str) -> Said:
        """See `ChatFormat.read`."""
        found = self._renderer.parse_response(list(ids), tools=self._tools, prompt_ids=list(prompt))
        right = [call for call in found.tool_calls if call.status in _CALLED]
        wrong = [call for call in found.tool_calls if call.status not in _CALLED]
        return Said(
            found.content,
            [
                {"name": call.name, "arguments": call.arguments or {}}
                | ({"id": call.id} if call.id else {})
                for call in right
            ],
            f"a tool call cannot be read ({wrong[0].status})" if wrong else "",
            found.reasoning_content,
        )

    def suffix(
        self, prompt: Sequence[int], ids: Sequence[int], said: Said, new: Sequence[Message]
    ) -> list[int] | None:
        """See `ChatFormat.suffix`."""
        before = [*prompt, *ids]
        found = self._renderer.bridge_to_next_turn(
            list(prompt), list(ids), copy.deepcopy(list(new)), tools=self._tools
        )
        if found is None or list(found.token_ids[: len(before)]) != before:
            return None
        return list(found.token_ids[len(before) :])


class PlainFormat:
    """Of a tokenizer without a chat template: what is said, one after the other."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.prompt`."""
        return prompt_ids(self._tokenizer, "".join(one["content"] for one in messages))

    def read(self, prompt: Sequence[int], ids: Sequence[int], text: str) -> Said:
        """See `ChatFormat.read`."""
        return Said(text)

    def suffix(
        self, prompt: Sequence[int], ids: Sequence[int], said: Said, new: Sequence[Message]
    ) -> list[int] | None:
        """See `ChatFormat.suffix`."""
        text = "".join(one["content"] for one in new)
        found = self._tokenizer(text, add_special_tokens=False) if text else {}
        return list(found.get("input_ids", []))


def chat_format_of(
    config: Config, tokenizer: Any, task: Task, *, reads: bool = True
) -> ChatFormat | None:
    """Return how a task's chats are written; None for a task that poses text to a tokenizer without
    a chat template. reads: whether turns will be read, for which the engine's library may be
    imported. Raises SetupError for a renderer or a parser that there is not, and where none is
    known.
    """
    tools = task.tools if isinstance(task, TaskWithTools) else []
    return chat_format_with(config, tokenizer, tools, reads=reads)


def chat_format_with(
    config: Config, tokenizer: Any, tools: Sequence[dict[str, Any]], *, reads: bool = True
) -> ChatFormat | None:
    """Return how chats with these tools are written; see `chat_format_of`."""
    settings = config.environment
    named = _renderer(tokenizer, str(config.model.path), settings.renderer)
    if named is not None and (not tools or settings.tool_parser == "auto"):
        return RendererFormat(named, tools=tools)
    if tokenizer.chat_template is None:
        return None
    reader = None
    if tools:
        parser = parser_of(tokenizer, settings.tool_parser)
        reader = tool_call_reader(tokenizer, tools, parser) if reads else None
    return TemplateFormat(tokenizer, tools=tools, reader=reader)


def parser_of(tokenizer: Any, wanted: str) -> str | None:
    """Return the engine's parser that `environment.tool_parser` means; None for the tokenizer's own
    `response_template`. Raises SetupError where `auto` finds none.
    """
    if wanted != "auto":
        return wanted
    if getattr(tokenizer, "response_template", None):
        return None
    if parser := ENGINE.parser_for(str(tokenizer.chat_template)):
        return parser
    raise SetupError(
        "the task has tools, but the format of this model's tool calls is unknown: set "
        f"`environment.tool_parser` to a parser of {ENGINE.name}, for example hermes or "
        "llama3_json (docs/how-to/tools-and-environments.md), and use a model whose chat template "
        "knows tools"
    )


def tool_call_reader(
    tokenizer: Any, tools: Sequence[dict[str, Any]], parser: str | None
) -> Callable[[str], Said]:
    """Return what reads the text of a turn, with its special tokens but the one that ended it.
    parser: of `parser_of`. Raises SetupError for one that there is not.
    """
    if parser is not None:
        parse = ENGINE.call_reader(parser, tokenizer, tools)
        return lambda text: _said(*parse(text))

    def read(text: str) -> Said:
        try:
            found = tokenizer.parse_response(text, tools=list(tools))
        except ValueError as error:
            return Said(text, [], f"{error}"[:200])
        return _said(found.get("content") or "", found.get("tool_calls") or [])

    return read


def _said(content: str, calls: Sequence[dict[str, Any]], wrong: str = "") -> Said:
    """Bring calls as the chat interfaces write them into our form."""
    read = []
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
    return Said(content, read, wrong)


def _renderer(tokenizer: Any, model: str, wanted: str) -> Any:
    """Return a renderer of `renderers`, or None for the template."""
    if wanted == "template":
        return None
    try:
        import renderers.base as library
        from renderers.configs import config_from_name
    except ModuleNotFoundError as error:
        if wanted == "auto":
            return None
        raise SetupError(
            f"`environment.renderer` is {wanted!r}, but the package `renderers` is not installed "
            "(docs/how-to/tools-and-environments.md says how)"
        ) from error
    name = library.MODEL_RENDERER_MAP.get(model) if wanted == "auto" else wanted
    if name is None:
        return None
    try:
        return library.create_renderer(tokenizer, config_from_name(name))
    except Exception as error:
        raise SetupError(f"`environment.renderer` {name!r} cannot be used: {error}") from error
