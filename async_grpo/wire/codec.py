"""Everything that crosses a process boundary, and its codec.

Runs in: rollout actors (encode), the replay queue (metadata), learner ranks (decode). Hides the
byte layout of a group (`groups` says what one is):

    offset  size  content
    0       4     magic b"AGRP"
    4       2     wire version (little endian)
    6       2     zero
    8       4     header length h
    12      4     crc32 of everything after these 16 bytes
    16      h     msgpack map (padded to 8 bytes): ids, times, and the facts of the rows as columns
    16+h          little endian: int32 prompt tokens | int32 tokens of all rows | float32 behaviour
                  log-probs of the sampled ones | planes, each padded to 4 bytes

The columns, of n rows with t turns, s version spans and p prompts: prompt_lengths [p], row_prompts
[n] (empty for one prompt), episodes [n] (of every row; empty where each is one of its own),
segment_counts [n], segments [2 t] (context tokens, sampled tokens of every turn), roles [n],
verdicts [n], finish_reasons [n], reward_names [c], rewards [c n] (component by component, nil where
a row lacks it), turn_rewards [t] (or empty), span_counts [n], span_versions [s], span_tokens [s]
(of the sampled tokens), and plane_names, plane_types, plane_widths. A column is checked with a few
passes in C where a map per row costs a dozen Python calls each: the queue decodes every group of
the run in one process. A response to a plain prompt is one turn without context: 8 bytes a token.

A plane holds more about tokens (`planes`): elements of one type, `width` of them per entry. Frames
of version 4 are read too (`v4`).

Invariants: facts only (advantages and ratios are derived later); nothing is ever unpickled, and
bytes from anywhere give a group or a WireError, nothing else; every length is checked against the
frame, and the frame against its limit, before an array is made; the header has exactly its keys,
and under them numbers, strings, and flat lists or one flat map of those; a decoded group has finite
log-probs and a version for every token, which is in its set where it has one (`kept`). Without sets
`decode_meta` never copies or widens a token array, so a reader of metadata costs the same for any
response length.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from itertools import accumulate, chain, pairwise
from typing import Any

import msgpack
import numpy as np

from async_grpo.wire import planes, v4
from async_grpo.wire.groups import (
    Batch,
    Group,
    GroupMeta,
    GroupTicket,
    Row,
    RowMeta,
    VersionSpan,
    WireError,
)
from async_grpo.wire.header import facts, natural
from async_grpo.wire.kept import KeptSets

__all__ = [
    "Batch",
    "Buffer",
    "Group",
    "GroupMeta",
    "GroupTicket",
    "Row",
    "RowMeta",
    "VersionSpan",
    "WireError",
    "decode_group",
    "decode_meta",
    "encode_group",
    "pack_frames",
    "peek_ticket",
    "unpack_frames",
]

WIRE_VERSION = 5
MAX_STRING_BYTES = 64 * 2**10
Buffer = bytes | bytearray | memoryview | np.ndarray

_MAGIC = b"AGRP"
_FIXED = struct.Struct("<4sHHII")
_BATCH = struct.Struct("<4sI")
_BATCH_MAGIC = b"AGRB"
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


def encode_group(group: Group, *, max_bytes: int | None = None) -> bytes:
    """Encode a group. Raises WireError for what must not be trained, and above `max_bytes`."""
    arrays = _arrays_of(group)
    try:
        packed = msgpack.packb(_header_of(group), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"group {group.group_id} has a value that is not a plain number or string: {error}"
        ) from error
    packed += b"\0" * (-len(packed) % 8)
    checksum = zlib.crc32(packed)
    for array in arrays:
        checksum = zlib.crc32(array, checksum)
    frame = b"".join([_FIXED.pack(_MAGIC, WIRE_VERSION, 0, len(packed), checksum), packed, *arrays])
    _meta(*_open(frame, verify=False, max_bytes=max_bytes))  # what is checked is what was written
    return frame


def decode_meta(frame: Buffer, *, max_bytes: int | None = None) -> GroupMeta:
    """Metadata of a frame, checked by every rule of the format, size first. Raises WireError."""
    return _meta(*_open(frame, max_bytes=max_bytes))


def peek_ticket(frame: Buffer) -> tuple[int, int] | None:
    """(group_id, attempt) of a refused frame; None where its header cannot be trusted either."""
    try:
        header, _, _ = _open(frame)
        return natural(header, "group_id"), natural(header, "attempt")
    except (WireError, KeyError):
        return None


def decode_group(frame: Buffer) -> Group:
    """Return the whole group; arrays are read-only views into `frame`. Raises WireError."""
    header, view, offset = _open(frame)
    meta = _meta(header, view, offset)
    ids, logprobs, found = _arrays(header, view, offset, meta)
    ends = [*accumulate(meta.prompt_lengths), *(row.context + row.length for row in meta.rows)]
    ends[len(meta.prompt_lengths) - 1 :] = accumulate(ends[len(meta.prompt_lengths) - 1 :])
    tokens = [ids[start:stop] for start, stop in pairwise([0, *ends])]
    bounds = [0, *accumulate(row.length for row in meta.rows)]
    turns = [0, *accumulate(row.turns for row in meta.rows)]
    pairs = list(zip(header["segments"][::2], header["segments"][1::2], strict=True))
    rows = [
        Row(
            response_ids=response,
            behavior_logprobs=logprobs[bounds[place] : bounds[place + 1]],
            segments=pairs[turns[place] : turns[place + 1]],
            versions=_spans(row),
            rewards=row.rewards,
            verdict=row.verdict,
            finish_reason=row.finish_reason,
            role=row.role,
            prompt=row.prompt,
            episode=meta.forks[place] if meta.forks else None,
            turn_rewards=None if row.turn_rewards is None else list(row.turn_rewards),
        )
        for place, (row, response) in enumerate(
            zip(meta.rows, tokens[len(meta.prompt_lengths) :], strict=True)
        )
    ]
    return Group(
        group_id=meta.group_id,
        attempt=meta.attempt,
        policy_version=meta.policy_version,
        actor_id=meta.actor_id,
        prompts=tokens[: len(meta.prompt_lengths)],
        rows=rows,
        times=meta.times,
        run_epoch=meta.run_epoch,
        planes=found,
    )


def pack_frames(frames: list[Buffer]) -> np.ndarray:
    """Join frames, each at a multiple of 8 bytes, to one uint8 array that Ray moves out of band."""
    views = [_byte_view(frame) for frame in frames]
    sizes = struct.pack(f"<{len(views)}Q", *[len(view) for view in views])
    head = _BATCH.pack(_BATCH_MAGIC, len(views)) + sizes
    out = np.empty(len(head) + sum(_padded(len(view)) for view in views), np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    at = len(head)
    for view in views:
        end, following = at + len(view), at + _padded(len(view))
        out[at:end] = np.frombuffer(view, np.uint8)
        out[end:following] = 0
        at = following
    return out


def unpack_frames(buffer: Buffer) -> list[memoryview]:
    """Return views of the frames that `pack_frames` joined. Raises WireError."""
    view = _byte_view(buffer)
    if len(view) < _BATCH.size:
        raise WireError(f"a batch of frames needs {_BATCH.size} bytes, got {len(view)}")
    magic, count = _BATCH.unpack_from(view)
    at = _BATCH.size + 8 * count
    if magic != _BATCH_MAGIC or at > len(view):
        raise WireError("not a batch of frames")
    sizes = struct.unpack_from(f"<{count}Q", view, _BATCH.size)
    announced = at + sum(_padded(size) for size in sizes)
    if announced != len(view):
        raise WireError(f"a batch announces {announced} bytes and has {len(view)}")
    frames = []
    for size in sizes:
        frames.append(view[at : at + size])
        at += _padded(size)
    return frames


def _header_of(group: Group) -> dict[str, Any]:
    rows = group.rows
    names = list(dict.fromkeys(chain.from_iterable(row.rewards for row in rows)))
    rewards = [row.rewards.get(name) for name in names for row in rows]
    # on the wire it means that the component is missing
    if None in rewards and any(None in row.rewards.values() for row in rows):
        raise WireError(f"group {group.group_id} has a reward component without a value")
    spans = [span for row in rows for span in row.versions]
    prompts = [row.prompt for row in rows]
    return {
        "group_id": group.group_id,
        "attempt": group.attempt,
        "policy_version": group.policy_version,
        "run_epoch": group.run_epoch,
        "actor_id": group.actor_id,
        "times": group.times,
        "prompt_lengths": [len(prompt) for prompt in group.prompts],
        "row_prompts": [] if len(group.prompts) == 1 and not any(prompts) else prompts,
        "episodes": _of_all(group, "episode"),
        "segment_counts": [len(row.segments) for row in rows],
        "segments": [tokens for row in rows for pair in row.segments for tokens in pair],
        "roles": [row.role for row in rows],
        "verdicts": [row.verdict for row in rows],
        "finish_reasons": [row.finish_reason for row in rows],
        "reward_names": names,
        "rewards": rewards,
        "turn_rewards": [*chain.from_iterable(_of_all(group, "turn_rewards"))],
        "span_counts": [len(row.versions) for row in rows],
        "span_versions": [span.policy_version for span in spans],
        "span_tokens": [span.end - span.start for span in spans],
        "plane_names": list(group.planes),
        "plane_types": [plane.dtype.name for plane in group.planes.values()],
        "plane_widths": [plane.shape[-1] for plane in group.planes.values()],
    }


def _of_all(group: Group, name: str) -> list[Any]:
    """Collect what all rows say under this name; nothing if none does."""
    values = [getattr(row, name) for row in group.rows]
    if all(value is None for value in values):
        return []
    if None in values:
        raise WireError(f"group {group.group_id} has sequences with and without {name}")
    return values


def _arrays_of(group: Group) -> list[np.ndarray]:
    """Arrays of the frame. Refuses what a header cannot say: unequal lengths, gaps in spans."""
    ids = [_cast(group, "prompts", prompt, _INT32) for prompt in group.prompts]
    logprobs = []
    for index, row in enumerate(group.rows):
        tokens, sampled = sum(map(sum, row.segments)), sum(pair[1] for pair in row.segments)
        if (len(row.response_ids), len(row.behavior_logprobs)) != (tokens, sampled):
            raise WireError(
                f"group {group.group_id} sequence {index}: {len(row.response_ids)} tokens and "
                f"{len(row.behavior_logprobs)} log-probs, for {tokens} tokens of which {sampled} "
                "were sampled; they must be equal"
            )
        at = 0
        for span in row.versions:
            if span.start != at:
                raise WireError(
                    f"group {group.group_id} sequence {index}: a version span starts at "
                    f"{span.start} instead of {at}"
                )
            at = span.end
        ids.append(_cast(group, "response_ids", row.response_ids, _INT32))
        logprobs.append(_cast(group, "behavior_logprobs", row.behavior_logprobs, _FLOAT32))
    return [*ids, *logprobs, *chain.from_iterable(map(planes.padded, group.planes.values()))]


def _cast(group: Group, name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast an array; integers must survive: a wrapped id or mask would be trained as another."""
    raw = np.ascontiguousarray(values)
    if raw.dtype == dtype:
        return raw
    if raw.dtype.kind not in "biuf":
        raise WireError(
            f"group {group.group_id} has {name} of type {raw.dtype}; they must be numbers"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        out = raw.astype(dtype)
    if dtype != _FLOAT32 and (out != raw).any():
        raise WireError(
            f"group {group.group_id} has {name} that are not natural numbers of type {dtype.name}"
        )
    return out


def _byte_view(buffer: Buffer) -> memoryview:
    try:
        return memoryview(buffer).cast("B").toreadonly()
    except TypeError as error:
        raise WireError(f"not a contiguous buffer: {error}") from error


def _padded(size: int) -> int:
    return size + -size % 8


def _open(
    frame: Buffer, *, verify: bool = True, max_bytes: int | None = None
) -> tuple[dict[str, Any], memoryview, int]:
    view = _byte_view(frame)
    if max_bytes is not None and len(view) > max_bytes:
        raise WireError(
            f"a frame of {len(view)} bytes is larger than wire.max_frame_bytes, {max_bytes}"
        )
    if len(view) < _FIXED.size:
        raise WireError(f"a frame needs {_FIXED.size} bytes, got {len(view)}")
    magic, version, zero, header_length, checksum = _FIXED.unpack_from(view)
    if magic != _MAGIC or zero:
        raise WireError("not a group frame")
    if version not in (v4.VERSION, WIRE_VERSION):
        raise WireError(f"wire version {version}, this process speaks {WIRE_VERSION}")
    offset = _FIXED.size + header_length
    if offset > len(view):
        raise WireError("the header is longer than the frame")
    if verify and zlib.crc32(view[_FIXED.size :]) != checksum:
        raise WireError("checksum mismatch")
    unpacker = msgpack.Unpacker(
        raw=False,
        max_buffer_size=max(header_length, 1),
        strict_map_key=True,
        max_str_len=MAX_STRING_BYTES,
        max_bin_len=0,
        max_ext_len=0,
        max_array_len=header_length,
        max_map_len=header_length,
    )
    unpacker.feed(view[_FIXED.size : offset])
    try:
        header = unpacker.unpack()
    except (msgpack.UnpackException, ValueError, RecursionError) as error:
        raise WireError(f"the header is not msgpack: {error}") from error
    if type(header) is not dict:
        raise WireError("the header is not a group")
    if version == v4.VERSION:
        return *v4.converted(header, view[offset:]), 0
    return header, view, offset


def _meta(header: dict[str, Any], view: memoryview, offset: int) -> GroupMeta:
    """Check every rule behind the envelope, types first, so that only WireError is raised."""
    meta = facts(header, nbytes=len(view))
    ids, logprobs, found = _arrays(header, view, offset, meta)
    if ids.min() < 0:
        raise WireError("a token id is negative")
    if (kept := KeptSets.in_planes(found)) is not None:
        behind, segments = ids[sum(meta.prompt_lengths) :], header["segments"]
        kept.check(behind[np.repeat(np.arange(len(segments)) % 2 == 1, segments)])
    # both comparisons are false for NaN; no copy of the array is made
    if not (logprobs.min() > -np.inf and logprobs.max() <= 1e-3):
        bad = ~((logprobs > -np.inf) & (logprobs <= 1e-3))
        ends = list(accumulate(row.length for row in meta.rows))
        raise WireError(
            f"sequence {bisect_right(ends, int(bad.argmax()))} has a log-prob that is not finite "
            "or positive"
        )
    return meta


def _arrays(
    header: dict[str, Any], view: memoryview, offset: int, meta: GroupMeta
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return views of token ids, log-probs and planes, once the announced lengths agree with the
    frame's.
    """
    sampled = sum([row.length for row in meta.rows])
    tokens = sum(meta.prompt_lengths) + sampled + sum([row.context for row in meta.rows])
    end = offset + 4 * (tokens + sampled)
    found: dict[str, np.ndarray] = {}
    if end <= len(view) and any(header[name] != [] for name in planes.COLUMNS):
        found, end = planes.read(header, view, end, {"tokens": tokens, "sampled": sampled})
    if end != len(view):
        raise WireError(
            f"a frame with {tokens} tokens, {sampled} of them sampled, has {end} bytes, this one "
            f"{len(view)}"
        )
    return (
        np.frombuffer(view, _INT32, tokens, offset),
        np.frombuffer(view, _FLOAT32, sampled, offset + 4 * tokens),
        found,
    )


def _spans(row: RowMeta) -> list[VersionSpan]:
    ends = accumulate(tokens for _, tokens in row.versions)
    return [
        VersionSpan(version, end - tokens, end)
        for (version, tokens), end in zip(row.versions, ends, strict=True)
    ]
