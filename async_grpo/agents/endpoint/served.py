"""One episode whose turns are asked for over HTTP: which request goes on from which turn.

Runs in: rollout actors. Hides the tree of what was said:

    request: messages 1 .. n  --longest known beginning--> a turn of ours
        behind it, where nothing else stands yet            -> its row goes on, by a suffix
        behind it, where something else stands already      -> a row that begins with its tokens
        no turn of ours, or a suffix that cannot be proven  -> a row that begins with a new prompt

The `model` that a client asks for is a label: what one label was given is no beginning for another.
A row that begins with tokens of another one has them as its prompt, so that each sampled token is
trained once. A turn that its client never read (it went away) belongs to no row in the end.

Invariants: what was sampled or fed is never rendered again; a request that is repeated is one turn;
the limits are those of episodes (`episodes.turn_room`). Two requests at once may not use more than
is left of `rollout.response_length`: the second one waits where the first may need all of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_grpo.agents.endpoint.forks import KnownConversation, why
from async_grpo.agents.endpoint.messages import ChatRequest, RequestError, after, one_form
from async_grpo.config.schema import RolloutConfig
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.rollout.chat_format import ChatFormat, Message, Said
from async_grpo.rollout.engine.base import Completion, EngineError, Sampling
from async_grpo.rollout.episodes import Episode, turn_room

Sample = Callable[[list[int], Sampling], Awaitable[Completion]]
Formats = Callable[[Sequence[Message]], ChatFormat]
USED_UP = "context_length_exceeded"
OWED_S = 10.0
"""How long a retry is waited for that is a turn of its own: SDKs wait 8 s at most."""


@dataclass(eq=False)
class ServedTurn:
    """A turn of ours: its number; where it stands in its row, and how it was understood; why it
    began a row, "" where it did not, or was the first of its conversation; who asked; the number of
    the turn behind which it was asked; whether a client has it.
    """

    number: int
    row: int
    begin: int
    end: int
    said: Said
    forked: str = ""
    label: str = ""
    parent: int | None = None
    read: bool = False


@dataclass(frozen=True, eq=False)
class Reply:
    """A turn, as a client gets it. prompt: tokens before it."""

    message: Message
    done: Completion
    prompt: list[int]
    turn: ServedTurn


@dataclass(eq=False)
class _Asked:
    """A request, the clients that wait for its answer, and the turn that one of them was given."""

    task: asyncio.Task[Reply]
    waiting: int = 0
    turn: ServedTurn | None = None

    @property
    def left(self) -> bool:
        """Whether its clients went away before there was an answer."""
        return not self.waiting and self.turn is None

    @property
    def read(self) -> bool:
        """Whether a client has its answer."""
        return self.turn is not None and self.turn.read


@dataclass(frozen=True)
class _Place:
    """Where an answer goes: behind `ids` in a row, or in a new row with the prompt `ids`, and why;
    the turn from which it goes on.
    """

    row: int | None
    ids: list[int]
    forked: str = ""
    parent: ServedTurn | None = None


@dataclass(frozen=True)
class _Begun:
    """A turn that is sampled: its number, its place with its row, and the tokens before it."""

    number: int
    place: _Place
    row: int
    before: list[int]


class ServedEpisode:
    """Answers the requests of one episode."""

    def __init__(
        self,
        rollout: RolloutConfig,
        episode: Episode,
        *,
        sample: Sample,
        formats: Formats,
        text: Callable[[Sequence[int]], str],
        sampling: Sampling,
        counts: Counter[str],
    ) -> None:
        """sample: a turn behind these tokens. formats: by tools, or RequestError. text: of a turn,
        with its special tokens, without the one that ended it.
        """
        self._rollout, self.episode = rollout, episode
        self._sample, self._sampling = sample, sampling
        self._formats, self._text = formats, text
        self._counts = counts
        self._refused: dict[str, tuple[str, int]] = {}
        """By label, the limit for which its newest request was refused, as a finish reason, and the
        turns that had begun by then; until it has a turn that began later.
        """
        self._last_refused = "", 0
        """The same of the newest request, until anybody has a later turn."""
        self.refusal = ""
        """What was said to the newest request that was refused for a limit."""
        self.open = 0
        """Requests that wait for their answer."""
        self._behind: dict[bytes, ServedTurn] = {}
        """The newest turn behind each beginning."""
        self.turns: list[ServedTurn] = []
        """All, in the order of their ends."""
        self._asked: dict[bytes, list[_Asked]] = {}
        """By body, in order: the requests that no client has read, and the newest one."""
        self._owed: deque[tuple[float, bytes]] = deque()
        """Retries that are to come, and are turns of their own: since when, and of which body. Of a
        client that was refused a place, or whose answer another client has taken.
        """
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._closed = False
        self.failure: Exception | None = None
        """What was no client's fault: nothing of the episode may be scored."""
        self._known: list[KnownConversation] = []
        """What was asked, and each turn behind it."""
        self._busy: set[int] = set()
        self._reserved = self._begun = 0
        self._ended = asyncio.Event()

    @property
    def used_up(self) -> str:
        """Return the limit for which a program may fail, as a finish reason: a label's newest
        request was refused for it, and that label has had no turn since, from a shortened history
        for example. "" where there is none. Behind `length` and `max_turns` there is no later turn.
        """
        return next((reason for reason, _ in reversed(self._refused.values())), "")

    @property
    def last_word(self) -> str:
        """Return the limit that has ended the episode: nobody has had a turn since a request was
        refused for it, which counts where the program has ended well, too.
        """
        return self._last_refused[0]

    async def answer(self, request: ChatRequest) -> Reply:
        """Answer a request. Cancelled, it goes on: its client may send it again. Raises
        RequestError, EngineError, EnvironmentFailed.
        """
        if self._closed:
            raise RequestError(401, "this episode has ended", code="key")
        asked = self._repeated(request) or self._new(request)
        asked.waiting += 1
        self.open += 1
        try:
            reply = await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1
            self.open -= 1
        asked.turn = reply.turn
        return reply

    def note_refused(self, digest: bytes, *, retried: bool) -> None:
        """Note a request with this body that was refused a place: its client sends it again, and
        then it is a turn of its own. One that is refused once more is waited for anew.
        """
        self._drop_owed()
        if not retried or self._take_owed(digest):
            self._owed.append((time.monotonic(), digest))

    def _take_owed(self, digest: bytes) -> bool:
        """Strike a retry with this body off those to come; whether there was one."""
        self._drop_owed()
        found = next((one for one in self._owed if one[1] == digest), None)
        if found is not None:
            self._owed.remove(found)
        return found is not None

    def _drop_owed(self) -> None:
        """Wait no longer for clients that have given up."""
        while self._owed and time.monotonic() - self._owed[0][0] > OWED_S:
            self._owed.popleft()

    def _repeated(self, request: ChatRequest) -> _Asked | None:
        """Return the request of which this one is a repetition; None for a turn of its own. Equal
        drafts are told apart: each is repeated once, the one whose clients went away first. Where
        it is in doubt which client has come, it is a repetition: no turn is trained twice.
        """
        known = self._asked.get(request.digest, [])
        unread = [one for one in known if not one.read]
        left = next((one for one in unread if one.left), None)
        if left is not None:
            if not request.retried:
                self._owed.append((time.monotonic(), request.digest))
            return left
        if not request.retried or self._take_owed(request.digest):
            return None
        newest = known[-1] if known else None
        return min(unread, key=lambda one: one.waiting, default=newest)

    def _new(self, request: ChatRequest) -> _Asked:
        asked = _Asked(asyncio.ensure_future(self._contained(request)))
        unread = [one for one in self._asked.get(request.digest, ()) if not one.read]
        self._asked[request.digest] = [*unread, asked]
        self._tasks.add(asked.task)
        asked.task.add_done_callback(lambda task: self._answered(request.digest, task))
        return asked

    def _answered(self, digest: bytes, task: asyncio.Task[Reply]) -> None:
        """Forget a request that failed, and keep why, if no client can have caused it."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is None:
            return
        others = [one for one in self._asked.pop(digest, ()) if one.task is not task]
        if others:
            self._asked[digest] = others
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, RequestError):
            self.failure = self.failure or error

    async def close(self) -> None:
        """End all requests, and take out the turns that nobody has read."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for turn in self.turns:
            if not turn.read:  # nothing stands behind it: nobody knew it
                self.episode.session.forget(turn.row)
                self._counts["turns_unread"] += 1

    async def _contained(self, request: ChatRequest) -> Reply:
        """Answer a request; what nobody has foreseen is a failure of this episode alone."""
        try:
            return await self._answer(request)
        except (RequestError, EngineError, EnvironmentFailed):
            raise
        except Exception as error:
            why = f"a request cannot be answered: {type(error).__name__}: {error}"
            raise EnvironmentFailed("answer", why) from error

    async def _answer(self, request: ChatRequest) -> Reply:
        chat = self._formats(request.tools)
        place, room = await self._take_place(request, chat)
        begun = self._begin(request, place)
        self._busy.add(begun.row)
        self._reserved += room
        seed = self._sampling.seed
        seed = None if seed is None else (seed + begun.number) % 2**63
        try:
            wanted = replace(self._sampling, n=1, max_tokens=room, seed=seed)
            done = await self._sample(begun.before, wanted)
        finally:
            self._busy.discard(begun.row)
            self._reserved -= room
            self._ended.set()
        return self._taken(request, chat, begun, done)

    def _begin(self, request: ChatRequest, place: _Place) -> _Begun:
        session, row = self.episode.session, place.row
        if row is None:
            row = session.fork(place.ids)
        else:
            session.feed(place.ids, row)
        if place.forked:
            self._counts["forks"] += 1
            self._counts[f"forks_{place.forked}"] += 1
        self._begun += 1
        self._known.append(KnownConversation(request.label, request.tools, request.messages))
        return _Begun(self._begun, place, row, session.row(row).tokens)

    def _taken(
        self, request: ChatRequest, chat: ChatFormat, begun: _Begun, done: Completion
    ) -> Reply:
        """Append a turn to its row, and know it from now on."""
        episode, ids, before = self.episode, done.token_ids.tolist(), begun.before
        text = self._text(ids)
        found, message = _understood(chat, before, ids, text, begun.number)
        cause, again = episode.session.prefilled(done, begun.row)
        self._counts[f"prefilled_{cause}"] += again
        episode.session.take(done, begun.row)
        episode.first_token = episode.first_token or done.first_token
        episode.last_token = time.time()
        episode.labels |= {label for label, _, _ in done.labels}
        self._counts["turns"] += 1
        episode.said += [_in_words(request.messages[-1]), text]
        turn = ServedTurn(
            len(self.turns),
            begun.row,
            len(before),
            len(before) + len(ids),
            found,
            begun.place.forked,
            request.label,
            None if begun.place.parent is None else begun.place.parent.number,
        )
        self._behind[after(request.chain[-1], message)] = turn
        self.turns.append(turn)
        whole = (*request.messages, message)
        self._known.append(KnownConversation(request.label, request.tools, whole))
        # what was refused before it began was not the last word
        if self._refused.get(request.label, ("", begun.number))[1] < begun.number:
            del self._refused[request.label]
        if self._last_refused[1] < begun.number:
            self._last_refused = "", 0
        return Reply(message, done, before, turn)

    def _refuse(self, label: str, reason: str, place: _Place) -> RequestError:
        """Note a request for which there is no room, and say so."""
        self._refused.pop(label, None)
        self._refused[label] = self._last_refused = reason, self._begun
        before = 0 if place.row is None else self.episode.session.row(place.row).length
        self.refusal = _no_room(reason, self._rollout, before + len(place.ids))
        return RequestError(400, self.refusal, code=USED_UP)

    async def _take_place(self, request: ChatRequest, chat: ChatFormat) -> tuple[_Place, int]:
        """Find where the answer goes, and its most tokens. Raises RequestError where there is no
        room.
        """
        while True:
            place = self._place(request, chat)
            room, reason = self._room(place)
            if request.most_tokens is not None:
                room = min(room, request.most_tokens)
            if self._begun >= self._rollout.max_turns:
                room, reason = 0, "max_turns"
            elif room < 1 and self._reserved:
                self._ended.clear()
                await self._ended.wait()
                continue
            if room >= 1:
                return place, room
            raise self._refuse(request.label, reason, place)

    def _place(self, request: ChatRequest, chat: ChatFormat) -> _Place:
        session, messages = self.episode.session, request.messages
        known = [at for at in range(len(messages)) if request.chain[at] in self._behind]
        if known:
            turn, new = self._behind[request.chain[known[-1]]], messages[known[-1] :]
            row = session.row(turn.row)
            before, ids = row.tokens[: turn.begin], row.tokens[turn.begin : turn.end]
            try:
                suffix = chat.suffix(before, ids, turn.said, [_as_template(one) for one in new])
            except Exception:  # noqa: BLE001 - then nothing is proven
                suffix = None
            if suffix is not None:
                turn.read = True  # who goes on from it has read it
                if row.length == turn.end and turn.row not in self._busy:
                    return _Place(turn.row, suffix, parent=turn)
                return _Place(None, before + ids + suffix, why(request, self._known), turn)
        try:
            prompt = chat.prompt([_as_template(one) for one in messages])
        except Exception as error:  # templates are programs, and some refuse an order of roles
            raise RequestError(400, f"the chat template refuses the messages: {error}") from error
        if not prompt:  # no engine can begin behind nothing
            raise RequestError(400, "the messages make a prompt without a token: say something")
        return _Place(None, prompt, "template" if known else why(request, self._known))

    def _room(self, place: _Place) -> tuple[int, str]:
        session, more = self.episode.session, len(place.ids)
        behind = length = more
        if place.row is None:
            behind = 0
        else:
            row = session.row(place.row)
            behind, length = behind + len(row.ids), length + row.length
        return turn_room(
            self._rollout, sampled=session.sampled + self._reserved, behind=behind, length=length
        )


