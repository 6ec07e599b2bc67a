"""Why a request begins a row: what its client has made of the conversations that are known.

Runs in: rollout actors. Hides how a request is compared with what was asked and said before; the
first of these that is so:

    label      it goes on from a turn that another `model` was given
    tools      it has other tools than the conversation had
    branch     all of it is known, or only a question is new behind a turn: a draft, or a subagent
    shortened  messages are left out, the others are as they were
    reasoning, calls, edited    the first message that is another one lacks its reasoning, has its
                                calls in other words, or is another one

Invariant: "" is the first request of a conversation: nothing but rules (`system`) is known of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.agents.endpoint.messages import ChatRequest
from async_grpo.rollout.chat_format import Message


@dataclass(frozen=True)
class KnownConversation:
    """A conversation as it was asked about, or with its answer."""

    label: str
    tools: tuple[Message, ...]
    messages: tuple[Message, ...]

    def nearness(self, request: ChatRequest) -> tuple[int, bool, bool, int]:
        """Order conversations by how much of them a request has."""
        same = shared(request.messages, self.messages)
        return same, self.label == request.label, self.tools == request.tools, len(self.messages)


def shared(mine: Sequence[Message], theirs: Sequence[Message]) -> int:
    """Count the equal messages that two conversations begin with."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(mine), len(theirs)))


def why(request: ChatRequest, known: Sequence[KnownConversation]) -> str:
    """Say why a request does not go on where a known conversation ends."""
    nearest = max(known, key=lambda one: one.nearness(request), default=None)
    if nearest is None:
        return ""
    same = shared(request.messages, nearest.messages)
    before, mine, theirs = request.messages[:same], request.messages[same:], nearest.messages[same:]
    if nearest.label != request.label:
        return "label" if _has_turn(before) else ""
    turns = [one for one in theirs if one["role"] == "assistant"]
    if all(one["role"] == "system" for one in before) and not any(one in turns for one in mine):
        return ""
    if nearest.tools != request.tools:
        return "tools"
    if not mine or not theirs:
        return "branch"
    if _are_left(mine[:-1] or mine, theirs):
        return "shortened"
    if _has_turn(before[-1:]) and not _has_turn(mine):
        return "branch"
    return _difference(mine[0], theirs[0])


def _has_turn(messages: Sequence[Message]) -> bool:
    return any(one["role"] == "assistant" for one in messages)


def _are_left(kept: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """Whether these messages stand among others, in their order."""
    others = iter(theirs)
    return all(one in others for one in kept)


def _difference(new: Message, old: Message) -> str:
    """Name what a client has made of a message."""
    if new["role"] != old["role"]:
        return "edited"
    if "reasoning_content" in old and "reasoning_content" not in new:
        return "reasoning"
    if len(new.get("tool_calls", ())) == len(old.get("tool_calls", ())) > 0:
        return "calls"
    return "edited"
