"""What a frame may say about tokens beside ids and log-probs.

Runs in: wherever groups are encoded and decoded. Hides where a plane lies: [entries, width] of one
element type, little endian, one behind the other, each padded to 4 bytes. Invariant: sizes are
checked against the frame before an array is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.wire.groups import WireError
from async_grpo.wire.header import INTEGER, TEXT, column

COLUMNS = ("plane_names", "plane_types", "plane_widths")
"""Of the header; all empty in a frame without planes."""


@dataclass(frozen=True, slots=True)
class Plane:
    """What a frame may say beside tokens and log-probs: names of its element types, and what has
    an entry, all tokens with the prompts', or the sampled ones, or each one that another plane
    counts.
    """

    types: tuple[str, ...]
    entries: str


PLANES = {
    "kept_counts": Plane(("uint16",), "sampled"),
    "kept_ids": Plane(("int32",), "kept_counts"),
    "routes": Plane(("uint8", "uint16"), "tokens"),
    "teacher_ids": Plane(("int32",), "sampled"),
    "teacher_logprobs": Plane(("float32",), "sampled"),
}
"""Kept sets of truncated sampling, experts of each token, and what a teacher says."""


def padded(plane: np.ndarray) -> list[np.ndarray]:
    """Bytes of a plane as they are sent, and their padding."""
    raw = np.ascontiguousarray(plane.astype(plane.dtype.newbyteorder("<"), copy=False))
    return [raw.reshape(-1).view(np.uint8), np.zeros(-raw.nbytes % 4, np.uint8)]


def read(
    header: dict[str, Any], view: memoryview, at: int, entries: Mapping[str, int]
) -> tuple[dict[str, np.ndarray], int]:
    """Return views of the planes that begin at `at`, and where they end. entries: what has one, by
    `Plane.entries`. Raises WireError.
    """
    names = column(header, "plane_names", TEXT)
    types = column(header, "plane_types", TEXT, len(names))
    widths = column(header, "plane_widths", INTEGER, len(names))
    found: dict[str, np.ndarray] = {}
    for name, kind, width in zip(names, types, widths, strict=True):
        plane = PLANES.get(name)
        if plane is None or name in found or kind not in plane.types or width < 1:
            raise WireError(f"no plane is {name!r:.40} of {width} {kind!r:.20}, or it comes twice")
        if plane.entries in found:
            count = int(found[plane.entries].sum(dtype=np.int64))
        elif plane.entries in entries:
            count = entries[plane.entries]
        else:
            raise WireError(f"plane {name} comes without {plane.entries}")
        dtype = np.dtype(kind).newbyteorder("<")
        end = at + count * width * dtype.itemsize
        if end > len(view):
            raise WireError(f"plane {name} has {end - at} bytes, before which the frame ends")
        values = np.frombuffer(view, dtype, count * width, at).reshape(count, width)
        if kind == "float32" and not np.isfinite(values).all():
            raise WireError(f"plane {name} has a value that is not finite")
        found[name] = values
        at = end + -end % 4
    return found, at
