"""Everything that crosses a process boundary, and its codec.

Runs in: rollout actors (encode), the replay queue (metadata), learner ranks (decode). Hides the
byte layout of a group (`groups` says what one is):

    offset  size  content
    0       4     magic b"AGRP"
    4       2     wire version (little endian)
    6       2     zero
    8       4     header length h
    12      4     crc32 of everything after these 16 bytes
    16      h     msgpack map (padded to 8 bytes): ids, prompt length, times, and the facts of the
                  rollouts as columns
    16+h          little endian: int32 prompt tokens | int32 response tokens of all rows
                  | float32 behaviour log-probs | uint8 loss mask

The columns, of n rollouts with s version spans: roles [n], lengths [n], verdicts [n],
finish_reasons [n], reward_names [c], rewards [c n] (component by component, nil where a rollout
lacks it), span_counts [n], span_versions [s], span_tokens [s]. A column is checked with a few
passes in C where a map per rollout costs a dozen Python calls each: the queue decodes every group
of the run in one process.

Invariants: facts only (advantages and ratios are derived later); nothing is ever unpickled, and
bytes from anywhere give a group or a WireError, nothing else; every length is checked against the
frame, and the frame against its limit, before an array is made; the header has exactly its keys,
and under them numbers, strings, and flat lists or one flat map of those; a decoded group has finite
log-probs and a version for every token. `decode_meta` never copies or widens a token array, so a
reader of metadata costs the same for any response length.
"""

from __future__ import annotations

import math
import struct
import zlib
from bisect import bisect_right
from itertools import accumulate, chain, pairwise
from typing import Any

import msgpack
import numpy as np

from async_grpo.groups import (
    Batch,
    Group,
    GroupMeta,
    GroupTicket,
    Rollout,
    RowMeta,
    VersionSpan,
    WireError,
)

