"""Whether a publication clears the caches of running responses, which then compute them again.

Runs in: rollout actors; without vLLM. Cleared, a response goes on exactly as the new weights would
have it; kept, its tokens look at keys and values of older weights (their log-probs are still those
they were sampled with). Clearing costs a forward pass over everything in flight:

    tokens in flight x measured seconds a token  <=  SHARE x seconds since the last publication ?
        yes: clear, and measure again           no: keep, and trust the measurement a little less

Invariant: whoever waits for a choice waits for arithmetic only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from async_grpo.config.schema import Config

SHARE = 0.05
"""Most of an engine's time that computing caches again may take, before they are kept instead."""
FORGET = 0.95
"""Factor of the measured cost with every publication that keeps caches: so it is measured again
after a while, sooner where it was close.
"""
LOOK_S = 0.02

Mode = Literal["auto", "recompute", "keep"]


def cache_mode(config: Config, *, device: str) -> Mode:
    """Return the mode of this run: on CPU, vLLM dies when a seeded response loses its cache."""
    mode = config.weight_sync.kv_cache
    return "keep" if mode == "auto" and device == "cpu" and config.seeded else mode


class CacheChoice:
    """Chooses for one engine, by its own measurements (mode `auto`), or always the same."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._token_s: float | None = None
        self._since = time.monotonic()
        self._cleared = 0
        self._watching: asyncio.Task[None] | None = None

    def clears(self, tokens: int) -> tuple[bool, str]:
        """Choose: whether to clear the caches of `tokens` tokens in flight, and why."""
        if self._mode != "auto":
            return self._mode == "recompute", f"weight_sync.kv_cache is {self._mode}"
        if self._token_s is None:
            return True, "to measure what that costs"
        cost, interval = tokens * self._token_s, time.monotonic() - self._since
        clears = cost <= SHARE * interval
        if not clears:
            self._token_s *= FORGET
        return clears, (
            f"computing {tokens:,} tokens again takes {cost:.1f} s, "
            f"{'at most' if clears else 'more than'} {SHARE:.0%} of the {interval:.1f} s since the "
            "last weight sync"
        )

    def resumed(self, tokens: int, lengths: Callable[[], dict[str, int]]) -> None:
        """Note that the engine goes on, and measure how long `tokens` cleared tokens take: until
        every running response has its next token. lengths(): tokens of each that runs.
        """
        self.paused()
        self._since = time.monotonic()
        if tokens:
            self._cleared = tokens
            self._watching = asyncio.create_task(self._watch(lengths))

    def paused(self) -> None:
        """Note that the next publication has come; what is not yet computed took at least this
        long.
        """
        if self._watching is not None:
            self._watching.cancel()
            self._measured()

    async def _watch(self, lengths: Callable[[], dict[str, int]]) -> None:
        before = {name: length for name, length in lengths().items() if length}
        while any(length == before.get(name) for name, length in lengths().items()):
            await asyncio.sleep(LOOK_S)
        self._measured()

    def _measured(self) -> None:
        self._token_s = (time.monotonic() - self._since) / self._cleared
        self._watching = None
