"""Chats as tokens: every renderer and our templates, tools in prompts, calls read out of turns."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from async_grpo.config.schema import Config
from async_grpo.environments.calculator import calculator
from async_grpo.environments.tools import TaskWithTools
from async_grpo.errors import SetupError
from async_grpo.rollout.chat_format import (
    ChatFormat,
    RendererFormat,
    Said,
    TemplateFormat,
    chat_format_of,
    parser_of,
    tool_call_reader,
)
from tests.support.chat_templates import HERMES, tokenizer_of
from tests.support.renderer_families import families, renderer_of_family
from tests.support.rollout_parts import Task

CONVERSATIONS = 2000
FAMILIES = families()
QWEN3_CODER = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["query"],
        },
    },
}
CALL = {"name": "search", "arguments": {"query": "new york", "limit": 3}}
WORDS = ["a word", "two\nlines", "\n", " spaces ", "<think>hm</think>so", "7 * 8", "", "über"]


def play(renderer: Any, tokenizer: Any, dice: random.Random, *, turns: int) -> tuple[int, int]:
    """Play a chat of random turns; turns that were followed by a suffix, and by a new row."""
    chat = RendererFormat(_Watched(renderer), tools=[TOOL])
    messages: list[Any] = [{"role": "user", "content": dice.choice(WORDS) or "?"}]
    tokens, suffixes, forks = chat.prompt(messages), 0, 0
    ends = list(renderer.get_stop_token_ids())
    for _ in range(turns):
        ids = tokenizer.encode(dice.choice(WORDS), add_special_tokens=False)
        ids += [dice.choice(ends)] if dice.random() < 0.8 or not ids else []
        if dice.random() < 0.5:
            ids = turn_with_call(renderer, chat)
        text = tokenizer.decode(ids[: -1 if ids[-1] in ends else None])
        said = chat.read(tokens, ids, text)
        new = [{"role": "user", "content": dice.choice(WORDS)}]
        if said.calls:
            answer = {"role": "tool", "name": "search", "content": dice.choice(WORDS)}
            new = [answer | {"tool_call_id": call.get("id", "1")} for call in said.calls]
        before, copy = [*tokens, *ids], json.dumps(new)
        more = chat.suffix(tokens, ids, said, new)
        assert json.dumps(new) == copy, "messages are left as they are"
        messages += [said.message(), *new]
        if more is None:
            forks += 1
            tokens = chat.prompt(messages)
        else:
            suffixes += 1
            tokens = [*before, *more]
            assert all(isinstance(token, int) for token in more)
    return suffixes, forks


def turn_with_call(renderer: Any, chat: RendererFormat) -> list[int]:
    """What the model would have sampled to make a call, as its family writes it."""
    asked = [{"role": "user", "content": "look"}]
    prompt, said = chat.prompt(asked), Said("", [CALL | {"id": "functions.search:0"}])
    plain = {"add_generation_prompt": False, "tools": [TOOL["function"]]}
    whole = list(renderer.render_ids([*asked, said.message()], **plain))
    begins = len(prompt)
    if whole[:begins] != prompt:  # thoughts stand in the one and not in the other
        begins = len(renderer.render_ids(asked, **plain))
    ends = renderer.get_stop_token_ids()
    while whole[-1] not in ends and any(token in ends for token in whole[begins:]):
        whole.pop()  # a line break behind the end
    return whole[begins:]


@pytest.mark.parametrize(
    "each", [10, pytest.param(-(-CONVERSATIONS // len(FAMILIES)), marks=pytest.mark.slow)]
)
def test_every_renderer_keeps_what_was_said_or_says_that_it_does_not(each: int) -> None:
    """By its own word: `suffix` compares whatever it returns with what stands before."""
    followed = {}
    for name in FAMILIES:
        renderer, tokenizer = renderer_of_family(name)
        dice = random.Random(name)
        counts = [play(renderer, tokenizer, dice, turns=dice.randint(1, 4)) for _ in range(each)]
        followed[name] = sum(suffixes for suffixes, _ in counts)
    assert len(followed) >= 25
    # its thoughts are taken away, so every turn begins a row
    assert [name for name, count in followed.items() if not count] == ["deepseek-r1"]


class _Watched:
    """A renderer whose bridges must keep what stands before; no fork hides one that does not."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def bridge_to_next_turn(self, prompt: list[int], ids: list[int], *more: Any, **options: Any):
        found = self._renderer.bridge_to_next_turn(prompt, ids, *more, **options)
        if found is not None:
            assert list(found.token_ids[: len(prompt) + len(ids)]) == [*prompt, *ids]
        return found