__all__ = [
    "Batch",
    "Buffer",
    "Group",
    "GroupMeta",
    "GroupTicket",
    "Rollout",
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

WIRE_VERSION = 4
MAX_STRING_BYTES = 64 * 2**10
Buffer = bytes | bytearray | memoryview | np.ndarray

_MAGIC = b"AGRP"
_FIXED = struct.Struct("<4sHHII")
_BATCH = struct.Struct("<4sI")
_BATCH_MAGIC = b"AGRB"
_KEYS = frozenset(
    {
        "group_id",
        "attempt",
        "policy_version",
        "run_epoch",
        "actor_id",
        "prompt_length",
        "times",
        "roles",
        "lengths",
        "verdicts",
        "finish_reasons",
        "reward_names",
        "rewards",
        "span_counts",
        "span_versions",
        "span_tokens",
    }
)
_ROLES, _FINISH_REASONS = frozenset({"train", "baseline"}), frozenset({"stop", "length"})
_INTEGER, _TEXT, _NUMBER = frozenset({int}), frozenset({str}), frozenset({int, float})
_NUMBER_OR_NONE = _NUMBER | {type(None)}
_INT32, _FLOAT32, _UINT8 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")


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
        return _natural(header, "group_id"), _natural(header, "attempt")
    except (WireError, KeyError):
        return None


def decode_group(frame: Buffer) -> Group:
    """Return the whole group; arrays are read-only views into `frame`. Raises WireError."""
    header, view, offset = _open(frame)
    meta = _meta(header, view, offset)
    bounds = [0, *accumulate(row.length for row in meta.rows)]
    ids, logprobs, mask = _arrays(view, offset, meta.prompt_length, bounds[-1])
    prompt, tokens = ids[: meta.prompt_length], ids[meta.prompt_length :]
    rollouts = [
        Rollout(
            response_ids=tokens[start:stop],
            behavior_logprobs=logprobs[start:stop],
            loss_mask=mask[start:stop],
            versions=_spans(row),
            rewards=row.rewards,
            verdict=row.verdict,
            finish_reason=row.finish_reason,
            role=row.role,
        )
        for row, (start, stop) in zip(meta.rows, pairwise(bounds), strict=True)
    ]
    return Group(
        group_id=meta.group_id,
        attempt=meta.attempt,
        policy_version=meta.policy_version,
        actor_id=meta.actor_id,
        prompt_ids=prompt,
        rollouts=rollouts,
        times=meta.times,
        run_epoch=meta.run_epoch,
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
    rows = group.rollouts
    names = list(dict.fromkeys(chain.from_iterable(row.rewards for row in rows)))
    rewards = [row.rewards.get(name) for name in names for row in rows]
    # on the wire it means that the component is missing
    if None in rewards and any(None in row.rewards.values() for row in rows):
        raise WireError(f"group {group.group_id} has a reward component without a value")
    spans = [span for row in rows for span in row.versions]
    return {
        "group_id": group.group_id,
        "attempt": group.attempt,
        "policy_version": group.policy_version,
        "run_epoch": group.run_epoch,
        "actor_id": group.actor_id,
        "prompt_length": len(group.prompt_ids),
        "times": group.times,
        "roles": [row.role for row in rows],
        "lengths": [len(row.response_ids) for row in rows],
        "verdicts": [row.verdict for row in rows],
        "finish_reasons": [row.finish_reason for row in rows],
        "reward_names": names,
        "rewards": rewards,
        "span_counts": [len(row.versions) for row in rows],
        "span_versions": [span.policy_version for span in spans],
        "span_tokens": [span.end - span.start for span in spans],
    }


def _arrays_of(group: Group) -> list[np.ndarray]:
    """Arrays of the frame. Refuses what a header cannot say: unequal lengths, gaps in spans."""
    ids, logprobs, masks = [_cast(group, "prompt_ids", group.prompt_ids, _INT32)], [], []
    for index, row in enumerate(group.rollouts):
        lengths = (len(row.response_ids), len(row.behavior_logprobs), len(row.loss_mask))
        if not lengths[0] == lengths[1] == lengths[2]:
            raise WireError(
                f"group {group.group_id} rollout {index}: {lengths} tokens, log-probs and "
                "mask entries; they must be equal"
            )
        at = 0
        for span in row.versions:
            if span.start != at:
                raise WireError(
                    f"group {group.group_id} rollout {index}: a version span starts at "
                    f"{span.start} instead of {at}"
                )
            at = span.end
        ids.append(_cast(group, "response_ids", row.response_ids, _INT32))
        logprobs.append(_cast(group, "behavior_logprobs", row.behavior_logprobs, _FLOAT32))
        masks.append(_cast(group, "loss_mask", row.loss_mask, _UINT8))
    return [*ids, *logprobs, *masks]


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
    if version != WIRE_VERSION:
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
    return header, view, offset


def _meta(header: dict[str, Any], view: memoryview, offset: int) -> GroupMeta:
    """Check every rule behind the envelope, types first, so that only WireError is raised."""
    if header.keys() != _KEYS:
        raise WireError(
            "the header has other keys than those of a group; missing: "
            f"{sorted(_KEYS - header.keys())}"
        )
    prompt_length, lengths = _natural(header, "prompt_length"), _list(header, "lengths", _INTEGER)
    n_rows = len(lengths)
    if prompt_length < 1 or n_rows < 1 or min(lengths) < 1:
        raise WireError(
            f"{prompt_length} prompt tokens and {n_rows} rollouts; both, and every "
            "response, must have at least 1"
        )
    bounds = list(accumulate(lengths))
    ids, logprobs, mask = _arrays(view, offset, prompt_length, bounds[-1])
    if ids.min() < 0:
        raise WireError("a token id is negative")
    # both comparisons are false for NaN; no copy of the array is made
    if not (logprobs.min() > -np.inf and logprobs.max() <= 1e-3):
        raise WireError(
            f"rollout {_row_of(~((logprobs > -np.inf) & (logprobs <= 1e-3)), bounds)} has "
            "a log-prob that is not finite or positive"
        )
    if mask.max() > 1:
        raise WireError(f"rollout {_row_of(mask > 1, bounds)} has a loss mask other than 0 and 1")
    roles = _one_of(header, "roles", n_rows, _ROLES)
    finish_reasons = _one_of(header, "finish_reasons", n_rows, _FINISH_REASONS)
    mask_tokens = np.add.reduceat(mask, [0, *bounds[:-1]], dtype=np.int64).tolist()
    rewards, verdicts = _rewards(header, n_rows), _finite(header, "verdicts", n_rows)
    rows = map(
        RowMeta,
        roles,
        lengths,
        mask_tokens,
        rewards,
        verdicts,
        finish_reasons,
        _versions(header, bounds),
    )
    actor_id = header["actor_id"]
    if type(actor_id) is not str:
        raise WireError("actor_id must be a string")
    return GroupMeta(
        _natural(header, "group_id"),
        _natural(header, "attempt"),
        _natural(header, "policy_version"),
        actor_id,
        prompt_length,
        tuple(rows),
        _times(header["times"]),
        len(view),
        _natural(header, "run_epoch"),
    )


def _times(times: Any) -> dict[str, float]:
    if (
        type(times) is not dict
        or not _TEXT.issuperset(map(type, times))
        or not _NUMBER.issuperset(map(type, times.values()))
    ):
        raise WireError("times must be numbers by name")
    if not all(map(math.isfinite, times.values())):
        raise WireError("times must be finite")
    return {name: float(value) for name, value in times.items()}


def _arrays(
    view: memoryview, offset: int, prompt_length: int, n_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of token ids, log-probs and mask, once the announced lengths agree with the
    frame's.
    """
    expected = offset + 4 * prompt_length + 9 * n_tokens
    if expected != len(view):
        raise WireError(
            f"a frame with {prompt_length} + {n_tokens} tokens has {expected} bytes, this "
            f"one {len(view)}"
        )
    n_ids = prompt_length + n_tokens
    return (
        np.frombuffer(view, _INT32, n_ids, offset),
        np.frombuffer(view, _FLOAT32, n_tokens, offset + 4 * n_ids),
        np.frombuffer(view, _UINT8, n_tokens, offset + 4 * (n_ids + n_tokens)),
    )


def _row_of(bad: np.ndarray, bounds: list[int]) -> int:
    """Return the rollout of the first bad token."""
    return bisect_right(bounds, int(bad.argmax()))


def _list(
    header: dict[str, Any], name: str, types: frozenset[type], count: int | None = None
) -> list[Any]:
    """Return a flat list of `count` values, all exactly of these types. A boolean is not an
    integer.
    """
    column = header[name]
    if type(column) is not list or not types.issuperset(map(type, column)):
        raise WireError(
            f"{name} must be a list of {' or '.join(sorted(kind.__name__ for kind in types))}"
        )
    if count is not None and len(column) != count:
        raise WireError(f"{name} has {len(column)} entries instead of {count}")
    return column


def _one_of(header: dict[str, Any], name: str, count: int, allowed: frozenset[str]) -> list[str]:
    column = _list(header, name, _TEXT, count)
    if not allowed.issuperset(column):
        index = next(index for index, value in enumerate(column) if value not in allowed)
        raise WireError(
            f"rollout {index} has {column[index]!r:.40} in {name}, not one of {sorted(allowed)}"
        )
    return column


def _finite(header: dict[str, Any], name: str, count: int) -> list[float | None]:
    """Return a column of finite numbers, or None where a rollout has none."""
    column = _list(header, name, _NUMBER_OR_NONE, count)
    # the filter takes None away, and zeros, which are finite
    if not all(map(math.isfinite, filter(None, column))):
        raise WireError(f"{name} must be finite")
    return [None if value is None else float(value) for value in column]


def _rewards(header: dict[str, Any], n_rows: int) -> list[dict[str, float]]:
    names = _list(header, "reward_names", _TEXT)
    width = len(names)
    if width < 1 or len(set(names)) != width:
        raise WireError("reward_names must name at least one component, and none of them twice")
    values = _finite(header, "rewards", n_rows * width)
    columns = [values[start : start + n_rows] for start in range(0, len(values), n_rows)]
    rewards = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if None in values:
        rewards = [
            {name: value for name, value in row.items() if value is not None} for row in rewards
        ]
        if not all(rewards):
            raise WireError(f"rollout {rewards.index({})} has no reward")
    return rewards


def _versions(header: dict[str, Any], bounds: list[int]) -> list[tuple[tuple[int, int], ...]]:
    """(version, tokens) of each span of each rollout; they cover all tokens up to its bound."""
    counts = _list(header, "span_counts", _INTEGER, len(bounds))
    versions = _list(header, "span_versions", _INTEGER)
    tokens = _list(header, "span_tokens", _INTEGER, len(versions))
    if min(counts) < 1 or sum(counts) != len(versions) or min(versions) < 0 or min(tokens) < 1:
        raise WireError(
            f"{len(versions)} version spans for {len(bounds)} rollouts, or a negative "
            "version, or a span without tokens"
        )
    stops, covered = list(accumulate(counts)), list(accumulate(tokens))
    for index, (stop, bound) in enumerate(zip(stops, bounds, strict=True)):
        if covered[stop - 1] != bound:
            raise WireError(f"rollout {index} has version spans that do not cover its tokens")
    spans = list(zip(versions, tokens, strict=True))
    return [tuple(spans[stop - count : stop]) for count, stop in zip(counts, stops, strict=True)]


def _spans(row: RowMeta) -> list[VersionSpan]:
    ends = accumulate(tokens for _, tokens in row.versions)
    return [
        VersionSpan(version, end - tokens, end)
        for (version, tokens), end in zip(row.versions, ends, strict=True)
    ]


def _natural(header: dict[str, Any], name: str) -> int:
    value = header[name]
    if type(value) is not int or value < 0:
        raise WireError(f"{name} must be a natural number")
    return value
