"""The files of tracking: rows that are only appended, and values that fit into them.

Runs in: the driver. Hides what a killed process or a full disk leaves of a file, and what text may
contain.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from async_grpo.config.docs import settings as known_settings
from async_grpo.runtime.text import visible

UNWRITTEN_BYTES = 16 << 20
_TEXT_LENGTH = 4000


class Lines:
    """Appends lines to a file; removes what a killed process left of a last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._unwritten = b""
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, UNWRITTEN_BYTES, start := max(0, size - UNWRITTEN_BYTES))
        self.size = start + tail.rfind(b"\n") + 1
        """Bytes at the beginning."""
        if self.size < size:
            os.ftruncate(self._file, self.size)

    def append(self, data: bytes) -> None:
        """Write, after what is unwritten. Raises OSError, and keeps UNWRITTEN_BYTES for later."""
        if len(self._unwritten) + len(data) <= UNWRITTEN_BYTES:
            self._unwritten += data
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten settings to dotted names and text, e.g. `learner.lr` -> `1e-06`; the name of what is
    chosen stands under the setting's own name, whether it has options or not.
    """
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            known = known_settings().get(f"{prefix}{key}")
            if known is not None and known.kind:
                value = dict(value)
                flat[f"{prefix}{key}"] = str(value.pop("name"))
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "null" if value is None else str(value)
    return flat


def flat_sample(row: dict[str, Any]) -> dict[str, Any]:
    """Give a response a column for each reward component, and only values that a table can show."""
    rewards = row.get("rewards")
    if isinstance(rewards, dict):
        row = {key: value for key, value in row.items() if key != "rewards"} | {
            f"reward/{name}": value for name, value in rewards.items()
        }
    return {key: clean(value) for key, value in row.items()}


def clean(value: Any) -> Any:
    """Make a value fit for JSON, terminal and web page: bounded printable text, finite numbers."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else repr(value)
    shown = visible(text[:_TEXT_LENGTH], keep="\n")
    if len(text) <= _TEXT_LENGTH and len(shown) <= _TEXT_LENGTH:
        return shown
    return f"{shown[:_TEXT_LENGTH]}... ({len(text)} characters)"
