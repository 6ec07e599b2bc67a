"""Everything that crosses a process boundary, and its codec.

Runs in: rollout actors (encode), the replay queue (metadata), learner ranks (decode). Hides the byte layout of a group (`groups` says what one is):

    offset  size  content
    0       4     magic b"AGRP"
    4       2     wire version (little endian)
    6       2     zero
    8       4     header length h
    12      4     crc32 of everything after these 16 bytes
    16      h     msgpack map: ids, lengths, rewards, verdicts, finish reasons, version spans, times (padded to 8 bytes)
    16+h          int32 prompt tokens | int32 response tokens of all rows | float32 behaviour log-probs | uint8 loss mask, little endian

Invariants: facts only (advantages and ratios are derived later); nothing is ever unpickled, and bytes from anywhere give a group or a
WireError, nothing else; every length is checked against the frame, and the frame against its limit, before an array is made; the header
holds plain maps, lists, numbers and strings, at most MAX_DEPTH deep; a decoded group has finite log-probs and a version for every
token. `decode_meta` never copies or widens a token array, so a reader of metadata costs the same for any response length.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np

from async_grpo.groups import Batch, Group, GroupMeta, GroupTicket, Rollout, RowMeta, VersionSpan, WireError

__all__ = [
    "Batch", "Buffer", "Group", "GroupMeta", "GroupTicket", "Rollout", "RowMeta", "VersionSpan", "WireError", "decode_group", "decode_meta",
    "encode_group", "pack_frames", "peek_ticket", "unpack_frames",
]

WIRE_VERSION = 2
MAX_DEPTH = 4
"""The header, its list of rows, a row, and what a row holds."""
MAX_STRING_BYTES = 64 * 2**10
Buffer = bytes | bytearray | memoryview | np.ndarray

_MAGIC = b"AGRP"
_FIXED = struct.Struct("<4sHHII")
_BATCH = struct.Struct("<4sI")
_BATCH_MAGIC = b"AGRB"
_FINISH_REASONS = ("stop", "length")
_INT32, _FLOAT32, _UINT8 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")


def encode_group(group: Group, *, max_bytes: int | None = None) -> bytes:
    """One group as a frame of at most `max_bytes`.

    Raises WireError for anything that must not be trained (lengths, non-finite values, aborts), and for a frame that is too large.
    """
    arrays = _arrays_of(group)
    try:
        packed = msgpack.packb(_header_of(group), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"group {group.group_id} has a value that is not a plain number or string: {error}") from error
    packed += b"\0" * (-len(packed) % 8)
    body = b"".join([packed, *[array.tobytes() for array in arrays]])
    frame = _FIXED.pack(_MAGIC, WIRE_VERSION, 0, len(packed), zlib.crc32(body)) + body
    decode_meta(frame, max_bytes=max_bytes)
    return frame


def decode_meta(frame: Buffer, *, max_bytes: int | None = None) -> GroupMeta:
    """Metadata of a frame, every rule of the format checked; `max_bytes` first. Raises WireError."""
    header, view, offset = _open(frame, max_bytes=max_bytes)
    try:
        rows = header["rows"]
        prompt_length, n_tokens = _natural(header, "prompt_length"), sum(_natural(row, "length") for row in rows)
        _check_size(view, offset, prompt_length, n_tokens)
        logprobs = np.frombuffer(view, _FLOAT32, n_tokens, offset + 4 * (prompt_length + n_tokens))
        mask = np.frombuffer(view, _UINT8, n_tokens, offset + 4 * (prompt_length + 2 * n_tokens))
        metas, start = [], 0
        for index, row in enumerate(rows):
            stop = start + row["length"]
            metas.append(_row_meta(index, row, logprobs[start:stop], mask[start:stop]))
            start = stop
        meta = GroupMeta(
            group_id=_natural(header, "group_id"), attempt=_natural(header, "attempt"), policy_version=_natural(header, "policy_version"),
            actor_id=str(header["actor_id"]), prompt_length=prompt_length, rows=tuple(metas), times=_times(header), nbytes=len(view),
        )
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise WireError(f"malformed header: {type(error).__name__}: {error}") from error
    if prompt_length < 1 or not metas:
        raise WireError(f"group {meta.group_id} has {prompt_length} prompt tokens and {len(metas)} rollouts; both must be at least 1")
    return meta


def peek_ticket(frame: Buffer) -> tuple[int, int] | None:
    """(group_id, attempt) of a frame that `decode_meta` refuses, or None where its header cannot be trusted either."""
    try:
        header, _, _ = _open(frame)
        return _natural(header, "group_id"), _natural(header, "attempt")
    except (WireError, KeyError):
        return None


def decode_group(frame: Buffer) -> Group:
    """The whole group; arrays are read-only views into `frame`. Raises WireError."""
    meta = decode_meta(frame)
    header, view, offset = _open(frame, verify=False)
    n_tokens = sum(row.length for row in meta.rows)
    prompt = np.frombuffer(view, _INT32, meta.prompt_length, offset)
    at = offset + 4 * meta.prompt_length
    tokens, logprobs = np.frombuffer(view, _INT32, n_tokens, at), np.frombuffer(view, _FLOAT32, n_tokens, at + 4 * n_tokens)
    mask = np.frombuffer(view, _UINT8, n_tokens, at + 8 * n_tokens)
    rollouts, start = [], 0
    for row, raw in zip(meta.rows, header["rows"], strict=True):
        stop = start + row.length
        rollouts.append(
            Rollout(
                response_ids=tokens[start:stop], behavior_logprobs=logprobs[start:stop], loss_mask=mask[start:stop],
                versions=[VersionSpan(*span) for span in _spans(raw["versions"])], rewards=row.rewards, verdict=row.verdict,
                finish_reason=row.finish_reason, role=row.role,
            )
        )
        start = stop
    return Group(
        group_id=meta.group_id, attempt=meta.attempt, policy_version=meta.policy_version, actor_id=meta.actor_id,
        prompt_ids=prompt, rollouts=rollouts, times=meta.times,
    )


def pack_frames(frames: list[Buffer]) -> np.ndarray:
    """Several frames as one uint8 array, which Ray moves out of band. Every frame starts at a multiple of 8 bytes."""
    views = [_byte_view(frame) for frame in frames]
    head = _BATCH.pack(_BATCH_MAGIC, len(views)) + struct.pack(f"<{len(views)}Q", *[len(view) for view in views])
    out = np.zeros(len(head) + sum(_padded(len(view)) for view in views), np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    at = len(head)
    for view in views:
        out[at : at + len(view)] = np.frombuffer(view, np.uint8)
        at += _padded(len(view))
    return out


def unpack_frames(buffer: Buffer) -> list[memoryview]:
    """Views of the frames that `pack_frames` joined. Raises WireError."""
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
    rows = [
        {
            "role": row.role, "length": len(row.response_ids), "rewards": row.rewards, "verdict": row.verdict,
            "finish_reason": row.finish_reason, "versions": [value for span in row.versions for value in asdict(span).values()],
        }
        for row in group.rollouts
    ]
    return {
        "group_id": group.group_id, "attempt": group.attempt, "policy_version": group.policy_version, "actor_id": group.actor_id,
        "prompt_length": len(group.prompt_ids), "rows": rows, "times": group.times,
    }


def _arrays_of(group: Group) -> list[np.ndarray]:
    for index, row in enumerate(group.rollouts):
        lengths = (len(row.response_ids), len(row.behavior_logprobs), len(row.loss_mask))
        if len(set(lengths)) != 1:
            raise WireError(f"group {group.group_id} rollout {index}: {lengths} tokens, log-probs and mask entries; they must be equal")
    columns = [("response_ids", _INT32), ("behavior_logprobs", _FLOAT32), ("loss_mask", _UINT8)]
    prompt = _column(group, "prompt_ids", [group.prompt_ids], _INT32)
    return [prompt, *[_column(group, name, [getattr(row, name) for row in group.rollouts], dtype) for name, dtype in columns]]


def _column(group: Group, name: str, parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """One array of the frame. Integers must survive the cast: a wrapped token id or mask would be trained as something else."""
    raw = np.concatenate([np.asarray(part) for part in parts]) if parts else np.empty(0, dtype)
    if raw.dtype.kind not in "biuf":
        raise WireError(f"group {group.group_id} has {name} of type {raw.dtype}; they must be numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        out = raw.astype(dtype)
    if dtype != _FLOAT32 and ((out != raw).any() or (out < 0).any()):
        raise WireError(f"group {group.group_id} has {name} that are not natural numbers of type {dtype.name}")
    return out


def _byte_view(buffer: Buffer) -> memoryview:
    try:
        return memoryview(buffer).cast("B").toreadonly()
    except TypeError as error:
        raise WireError(f"not a contiguous buffer: {error}") from error


def _padded(size: int) -> int:
    return size + -size % 8


def _open(frame: Buffer, *, verify: bool = True, max_bytes: int | None = None) -> tuple[dict[str, Any], memoryview, int]:
    view = _byte_view(frame)
    if max_bytes is not None and len(view) > max_bytes:
        raise WireError(f"a frame of {len(view)} bytes is larger than wire.max_frame_bytes, {max_bytes}")
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
        raw=False, max_buffer_size=max(header_length, 1), strict_map_key=True, max_str_len=MAX_STRING_BYTES, max_bin_len=0, max_ext_len=0,
        max_array_len=header_length, max_map_len=header_length,
    )
    unpacker.feed(view[_FIXED.size : offset])
    try:
        header = unpacker.unpack()
    except (msgpack.UnpackException, ValueError, RecursionError) as error:
        raise WireError(f"the header is not msgpack: {error}") from error
    _check_plain(header, MAX_DEPTH)
    if not isinstance(header, dict) or not isinstance(header.get("rows"), list):
        raise WireError("the header is not a group")
    return header, view, offset


def _check_plain(value: object, depth: int) -> None:
    """Raise WireError for anything but maps with string keys, lists, strings, numbers, booleans and None, `depth` levels deep."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise WireError(f"the header is nested more than {MAX_DEPTH} deep")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_plain(inner, depth - 1)
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise WireError("the header has a key that is not a string")
    elif not isinstance(value, str | int | float | None):
        raise WireError(f"the header holds a {type(value).__name__}")


