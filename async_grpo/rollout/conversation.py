"""What is said in one episode, as text or as chat messages, and the tokens of it.

Runs in: rollout actors. Hides whether an episode is a chat: the first prompt is rendered whole, and
what the environment says later as a suffix of what stands there (`chat_format`), or as plain text.
Invariant: what was sampled is never rendered again; where a chat would have to be, the caller is
told to begin a new row with `whole`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_grpo.environments.base import Content
from async_grpo.rollout.chat_format import ChatFormat, Message, Said
from async_grpo.tasks.base import Prompt
from async_grpo.tasks.chat import prompt_ids


class ContentError(ValueError):
    """An environment's content cannot follow this kind of prompt."""


class Conversation:
    """One episode's messages or text."""

    def __init__(
        self, tokenizer: Any, prompt: Prompt, first: Content, *, chat: ChatFormat | None
    ) -> None:
        """first: what the environment says before the first turn. chat: of prompts that are
        messages. Raises ContentError.
        """
        self._tokenizer = tokenizer
        self._chat = None if isinstance(prompt, str) else chat
        self._messages: list[Message] = []
        if isinstance(prompt, str):
            text = first if isinstance(first, str) else ""
            self.prompt_ids = prompt_ids(tokenizer, prompt + text)
            if first and not isinstance(first, str):
                self.prompt_ids += self._plain(first)
        else:
            self._messages += [*prompt, *self._new(first)]
            self.prompt_ids = self.whole()

    def whole(self) -> list[int]:
        """Render all messages so far, for another row. Raises ContentError where the template
        refuses them.
        """
        assert self._chat is not None
        try:
            return self._chat.prompt(self._messages)
        except Exception as error:  # templates are programs, and some refuse an order of roles
            raise ContentError(f"the chat template refuses the messages: {error}") from error

    def read(self, prompt: Sequence[int], ids: Sequence[int], text: str) -> Said:
        """Understand the turn `ids` behind the tokens `prompt`; text: of it, without the token that
        ended it.
        """
        if self._chat is None:
            return Said(text)
        try:
            return self._chat.read(prompt, ids, text)
        except Exception as error:  # noqa: BLE001 - of a parser, for something that the policy said
            return Said(text, unreadable=f"the turn cannot be read: {error}"[:200])

    def follow(
        self, prompt: Sequence[int], ids: Sequence[int], said: Said, content: Content
    ) -> list[int] | None:
        """Return the context that follows the turn `ids`; None where what stands before it would
        have to change. Raises ContentError.
        """
        if self._chat is None:
            return self._plain(content)
        if content and isinstance(content, list) and isinstance(content[0], int):
            return self._plain(content)
        new = self._new(content)
        self._messages += [said.message(), *new]
        try:
            return self._chat.suffix(prompt, ids, said, new)
        except Exception:  # noqa: BLE001 - then nothing is proven; `whole` says why, if it fails too
            return None

    def _plain(self, content: Content) -> list[int]:
        if isinstance(content, str):
            found = self._tokenizer(content, add_special_tokens=False) if content else {}
            return list(found.get("input_ids", []))
        if not all(isinstance(token, int) for token in content):
            raise ContentError(
                "an environment gave chat messages, but the problem's prompt is a text; let the "
                "task pose messages, or the environment answer with text"
            )
        return list(content)  # type: ignore[arg-type]

    def _new(self, content: Content) -> list[Message]:
        if isinstance(content, str):
            return [{"role": "user", "content": content}] if content else []
        if not all(isinstance(message, dict) for message in content):
            raise ContentError("an environment gave token ids before the first turn of a chat")
        return list(content)  # type: ignore[arg-type]