def test_a_bridge_that_changes_what_was_said_begins_a_row() -> None:
    class Wrong:
        def bridge_to_next_turn(self, prompt: list[int], ids: list[int], *_: Any, **__: Any) -> Any:
            return type("Found", (), {"token_ids": [*prompt, 9, *ids[1:], 5]})

    assert RendererFormat(Wrong()).suffix([1, 2], [3, 4], Said("x"), []) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_every_renderer_reads_the_calls_that_it_writes(name: str) -> None:
    renderer, tokenizer = renderer_of_family(name)
    chat = RendererFormat(renderer, tools=[TOOL])
    prompt = chat.prompt([{"role": "user", "content": "look"}])
    turn = turn_with_call(renderer, chat)
    found = chat.read(prompt, turn, tokenizer.decode(turn))
    without_id = [{key: one[key] for key in ("name", "arguments")} for one in found.calls]
    if name == "deepseek-r1":  # a model without tools
        assert without_id == []
    else:
        assert without_id == [CALL] and found.unreadable == "", (tokenizer.decode(turn), found)


def test_a_renderer_says_which_call_it_cannot_read() -> None:
    renderer, tokenizer = renderer_of_family("qwen3")
    chat = RendererFormat(renderer, tools=[TOOL])
    text = '<tool_call>\n{"name": "search", \n</tool_call><|im_end|>'
    found = chat.read([], tokenizer.encode(text, add_special_tokens=False), text)
    assert found.calls == [] and "invalid_json" in found.unreadable
    text = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call><|im_end|>'
    found = chat.read([], tokenizer.encode(text, add_special_tokens=False), text)
    assert [call["name"] for call in found.calls] == ["other"] and not found.unreadable


def hermes(**options: Any) -> tuple[ChatFormat, Any]:
    tokenizer = tokenizer_of("hermes")
    reader = tool_call_reader(tokenizer, [TOOL], parser_of(tokenizer, "auto"))
    return TemplateFormat(tokenizer, tools=[TOOL], reader=reader), tokenizer


def test_a_template_describes_tools_and_its_calls_are_read() -> None:
    chat, tokenizer = hermes()
    prompt = chat.prompt([{"role": "user", "content": "look"}])
    assert '"Look something up."' in tokenizer.decode(prompt)
    text = 'so\n<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    said = chat.read(prompt, ids, text)
    [call] = said.calls
    assert (call["name"], call["arguments"]) == ("search", {"query": "x"})
    assert said.content == "so\n" and said.unreadable == ""
    more = chat.suffix(prompt, ids, said, [{"role": "tool", "content": "found"}])
    assert more is not None
    assert tokenizer.decode([*prompt, *ids, *more]) == tokenizer.decode(
        chat.prompt(
            [
                {"role": "user", "content": "look"},
                said.message(),
                {"role": "tool", "content": "found"},
            ]
        )
    )


def test_a_call_that_a_parser_cannot_read_is_told() -> None:
    chat, _ = hermes()
    said = chat.read([], [1], "<tool_call>\n{broken</tool_call>")
    assert said.calls == [] and "cannot be read" in said.unreadable
    assert chat.read([], [1], "no call").unreadable == ""


