"""Callbacks: what a user's code does at the events of a run.

Runs in: the driver. Parts of the run tell events in any thread (`Callbacks.tell`); the trainer
delivers them between learner steps, in the thread that drives it, in the order in which they
happened. So a callback may call the trainer (`save`, `evaluate`, `finish`, `request_stop`), and
what it does takes time from training. A step's own event comes last of what happened in it.

Invariants: no event is delivered while a learner step, a weight sync or a checkpoint is made by the
same thread; an error in a callback ends the run with the callback's name, or is counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.errors import RunError

if TYPE_CHECKING:
    from async_grpo.run.trainer import Trainer

OnError = Literal["fail", "count"]


class CallbackFailed(RunError):
    """A callback raised an error, and `run.on_callback_error` is `fail`."""


class Callback:
    """Base class with a method per event, none of which does anything.

    In the YAML: `run.callbacks: {package.module:Class: {...}}`, with the constructor's arguments.
    In Python: `Trainer(config, callbacks=[...])`.
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if hasattr(cls, "on_publication"):
            raise TypeError(
                f"{cls.__name__}.on_publication is called on_weight_sync now: rename it"
            )

    def on_start(self, trainer: Trainer) -> None:
        """Act once the processes of the run serve, before the first learner step."""

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """Act after a learner step. result: as `Trainer.steps` gives it, but for `done`."""

    def on_weight_sync(self, trainer: Trainer, version: int, seconds: float) -> None:
        """Act once a version of the weights is live, `seconds` after it was staged."""

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Act after an evaluation of the weights after learner step `step`."""

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        """Act once a checkpoint is complete."""

    def on_restore(self, trainer: Trainer, step: int) -> None:
        """Act once the run was rolled back to the checkpoint of an earlier step."""

    def on_fault(self, trainer: Trainer, text: str) -> None:
        """Act after a process died, or a checkpoint failed, and the run continues. text: a line."""

    def on_reward_alarm(self, trainer: Trainer, text: str) -> None:
        """Act after a sign that the reward is met without the task. text: a line."""

    def on_end(self, trainer: Trainer, status: str) -> None:
        """Act when the run ends, before its processes do. status: FINISHED, FAILED or KILLED."""


class Callbacks:
    """All callbacks of a run, and the events that wait for delivery."""

    def __init__(
        self,
        called: Sequence[Callback] = (),
        on_error: OnError = "fail",
        *,
        error: Callable[[str], None] = print,
    ) -> None:
        """on_error: what an error in one does. error: shows a line about one that is counted."""
        self._called, self._on_error = list(called), on_error
        self._error = error
        self._waiting: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._delivering = threading.Lock()
        self.errors = 0
        """Errors that were counted."""

    def __bool__(self) -> bool:
        return bool(self._called)

    def tell(self, event: str, *details: Any) -> None:
        """Keep an event, such as `on_step`, for delivery. Safe in any thread."""
        if self._called:
            self._waiting.append((event, details))

    def deliver(self, trainer: Any) -> None:
        """Call all callbacks with the events that wait. Raises CallbackFailed. Nothing happens
        inside of a callback, whose own calls of the trainer come here too.
        """
        if not self._delivering.acquire(blocking=False):
            return
        try:
            while self._waiting:
                event, details = self._waiting.popleft()
                errors: list[Exception] = []
                for one in self._called:
                    own = [dict(part) if isinstance(part, dict) else part for part in details]
                    try:
                        self._call(one, event, trainer, *own)
                    except RunError as error:  # the others hear the event all the same
                        errors.append(error)
                if errors:
                    raise errors[0]
        finally:
            self._delivering.release()

    def _call(self, one: Callback, event: str, *arguments: Any) -> None:
        try:
            getattr(one, event)(*arguments)
        except Exception as error:
            ends = isinstance(error, RunError) and error.exit_code != RunError.exit_code
            if ends:  # the run, whatever its callbacks may do: it came from a call of the trainer
                raise
            kind = type(one)
            what = (
                f"callback {kind.__module__}:{kind.__qualname__} raised in {event}: "
                f"{type(error).__name__}: {error}"
            )
            if self._on_error == "fail":
                raise CallbackFailed(what) from error
            self.errors += 1
            self._error(f"{what} (counted as callbacks/errors: run.on_callback_error is count)")
