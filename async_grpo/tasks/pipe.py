"""The messages between a pool and its children.

Runs in: rollout actors (parent side) and their children. Hides the framing: a 4-byte little-endian
length, then msgpack. Invariants: no message is longer than `MAX_MESSAGE`; nothing is unpickled.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

MAX_MESSAGE = 32 * 2**20
LENGTH = struct.Struct("<I")
STUCK = "stuck"
"""Reason of a child's reply: a timeout that its process does not get over."""


class MessageTooLarge(ValueError):
    """A message is longer than MAX_MESSAGE bytes."""


def pack(value: Any) -> bytes:
    """msgpack bytes of a value. Raises TypeError, ValueError or OverflowError if it has none."""
    return msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")


def unpack(body: bytes) -> Any:
    """Return the value of msgpack bytes. Raises ValueError."""
    try:
        return msgpack.unpackb(
            body, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except TypeError as error:  # a map whose key is a list
        raise ValueError(str(error)) from error


def frame(body: bytes) -> bytes:
    """`body` with its length in front. Raises MessageTooLarge."""
    return LENGTH.pack(checked_length(len(body))) + body


def checked_length(length: int) -> int:
    """`length` if a message may be that long. Raises MessageTooLarge."""
    if length > MAX_MESSAGE:
        raise MessageTooLarge(f"a message of {length} bytes; the limit is {MAX_MESSAGE}")
    return length
