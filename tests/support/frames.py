"""Groups and frames that the tests of the wire and of the queue share."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import msgpack
import numpy as np

from async_grpo.wire.codec import WIRE_VERSION, Group, GroupTicket, Row, VersionSpan, encode_group

HEAD = struct.Struct("<4sHHII")


def make_group(
    ticket: GroupTicket,
    *,
    values: tuple[float | None, ...] = (0.0, 1.0),
    versions: tuple[int, ...] = (),
    actor: str = "a",
    baselines: tuple[float, ...] = (),
    finish: str = "stop",
    **changes: object,
) -> Group:
    """A group of `len(values)` responses with two tokens per version (by default the ticket's),
    then the baselines.
    """
    labels = versions or (ticket.policy_version,)
    spans = [VersionSpan(version, 2 * i, 2 * i + 2) for i, version in enumerate(labels)]
    n = 2 * len(labels)
    rows = [
        Row(
            np.arange(n),
            np.full(n, -0.5),
            [(0, n)],
            list(spans),
            {"correct": value or 0.0, "format": 1.0},
            value if value in (0.0, 1.0) else None,
            finish,
            role,
        )
        for role, given_values in (("train", values), ("baseline", baselines))
        for value in given_values
    ]
    group = Group(
        ticket.group_id,
        ticket.attempt,
        ticket.policy_version,
        actor,
        [np.arange(3)],
        rows,
        run_epoch=ticket.run_epoch,
    )
    for name, value in changes.items():
        setattr(group, name, value)
    return group


def frame_of(ticket: GroupTicket, **options: object) -> bytes:
    return encode_group(make_group(ticket, **options))


ROW_COLUMNS = {"role": "roles", "verdict": "verdicts", "finish_reason": "finish_reasons"}


def with_columns(frame: bytes, change: Callable[[dict], object]) -> bytes:
    """The frame with another header, and a checksum that matches."""
    length = HEAD.unpack_from(frame)[3]
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame[HEAD.size : HEAD.size + length])
    header = unpacker.unpack()
    change(header)
    packed = msgpack.packb(header)
    packed += b"\0" * (-len(packed) % 8)
    body = packed + frame[HEAD.size + length :]
    return HEAD.pack(b"AGRP", WIRE_VERSION, 0, len(packed), zlib.crc32(body)) + body


def with_header(frame: bytes, change: Callable[[dict], object]) -> bytes:
    """`with_columns` where `change` also sees `rows`: what the columns say of each rollout, written
    back to them afterwards.
    """

    def change_rows(header: dict) -> None:
        cells = zip(*[header[column] for column in ROW_COLUMNS.values()], strict=True)
        header["rows"] = [dict(zip(ROW_COLUMNS, row, strict=True)) for row in cells]
        change(header)
        rows = header.pop("rows")
        header.update({column: [row[name] for row in rows] for name, column in ROW_COLUMNS.items()})

    return with_columns(frame, change_rows)
