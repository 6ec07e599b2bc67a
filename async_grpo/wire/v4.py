"""Frames of wire version 4, which journals of older runs hold, as frames of today.

Runs in: whatever reads a journal. Hides the differences of that version: one prompt, rows that are
all response, and behind the log-probs one byte for every token, 1 where the policy had sampled it,
which was everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from async_grpo.wire.groups import WireError

VERSION = 4


def converted(header: dict[str, Any], payload: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Convert header and payload to what today's decoder checks. Raises WireError."""
    try:
        return _converted(dict(header), payload)
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise WireError(f"not a group of wire version {VERSION}: {error!r:.200}") from error


def _converted(header: dict[str, Any], payload: memoryview) -> tuple[dict[str, Any], memoryview]:
    prompt, lengths = header.pop("prompt_length"), header.pop("lengths")
    n = sum(lengths)
    if min(prompt, *lengths) < 1 or len(payload) != 4 * prompt + 9 * n:
        raise WireError(f"a frame of version {VERSION} with {prompt} + {n} tokens has another size")
    arrays = 4 * (prompt + n) + 4 * n
    mask = np.frombuffer(payload, "u1", n, arrays)
    if (mask != 1).any():
        raise WireError("a group of wire version 4 has masked tokens, which no run has written")
    header["segment_counts"] = [1] * len(lengths)
    header["segments"] = [tokens for length in lengths for tokens in (0, length)]
    empty = ("row_prompts", "episodes", "turn_rewards")
    header |= {name: [] for name in (*empty, "plane_names", "plane_types", "plane_widths")}
    header["prompt_lengths"] = [prompt]
    return header, payload[:arrays]
