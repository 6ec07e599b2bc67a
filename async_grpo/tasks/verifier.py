"""Scores responses in child processes, so that one that hangs or crashes harms no engine.

Runs in: rollout actors (and the driver, for evaluation), on one event loop. Hides which child
scores what, and what is sent to it: several responses in one message, which it scores one after the
other; or where the task's `score` is a coroutine function, one, beside up to
`task.verifier.concurrency` - 1 others. Invariants: every response gets exactly one answer, a Score
or a VerifierError, in order; there are `task.verifier.timeout_s` for each, after which the child is
replaced, or the coroutine cancelled; a child that is lost takes the responses under way in it, and
no others; whatever a child says is checked. What an error means for the run
(`task.verifier.on_error`) is decided by the caller.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from async_grpo.config import schema
from async_grpo.tasks import pipe
from async_grpo.tasks.base import Score, check_score, is_judged
from async_grpo.tasks.children import SILENCE_S, ChildError, ChildPool, ManyCalls

_LONGEST_DETAIL = 1000
_CHUNK_ITEMS = 64
_CHUNK_BYTES = pipe.MAX_MESSAGE // 2

ScoreRequest = tuple[str, Any]


class VerifierError(ChildError):
    """One response could not be scored. `reason` is one of `VerifierPool.REASONS`."""


class _Verifier(ManyCalls):
    name, module = "verifier", "async_grpo.tasks.verifier_child"
    setting, error = "task.verifier.timeout_s", VerifierError
    asked: float | None = None
    """Since when the child owes an answer (monotonic seconds), where it has one call at a time."""

    @property
    def answers_many(self) -> bool:
        """Whether coroutines score."""
        return self.is_async

    @property
    def owes_since(self) -> float | None:
        """Since when it has said nothing, and owes an answer (monotonic seconds)."""
        return self.heard if self.calls else self.asked


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
        self._limits, self._is_async = settings.verifier, False
        self._timeout = settings.verifier.timeout_s
        self._counted = None if is_judged(settings.rewards, settings.judges) else ()
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for place in range(settings.verifier.workers):
            self._free.put_nowait(place)
        self._asking: set[asyncio.Task[Score | VerifierError]] = set()

    async def start(self) -> None:
        """See `ChildPool.start`."""
        await super().start()
        self._is_async = any(child.is_async for child in self.children)
        if self._is_async:
            for _ in range(self._limits.concurrency - 1):
                for place in range(self._limits.workers):
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
            (child.pid, time.monotonic() - since)
            for child in self.children
            if (since := child.owes_since) is not None
        ]

    def _chunks(self, bodies: dict[int, bytes]) -> list[list[int]]:
        most = max(1, min(_CHUNK_ITEMS, -(-len(bodies) // len(self._places))))
        most = 1 if self._is_async else most
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
        if self._is_async:
            # whoever waits may be cancelled, and the child would still be at work
            asking = asyncio.create_task(self._ask(place, bodies[chunk[0]]))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            outcomes[chunk[0]] = await asyncio.shield(asking)
            return
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
        self._spend(len(done), began)
        return done

    async def _ask(self, place: int, body: bytes) -> Score | VerifierError:
        """Answer of a child that scores others meanwhile; then the place is free again."""
        began, patience_s = time.monotonic(), self._timeout + SILENCE_S
        try:
            child = await self.child(place)
            try:
                reply = await child.ask(body, self._timeout, patience_s=patience_s)
            finally:
                if child.leaving and not child.calls:
                    await child.end()
            return _outcome(reply, child.greeting, self._counted)
        except VerifierError as error:
            return error
        finally:
            self._spend(1, began)
            self._free.put_nowait(place)

    def _spend(self, verified: int, began: float) -> None:
        self.spent["verified"] += verified
        self.spent["verifying_s"] += time.monotonic() - began


def _outcome(
    message: list[Any], components: list[str], counted: tuple[str, ...] | None
) -> Score | VerifierError:
    """Parse a child's answer. Checked again, since task code in the child may have written it."""
    try:
        if message[0] == "ok" and len(message) == 3:
            return check_score(Score(message[1], message[2]), components, counted)
        reason = "timeout" if message[0] == pipe.STUCK else message[0]
        if reason in VerifierPool.REASONS:
            return VerifierError(reason, str(message[1])[:_LONGEST_DETAIL])
    except (TypeError, ValueError, OverflowError) as error:
        raise VerifierError(
            "crash",
            f"the verifier child answered what its task cannot say: {str(error)[:_LONGEST_DETAIL]}",
        ) from error
    raise VerifierError("crash", f"the verifier child answered {str(message)[:80]}")
