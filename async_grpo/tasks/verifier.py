"""Scores responses in child processes: a verifier that hangs or crashes harms one response alone.

Runs in: rollout actors (and the driver, for evaluation), on one event loop. Hides which child
scores what, and what is sent to it. Invariants: every response gets exactly one answer, a Score or
a VerifierError, in order; a child has `task.verifier.timeout_s` per response and is replaced when
it takes longer, dies or runs out of memory; whatever a child says is checked. What an error means
for the run (`task.verifier.on_error`) is decided by the caller.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from async_grpo.config import schema
from async_grpo.tasks import pipe
from async_grpo.tasks.base import Score, check_score, is_judged
from async_grpo.tasks.children import Child, ChildError, ChildPool

_LONGEST_DETAIL = 1000
_CHUNK_ITEMS = 64
_CHUNK_BYTES = pipe.MAX_MESSAGE // 2

ScoreRequest = tuple[str, Any]


class VerifierError(ChildError):
    """One response could not be scored. `reason` is one of `VerifierPool.REASONS`."""


class _Verifier(Child):
    name, module = "verifier", "async_grpo.tasks.verifier_child"
    setting, error = "task.verifier.timeout_s", VerifierError
    asked: float | None = None
    """Since when the child owes an answer (monotonic seconds)."""


class VerifierPool(ChildPool[_Verifier]):
    """Children that score responses of one task."""

    REASONS = (*ChildPool.REASONS, "non_finite")

    def __init__(
        self, settings: schema.TaskConfig, *, seed: int, cpu: set[int] | None = None
    ) -> None:
        """cpu: cores of the children, None for any. Nothing starts before `start`."""
        super().__init__(_Verifier, settings, settings.verifier, seed=seed, cpu=cpu)
        self.spent = {"verified": 0.0, "verifying_s": 0.0}
        """Responses that were answered for, and the children's seconds for them."""
        self._timeout = settings.verifier.timeout_s
        self._counted = None if is_judged(settings.rewards, settings.judges) else ()
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for place in range(settings.verifier.workers):
            self._free.put_nowait(place)

    async def score(self, response: str, reference: Any) -> Score:
        """Score one response. Raises VerifierError."""
        outcome = (await self.score_many([(response, reference)]))[0]
        if isinstance(outcome, VerifierError):
            raise outcome
        return outcome

    async def score_many(self, items: list[ScoreRequest]) -> list[Score | VerifierError]:
        """Score (response, reference) pairs on all free children, or the next to be free; answers
        in the order of `items`.
        """
        outcomes: list[Score | VerifierError | None] = [None] * len(items)
        bodies: dict[int, bytes] = {}
        for index, item in enumerate(items):
            try:
                body = pipe.pack(item)
                if len(body) > _CHUNK_BYTES:
                    raise ValueError(f"it has {len(body)} bytes, the limit is {_CHUNK_BYTES}")
                bodies[index] = body
            except (TypeError, ValueError, OverflowError) as error:
                outcomes[index] = VerifierError(
                    "not_sendable", f"response and reference cannot cross to the verifier: {error}"
                )
        await asyncio.gather(
            *(self._score_chunk(chunk, bodies, outcomes) for chunk in self._chunks(bodies))
        )
        self.errors.update(
            outcome.reason for outcome in outcomes if isinstance(outcome, VerifierError)
        )
        return [outcome for outcome in outcomes if outcome is not None]

    def busy(self) -> list[tuple[int, float]]:
        """(process id, seconds since its last answer) of every child that owes one."""
        return [
            (child.pid, time.monotonic() - child.asked)
            for child in self.children
            if child.asked is not None
        ]

    def _chunks(self, bodies: dict[int, bytes]) -> list[list[int]]:
        most = max(1, min(_CHUNK_ITEMS, -(-len(bodies) // len(self._places))))
        chunks: list[list[int]] = []
        size = 0
        for index, body in bodies.items():
            if not chunks or len(chunks[-1]) >= most or size + len(body) > _CHUNK_BYTES:
                chunks.append([])
                size = 0
            chunks[-1].append(index)
            size += len(body)
        return chunks

    async def _score_chunk(
        self,
        chunk: list[int],
        bodies: dict[int, bytes],
        outcomes: list[Score | VerifierError | None],
    ) -> None:
        place = await self._free.get()
        try:
            rest = chunk
            while rest:
                done = await self._try(place, [bodies[index] for index in rest])
                for index, outcome in zip(rest, done, strict=False):
                    outcomes[index] = outcome
                rest = rest[len(done) :]
        finally:
            self._free.put_nowait(place)

    async def _try(self, place: int, bodies: list[bytes]) -> list[Score | VerifierError]:
        """Answers for a first part of `bodies`, at least one; all, if the child lived."""
        try:
            child = await self.child(place)
        except VerifierError as error:
            return [error] * len(bodies)
        done: list[Score | VerifierError] = []
        began = child.asked = time.monotonic()
        try:
            # msgpack: an array of this many values
            head = b"\xdd" + len(bodies).to_bytes(4, "big")
            await child.send(head + b"".join(bodies), self._timeout)
            while len(done) < len(bodies):
                child.asked = time.monotonic()
                message = await child.receive(self._timeout)
                done.append(_outcome(message, child.greeting, self._counted))
                if isinstance(done[-1], VerifierError) and done[-1].reason == "memory":
                    break
            else:
                child.asked = None
        except VerifierError as error:
            done.append(error)
        finally:
            if child.asked is not None:  # nobody waits for what it may still answer
                await child.kill()
        self.spent["verified"] += len(done)
        self.spent["verifying_s"] += time.monotonic() - began
        return done


def _outcome(
    message: list[Any], components: list[str], counted: tuple[str, ...] | None
) -> Score | VerifierError:
    """Parse a child's answer. Checked again, since task code in the child may have written it."""
    try:
        if message[0] == "ok" and len(message) == 3:
            return check_score(Score(message[1], message[2]), components, counted)
        if message[0] in VerifierPool.REASONS:
            return VerifierError(message[0], str(message[1])[:_LONGEST_DETAIL])
    except (TypeError, ValueError, OverflowError) as error:
        raise VerifierError(
            "crash",
            f"the verifier child answered what its task cannot say: {str(error)[:_LONGEST_DETAIL]}",
        ) from error
    raise VerifierError("crash", f"the verifier child answered {str(message)[:80]}")
