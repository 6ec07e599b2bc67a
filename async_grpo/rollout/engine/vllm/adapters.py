"""The adapters that an engine holds, as its front end sees them: one for every weight sync.

Runs in: rollout actors. Hides the numbers by which vLLM knows adapters, and which of them may go.
The other half, `worker_adapters`, loads what this one names:

    receive: room -> workers: drop what is not kept, load -> serve
    request: begun -> vLLM, with the adapter that is served then -> its end

Invariants: a request has the adapter that it began with until it ends, and all of its tokens have
that label; an adapter that a request uses or that is served is never dropped; there are never more
than the slots; every weight sync has a number of its own, also one that fails or comes again under
the same label, so that no prefix cache outlives its weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

BASE = 0
"""In the place of a number: the model without an adapter, before the first weight sync."""


class Adapters:
    """Adapters by number, and the requests that use them. slots: how many an engine holds; 0: it
    gets whole weights, and vLLM says which token has which.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._newest = self._served = BASE
        self._users: Counter[int] = Counter()
        self._labels: dict[str, str] = {}  # of running requests, by name
        self._ended = asyncio.Event()

    @contextmanager
    def begun(self, name: str, label: str) -> Iterator[tuple[LoRARequest | None, str]]:
        """Inside the block a request runs: its adapter, or None, and the label of all of its
        tokens, or "". label: what is served.
        """
        if not self.slots:
            yield None, ""
            return
        from vllm.lora.request import LoRARequest

        number = self._served
        self._users[number] += 1
        self._labels[name] = label
        try:
            # vLLM keeps prefix caches apart by name and path, and reads no file of what is loaded
            adapter = LoRARequest(label, number, f"adapter-{number}") if number else None
            yield adapter, label
        finally:
            del self._labels[name]
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number]
            self._ended.set()

    def label(self, name: str) -> str:
        """Return the label of all tokens of a running request, or ""."""
        return self._labels.get(name, "")

    async def room(self, seconds: float) -> tuple[int, list[int]]:
        """Wait until requests have left a slot free; the number of the next adapter, and those that
        workers keep beside it. Raises TimeoutError after `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                while len(self._held) >= self.slots:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"responses used all {self.slots} adapters of the engine for {seconds:g} s (the "
                "smaller of weight_sync.deadlines.pause_s and half of acknowledge_s)"
            ) from error
        self._newest += 1
        return self._newest, self._held

    def serve(self, number: int) -> None:
        """Let requests that begin from now on have this adapter, which is loaded."""
        self._served = number

    @property
    def _held(self) -> list[int]:
        return sorted((self._users.keys() | {self._served}) - {BASE})
