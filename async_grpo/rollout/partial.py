"""Partial rollouts: half-generated responses in a checkpoint, continued by a resumed run.

Runs in: rollout actors (reading partial responses off the engine; continuing them) and the driver
(the file). Hides the file `partial.msgpack` in a checkpoint: a msgpack list with one row per group
(`PartialStart`, and how many bytes it has), and behind it the groups, msgpack maps of plain values
and arrays as bytes.

    generate --so_far--> encode -> driver -> partial.msgpack -> PartialFile.take -> prefixes
        -> prompt + tokens of the prefix -> generate -> join

Of episodes the turns are kept, with a digest of the tokens that stood before each: a resumed run
plays them to a new environment (`PartialFile.take_turns`), which must say the same again.

Invariants: tokens, log-probs and version labels of a prefix never change; tokens generated after it
carry their own; a response that had ended stays as it is. Nothing is unpickled, every length is
checked, and a prefix that does not fit the group (another prompt, other sizes, another ticket) is
not used: the group is then generated from scratch.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgpack
import numpy as np

from async_grpo.replay.partial import PartialStart
from async_grpo.rollout.engine.base import Completion, Engine, Sampling
from async_grpo.weights.transport import parse_label
from async_grpo.wire.codec import GroupTicket
from async_grpo.wire.kept import KeptSets, joined

FILE = "partial.msgpack"
_NUMBERS = itertools.count()
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_ROW = len(PartialStart._fields) + 1
_MAX_NAME, _DIGEST = 64, 8


class PartialError(ValueError):
    """The file does not hold partial rollouts."""


class Growing(Protocol):
    """A group while it is generated."""

    @property
    def ticket(self) -> GroupTicket:
        """Whose group it is."""

    @property
    def prompt_ids(self) -> list[int]:
        """Its prompt; empty for episodes, whose first words are their environments'."""

    def so_far(self) -> list[Completion]:
        """Return the partial responses, or all turns of all episodes; empty before a token."""

    def turns(self) -> list[list[bytes]]:
        """Return of each episode, for each of its turns in `so_far`, the digest of the tokens
        before it; nothing for plain responses.
        """


@dataclass(frozen=True)
class Turn:
    """A turn of an episode in a checkpoint: whole, or with `finish_reason` "", the last one."""

    before: bytes
    """`digest` of the tokens that stood before it."""
    said: Completion


def digest(tokens: Sequence[int]) -> bytes:
    """Name a sequence of tokens in 8 bytes."""
    return blake2b(np.asarray(tokens, _INT32).tobytes(), digest_size=_DIGEST).digest()


@dataclass(frozen=True)
class _Request:
    """One call of the engine, for the responses from `first` on."""

    name: str
    prompt_ids: list[int]
    sampling: Sampling
    first: int