def test_a_template_that_ends_calls_in_another_way_begins_a_row() -> None:
    tokenizer = tokenizer_of("other_end_of_calls")
    chat, new = TemplateFormat(tokenizer, tools=[TOOL]), [{"role": "tool", "content": "found"}]
    call = {"name": "search", "arguments": {}}
    assert chat.suffix([], [tokenizer.eos_token_id], Said("x", [call]), new) is None
    assert chat.suffix([], [tokenizer.eos_token_id], Said("x"), new) is not None


def test_the_response_template_of_a_tokenizer_comes_first() -> None:
    class Template:
        chat_template, response_template = HERMES, {"some": "template"}

        def parse_response(self, text: str, tools: Any) -> dict[str, Any]:
            if text == "broken":
                raise ValueError("no response")
            arguments = [1] if text == "list" else '{"query": "x"}'
            function = {"name": "search", "arguments": arguments}
            return {"content": None, "tool_calls": [{"function": function}]}

    assert parser_of(Template(), "auto") is None
    assert parser_of(Template(), "hermes") == "hermes"
    reader = tool_call_reader(Template(), [TOOL], None)
    assert reader("text").calls == [{"name": "search", "arguments": {"query": "x"}}]
    assert "no JSON object" in reader("list").unreadable
    assert reader("broken").unreadable == "no response"


class _Tokenizer:
    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template


@pytest.mark.parametrize(
    ("template", "parser"), [(HERMES, "hermes"), (QWEN3_CODER, "qwen3_coder"), ("<arg_key>", None)]
)
def test_known_templates_have_a_parser_and_others_need_one_by_name(
    template: str, parser: str | None
) -> None:
    if parser is not None:
        assert parser_of(_Tokenizer(template), "auto") == parser
        return
    with pytest.raises(SetupError, match=r"environment\.tool_parser"):
        parser_of(_Tokenizer(template), "auto")


def config_of(**environment: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "task": {"name": "gsm8k"},
            "environment": environment,
        }
    )


TASK = TaskWithTools(Task(), {"calculator": calculator}, [])  # type: ignore[arg-type]


def test_a_renderer_is_taken_where_it_knows_the_model() -> None:
    _, tokenizer = renderer_of_family("qwen3")
    found = chat_format_of(config_of(), tokenizer, TASK)
    assert isinstance(found, RendererFormat)
    text = tokenizer.decode(found.prompt([{"role": "user", "content": "?"}]))
    assert "Calculate an arithmetic expression" in text


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, RendererFormat),
        ({"renderer": "template"}, TemplateFormat),
        ({"tool_parser": "hermes"}, TemplateFormat),
        ({"renderer": "prime-qwen3"}, RendererFormat),
    ],
)
def test_settings_choose_the_format(environment: dict[str, str], kind: type) -> None:
    _, tokenizer = renderer_of_family("qwen3")
    tokenizer.chat_template = HERMES
    assert isinstance(chat_format_of(config_of(**environment), tokenizer, TASK), kind)


def test_names_that_nobody_knows_are_refused() -> None:
    _, tokenizer = renderer_of_family("qwen3")
    tokenizer.chat_template = HERMES
    with pytest.raises(SetupError, match=r"environment\.renderer.*'qwen9'"):
        chat_format_of(config_of(renderer="qwen9"), tokenizer, TASK)
    with pytest.raises(SetupError, match=r"'hermess', which vLLM does not know; it has .*hermes"):
        chat_format_of(config_of(tool_parser="hermess"), tokenizer, TASK)
    # the driver does not import vLLM
    assert chat_format_of(config_of(tool_parser="hermess"), tokenizer, TASK, reads=False)


def test_a_task_of_text_needs_no_format() -> None:
    assert chat_format_of(config_of(renderer="template"), _Tokenizer(None), Task()) is None  # type: ignore[arg-type]