def _spans(versions: list[int]) -> list[tuple[int, int, int]]:
    """(version, start, end) of each span, from the flat list on the wire. Raises WireError."""
    if not isinstance(versions, list) or len(versions) % 3 or any(type(value) is not int for value in versions):
        raise WireError(f"version spans {versions!r} are not triples of integers")
    return list(zip(versions[::3], versions[1::3], versions[2::3], strict=True))


def _check_size(view: memoryview, offset: int, prompt_length: int, n_tokens: int) -> None:
    expected = offset + 4 * prompt_length + 9 * n_tokens
    if prompt_length < 0 or n_tokens < 0 or expected != len(view):
        raise WireError(f"a frame with {prompt_length} + {n_tokens} tokens has {expected} bytes, this one {len(view)}")


def _row_meta(index: int, row: dict[str, Any], logprobs: np.ndarray, mask: np.ndarray) -> RowMeta:
    length, versions, rewards, verdict = _natural(row, "length"), _spans(row["versions"]), row["rewards"], row["verdict"]
    if length < 1:
        raise WireError(f"rollout {index} is empty")
    if not (logprobs.min() > -np.inf and logprobs.max() <= 1e-3):  # both comparisons are false for NaN; no copy of the array is made
        raise WireError(f"rollout {index} has a log-prob that is not finite or positive")
    if mask.max() > 1:
        raise WireError(f"rollout {index} has a loss mask other than 0 and 1")
    if row["role"] not in ("train", "baseline") or row["finish_reason"] not in _FINISH_REASONS:
        raise WireError(f"rollout {index} has role {row['role']!r} and finish reason {row['finish_reason']!r}")
    at = 0
    for version, start, end in versions:
        if start != at or end <= start or version < 0:
            raise WireError(f"rollout {index} has version spans {versions} that do not cover its {length} tokens in order")
        at = end
    if at != length:
        raise WireError(f"rollout {index} has {length} tokens and versions for {at}")
    if not rewards or not all(isinstance(name, str) and _finite(value) for name, value in rewards.items()):
        raise WireError(f"rollout {index} has rewards {rewards}; every component must be a finite number")
    if verdict is not None and not _finite(verdict):
        raise WireError(f"rollout {index} has verdict {verdict}")
    return RowMeta(
        role=row["role"], length=length, mask_tokens=int(mask.sum()), rewards={name: float(value) for name, value in rewards.items()},
        verdict=None if verdict is None else float(verdict), finish_reason=row["finish_reason"],
        versions=tuple((version, end - start) for version, start, end in versions),
    )


def _times(header: dict[str, Any]) -> dict[str, float]:
    times = header["times"]
    if not all(isinstance(name, str) and _finite(value) for name, value in times.items()):
        raise WireError(f"times must be finite numbers, got {times}")
    return {name: float(value) for name, value in times.items()}


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _natural(header: dict[str, Any], name: str) -> int:
    value = header[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WireError(f"{name} must be a natural number, got {value!r}")
    return value