def _understood(
    chat: ChatFormat, before: list[int], ids: list[int], text: str, number: int
) -> tuple[Said, Message]:
    """Read a turn, and write it as a message; as its text alone where that cannot be done: the
    policy may say anything, and its client gets what it said.
    """
    try:
        found = chat.read(before, ids, text)
        return found, one_form(_replied(found, number))
    except Exception as error:  # noqa: BLE001 - of a parser, for something that the policy said
        plain = text.encode(errors="replace").decode()
        found = Said(plain, unreadable=f"the turn cannot be read: {error}"[:200])
        return found, one_form(_replied(found, number))


def _replied(found: Said, number: int) -> Message:
    """Write a turn as a chat message: arguments of calls are strings, and each call has an id."""
    message = found.message()
    for index, call in enumerate(message.get("tool_calls", ())):
        call.setdefault("id", f"call_{number}_{index}")
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return message


def _as_template(message: Message) -> Message:
    """Give templates the arguments of calls as objects, as they expect them."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments: Any = json.loads(function["arguments"] or "{}")
        except ValueError:
            arguments = function["arguments"]
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _no_room(reason: str, rollout: RolloutConfig, length: int) -> str:
    names = {
        "length": f"rollout.response_length: {rollout.response_length} sampled tokens",
        "context": f"the longest sequence, {rollout.longest_row_in_words}; messages take {length}",
        "max_turns": f"rollout.max_turns: {rollout.max_turns}",
    }
    return f"the episode has used up what it may ({names[reason]})"


def _in_words(message: Message) -> str:
    return f"[{message['role']}] {message['content']}"
