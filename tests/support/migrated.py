"""What a migrated file says of its source."""

from __future__ import annotations

import re

from async_grpo.tools.migrate.source import Source


def unnamed(source: Source, text: str) -> list[str]:
    """Keys of the source that the text does not name."""
    named = set(re.findall(r"[^\s;,:`]+", re.sub(r"\s*\n *#\s*", " ", text)))
    return [key for key in source.given if key not in named]
