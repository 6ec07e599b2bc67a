"""What an episode's messages are as tokens: the first prompt whole, later ones as a suffix.

Runs in: rollout actors. Hides chat templates. A template renders whole conversations; an episode
must never render again what was sampled. So new messages are rendered behind a short conversation
that ends with the policy's turn, and only what is added counts:

    render([user, turn])        = head turn tail
    render([user, turn, *new])  = head turn tail more         -> the tokens of: tail more

Invariants: a suffix is given only if the template keeps what stands before it, with the turn as the
policy has said it and with another one, and adds the same behind both; otherwise the caller is told
to begin a new row with `whole`.
"""

from __future__ import annotations

from typing import Any

from async_grpo.environments.base import Content
from async_grpo.tasks.base import Prompt
from async_grpo.tasks.chat import prompt_ids

Message = dict[str, Any]
_STAND_IN = "stand-in"
_ASKED: Message = {"role": "user", "content": "?"}


class ContentError(ValueError):
    """An environment's content cannot follow this kind of prompt."""


class Conversation:
    """One episode's messages or text."""

    def __init__(self, tokenizer: Any, prompt: Prompt, first: Content) -> None:
        """first: what the environment says before the first turn. Raises ContentError."""
        self._tokenizer = tokenizer
        self._messages: list[Message] | None = None if isinstance(prompt, str) else list(prompt)
        if isinstance(prompt, str):
            text = first if isinstance(first, str) else ""
            self.prompt_ids = prompt_ids(tokenizer, prompt + text)
            if first and not isinstance(first, str):
                self.prompt_ids += self._plain(first)
        else:
            self._messages += self._new(first)
            self.prompt_ids = prompt_ids(tokenizer, self._messages)

    def whole(self) -> list[int]:
        """Render all messages so far, for another row."""
        return prompt_ids(self._tokenizer, self._messages)

    def follow(self, said: str, last: int, content: Content) -> list[int] | None:
        """Return the context that follows the turn `said`, whose last token is `last`; None where
        the template would change what stands before it. Raises ContentError.
        """
        if self._messages is None:
            return self._plain(content)
        if content and isinstance(content, list) and isinstance(content[0], int):
            return self._plain(content)
        turn, new = {"role": "assistant", "content": said}, self._new(content)
        self._messages += [turn, *new]
        added = self._added(turn, new)
        if added is None or added != self._added(turn | {"content": _STAND_IN}, new):
            return None
        tail = self._render([_ASKED, turn | {"content": _STAND_IN}]).rpartition(_STAND_IN)[2]
        ids = self._ids(tail + added)
        return ids[1:] if ids and ids[0] == last else ids

    def _added(self, turn: Message, new: list[Message]) -> str | None:
        base = self._render([_ASKED, turn])
        whole = self._render([_ASKED, turn, *new], generate=True)
        return whole[len(base) :] if whole.startswith(base) else None

    def _render(self, messages: list[Message], *, generate: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _plain(self, content: Content) -> list[int]:
        if isinstance(content, str):
            return self._ids(content)
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