class PartialGeneration:
    """The responses to one prompt while they are generated."""

    def __init__(
        self,
        engine: Engine,
        ticket: GroupTicket,
        prompt_ids: list[int],
        wanted: Sequence[Sampling],
        *,
        prefixes: Sequence[Completion] = (),
    ) -> None:
        """wanted: how to sample, by response. prefixes: responses to continue, each or none."""
        self.ticket, self.prompt_ids = ticket, prompt_ids
        self._engine, self._prefixes = engine, list(prefixes)
        self._answers: dict[int, Completion] = {}
        self.tokens = sum(len(one.token_ids) for one in prefixes)
        """Tokens when the generation has ended, those of aborted requests included."""
        if prefixes:
            each = [replace(sampling, n=1) for sampling in wanted for _ in range(sampling.n)]
            self._requests = [
                _Request(
                    _name(),
                    prompt_ids + start.token_ids.tolist(),
                    replace(one, max_tokens=one.max_tokens - len(start.token_ids)),
                    index,
                )
                for index, (one, start) in enumerate(zip(each, prefixes, strict=True))
                if not start.finish_reason
            ]
        else:
            firsts = itertools.accumulate((sampling.n for sampling in wanted), initial=0)
            self._requests = [
                _Request(_name(), prompt_ids, sampling, first)
                for sampling, first in zip(wanted, firsts, strict=False)
            ]

    async def finish(self) -> list[Completion]:
        """All responses, generated at the same time."""
        tasks = [asyncio.ensure_future(self._generate(request)) for request in self._requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # when one failed, nobody needs the others
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        count = len(self._prefixes) or len(self._answers)
        return [self._response(index, None) for index in range(count)]

    def so_far(self) -> list[Completion]:
        """Return the partial responses; empty before the first token."""
        grown = {
            request.first + index: one
            for request in self._requests
            for index, one in self._engine.so_far(request.name).items()
        }
        if not (grown or self._answers or self._prefixes):
            return []
        count = len(self._prefixes) or sum(request.sampling.n for request in self._requests)
        return [self._response(index, grown.get(index)) for index in range(count)]

    def turns(self) -> list[list[bytes]]:
        """See `Growing.turns`: plain responses have none."""
        return []

    async def _generate(self, request: _Request) -> None:
        try:
            answers = await self._engine.generate(
                request.prompt_ids, request.sampling, name=request.name
            )
        except BaseException:
            self.tokens += self._engine.cut_off(request.name)
            raise
        self.tokens += sum(len(answer.token_ids) for answer in answers)
        self._answers |= {request.first + index: answer for index, answer in enumerate(answers)}

    def _response(self, index: int, grown: Completion | None) -> Completion:
        grown = self._answers.get(index, grown)
        if not self._prefixes:
            return grown or EMPTY
        prefix = self._prefixes[index]
        return prefix if grown is None else join(prefix, grown)


EMPTY = Completion(np.empty(0, np.int32), np.empty(0, np.float32), [], "", 0.0)
"""A response without a token."""


def join(start: Completion, rest: Completion) -> Completion:
    """Concatenate two parts of a response; each token keeps its log-prob and its label."""
    at, labels = len(start.token_ids), list(start.labels)
    for label, first, end in rest.labels:
        goes_on = labels and labels[-1][0] == label
        labels.append((label, labels.pop()[1] if goes_on else first + at, end + at))
    return Completion(
        token_ids=np.concatenate([start.token_ids, rest.token_ids]),
        logprobs=np.concatenate([start.logprobs, rest.logprobs]),
        labels=labels,
        finish_reason=rest.finish_reason,
        first_token=rest.first_token,
        routes=rest.routes,
        kept=joined([start.kept, rest.kept], [at, len(rest.token_ids)]),
    )


def encode(generation: Growing, *, max_bytes: int) -> tuple[PartialStart, bytes] | None:
    """Encode the partial responses of one group; None without a token, or above `max_bytes`."""
    ticket, responses, turns = generation.ticket, generation.so_far(), generation.turns()
    tokens = sum(len(one.token_ids) for one in responses)
    if not tokens:
        return None
    newest = max(parse_label(label).step for one in responses for label, _, _ in one.labels)
    unfinished = sum(not one.finish_reason for one in responses)
    packed = msgpack.packb(
        {
            "prompt": np.asarray(generation.prompt_ids, _INT32).tobytes(),
            "responses": [
                {
                    "tokens": one.token_ids.astype(_INT32).tobytes(),
                    "logprobs": one.logprobs.astype(_FLOAT32).tobytes(),
                    "labels": [list(span) for span in one.labels],
                    "finish": one.finish_reason,
                }
                | ({"kept": [*map(bytes, one.kept.planes.values())]} if one.kept else {})
                for one in responses
            ],
        }
        | ({"turns": turns} if turns else {})
    )
    if len(packed) > max_bytes:
        return None
    return PartialStart(
        ticket.group_id, ticket.attempt, ticket.policy_version, newest, unfinished, tokens
    ), packed


async def encode_all(
    groups: Sequence[Growing], *, max_bytes: int
) -> list[tuple[PartialStart, bytes]]:
    """`encode` every group that has a token; other calls run in between."""
    found = []
    for generation in groups:
        if (one := encode(generation, max_bytes=max_bytes)) is not None:
            found.append(one)
        await asyncio.sleep(0)
    return found


def write_file(directory: Path, groups: Sequence[tuple[PartialStart, bytes]]) -> None:
    """Write the file of a checkpoint; without groups there is none."""
    if groups:
        rows = msgpack.packb([[*start, len(packed)] for start, packed in groups])
        with open(directory / FILE, "wb") as file:
            file.writelines([rows, *(packed for _, packed in groups)])


class PartialFile:
    """Partial responses of a checkpoint; readable (the file stays open) when that is pruned."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises PartialError for another kind of file, OSError if it cannot be
        read.
        """
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed by `close`
        try:
            self._rows = self._index(os.fstat(self._file.fileno()).st_size)
        except PartialError:
            self._file.close()
            raise

    @classmethod
    def at(cls, path: Path) -> PartialFile | None:
        """Open the file of a checkpoint; None if there is none, or the checkpoint was pruned."""
        try:
            return cls(path)
        except FileNotFoundError:
            return None

    @property
    def starts(self) -> list[PartialStart]:
        """Facts for the queue: one row per group that was not taken yet."""
        return [start for start, _, _ in self._rows.values()]

    def packed(self, group_id: int) -> bytes:
        """One group as `encode` made it."""
        _, offset, length = self._rows[group_id]
        self._file.seek(offset)
        return self._file.read(length)

    def take(
        self,
        ticket: GroupTicket,
        prompt_ids: list[int],
        wanted: Sequence[Sampling],
        counts: Counter[str],
    ) -> list[Completion]:
        """Take a ticket's partial responses, once, and count tokens; empty where none fits."""
        try:
            prefixes = self._take(ticket, prompt_ids, wanted)
        except (PartialError, OSError):  # as good as none; the file was whole when the run began
            counts["continued_unreadable"] += 1
            return []
        counts["continued_tokens"] += sum(len(one.token_ids) for one in prefixes)
        return prefixes

    def take_turns(
        self, ticket: GroupTicket, wanted: int, counts: Counter[str]
    ) -> list[list[Turn]]:
        """Take the turns of a ticket's `wanted` episodes, once, and count tokens; empty where none
        fits.
        """
        try:
            _, responses, turns = self._found(ticket)
        except (PartialError, OSError):
            counts["continued_unreadable"] += 1
            return []
        if len(turns) != wanted or sum(map(len, turns)) != len(responses):
            return []
        counts["continued_tokens"] += sum(len(one.token_ids) for one in responses)
        said = iter(responses)
        return [[Turn(before, next(said)) for before in episode] for episode in turns]

    def _take(
        self, ticket: GroupTicket, prompt_ids: list[int], wanted: Sequence[Sampling]
    ) -> list[Completion]:
        prompt, responses, turns = self._found(ticket)
        limits = [sampling.max_tokens for sampling in wanted for _ in range(sampling.n)]
        if prompt != prompt_ids or turns or len(responses) != len(limits):
            return []
        if any(
            len(one.token_ids) + (not one.finish_reason) > limit
            for one, limit in zip(responses, limits, strict=True)
        ):
            return []
        return responses

    def _found(self, ticket: GroupTicket) -> tuple[list[int], list[Completion], list[list[bytes]]]:
        """Take what is there for a ticket. Raises PartialError, OSError."""
        start = self._rows[ticket.group_id][0] if ticket.group_id in self._rows else None
        asked = ticket.attempt, ticket.policy_version
        if start is None or (start.attempt, start.version) != asked:
            return [], [], []
        packed = self.packed(ticket.group_id)
        del self._rows[ticket.group_id]
        return _decode(packed)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _index(self, size: int) -> dict[int, tuple[PartialStart, int, int]]:
        unpacker = _unpacker(self._file, size)
        try:
            rows, offset = unpacker.unpack(), unpacker.tell()
        except (msgpack.UnpackException, ValueError, RecursionError) as error:
            raise PartialError(f"{self._file.name} is not a file of responses: {error}") from error
        found = {}
        for row in rows if type(rows) is list else [rows]:
            if (
                type(row) is not list
                or len(row) != _ROW
                or any(type(value) is not int or value < 0 for value in row)
            ):
                raise PartialError(
                    f"{self._file.name} is not a file of responses: it does not begin with "
                    "a list of groups"
                )
            *facts, length = row
            found[row[0]] = PartialStart(*facts), offset, length
            offset += length
        if offset != size:
            raise PartialError(f"{self._file.name} announces {offset} bytes and has {size}")
        return found


def _unpacker(file: BinaryIO | None, size: int) -> msgpack.Unpacker:
    limit = max(size, 1)
    return msgpack.Unpacker(
        file,
        raw=False,
        strict_map_key=True,
        max_buffer_size=limit,
        max_str_len=_MAX_NAME,
        max_bin_len=limit,
        max_ext_len=0,
        max_array_len=limit,
        max_map_len=8,
    )


def _decode(packed: bytes) -> tuple[list[int], list[Completion], list[list[bytes]]]:
    """Prompt and partial responses of one group; of episodes, what stood before each turn."""
    unpacker = _unpacker(None, len(packed))
    unpacker.feed(packed)
    try:
        group = unpacker.unpack()
        prompt = np.frombuffer(group["prompt"], _INT32).tolist()
        turns = [list(episode) for episode in group.get("turns", [])]
        if any(type(one) is not bytes or len(one) != _DIGEST for each in turns for one in each):
            raise ValueError("a digest is none")
        return prompt, [_response_of(one) for one in group["responses"]], turns
    except (msgpack.UnpackException, ValueError, TypeError, LookupError, RecursionError) as error:
        raise PartialError(f"these are not the responses of a group: {error}") from error


def _response_of(plain: dict[str, Any]) -> Completion:
    tokens = np.frombuffer(plain["tokens"], _INT32)
    logprobs = np.frombuffer(plain["logprobs"], _FLOAT32)
    labels, at = [], 0
    for label, first, end in plain["labels"]:
        parse_label(label)
        if first != at or not first < end:
            raise ValueError(f"a span of tokens [{first}, {end}) follows {at}")
        labels.append((label, first, end))
        at = end
    if (
        not len(tokens) == len(logprobs) == at
        or plain["finish"] not in ("", "stop", "length", "repetition")
        or (plain["finish"] and not len(tokens))
    ):
        raise ValueError(
            f"{len(tokens)} tokens, {len(logprobs)} log-probs, versions of {at} and the "
            f"end {str(plain['finish'])[:20]!r} do not fit"
        )
    if len(tokens) and not (
        tokens.min() >= 0 and -math.inf < logprobs.min() and logprobs.max() <= 1e-3
    ):
        raise ValueError("a token is negative, or a log-prob not finite or positive")
    kept = None
    if "kept" in plain:
        counts, ids = plain["kept"]
        kept = KeptSets(np.frombuffer(counts, "<u2"), np.frombuffer(ids, _INT32))
        kept.check(tokens)
    return Completion(tokens, logprobs, labels, plain["finish"], time.time(), kept=kept)


def _name() -> str:
    return f"p{next(_NUMBERS)}"
