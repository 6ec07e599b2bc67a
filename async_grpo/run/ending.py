"""How a run ends: the exit code and the sentence of whatever ended it, and what is written then.

Runs in: the driver. Exit codes: `async_grpo.errors`; the last line names the code and its meaning,
because `ray job` reports only success or failure. Invariant: whatever goes wrong, nothing of the
run is left behind, and a second error never replaces the first.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import (
    EXIT_MEANING,
    FaultBudgetSpent,
    NonFinite,
    RunError,
    Stalled,
    StopRequested,
)
from async_grpo.observe.console.console import Console
from async_grpo.runtime.stopping import STOPPED_EARLY
from async_grpo.runtime.text import without_colours


@dataclass
class Ending:
    """How the work of a command ended: its exit code."""

    code: int = 1


@contextmanager
def guarded(trainer, console: Console) -> Iterator[Ending]:
    """Say how the block ended; whatever goes wrong in it, nothing of the run is left behind."""
    ending, done, code, message = Ending(), False, 1, ""
    try:
        try:
            yield ending
            code = FaultBudgetSpent.exit_code if trainer.mirror_error else 0  # said already
        except StopRequested:  # during the start
            trainer.stop("FINISHED")
            console.info(STOPPED_EARLY)
            code = 0
        done = True
    except Exception as error:  # noqa: BLE001 - every error ends the run, explained
        code, message = explained(error)
        _keep_group_ids(trainer, console, error, message)
    finally:
        if not done:
            try:
                _post_mortem(trainer, console, code, message)
            finally:
                _stop_after_error(trainer, console, code, message)
    ending.code = end(console, code, message)


def end(console: Console, code: int, message: str) -> int:
    """Say why a run ends, and its exit code with its meaning; the exit code."""
    if message:
        console.error(message)
    say = console.error if code else console.info
    say(f"exit code {code}: {EXIT_MEANING.get(code, EXIT_MEANING[1])}")
    console.end(code, message)
    return code


def coded(error: BaseException) -> tuple[int, str]:
    """Find the exit code and the message of an error, whatever is around it."""
    from async_grpo.cluster.deaths import is_death, told

    causes = []
    for current in _innermost(error):
        if isinstance(current, RunError):
            return current.exit_code, without_colours(str(current))
        if isinstance(current, TimeoutError) and str(current):
            return Stalled.exit_code, without_colours(str(current))
        if is_death(current):
            return FaultBudgetSpent.exit_code, f"a process of the run died: {told(current)}"
        causes.append(current)
    return 1, without_colours(f"{type(causes[0]).__name__}: {causes[0]}").splitlines()[0]


def _innermost(error: BaseException) -> list[BaseException]:
    """Find the errors inside remote calls and task groups, without remote tracebacks."""
    layers, innermost = [error], []
    for current in layers:  # grows while it is read
        below: Sequence[Any] = (getattr(current, "cause", None),)
        if isinstance(current, BaseExceptionGroup):
            below = current.exceptions
        inside = [
            layer
            for layer in below
            if isinstance(layer, BaseException) and all(layer is not known for known in layers)
        ]
        layers.extend(inside)
        if not inside:
            innermost.append(current)
    return innermost


def explained(error: BaseException) -> tuple[int, str]:
    """Find the exit code and the message of an error; a bug comes with its traceback."""
    code, message = coded(error)
    if code == 1:
        print(without_colours("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    return code, message


def _post_mortem(trainer, console: Console, code: int, message: str) -> None:
    """Write down what the run's processes were doing, before they are taken down."""
    from async_grpo.run.post_mortem import REASONS, Scene, write

    if code not in REASONS or not message:
        return
    try:
        scene = trainer.system.scene()
    except RunError:  # it did not come so far
        scene = Scene()
    meaning = EXIT_MEANING[code]
    where, path = write(trainer.run_dir, scene, code=code, meaning=meaning, message=message)
    console.error(where)
    if path is not None:
        console.info(f"post-mortem: {path}")


def stuck(trainer, console: Console) -> None:
    """End a driver whose event loop does not turn: with the driver, Ray ends its processes."""
    limit_s = trainer.config.watchdog.step_timeout_s
    message = (
        f"the driver's event loop has not turned for watchdog.step_timeout_s = {limit_s:g} "
        "s; the stacks of the driver say where it is"
    )
    try:
        _post_mortem(trainer, console, Stalled.exit_code, message)
        trainer.abandon()
    finally:  # whatever goes wrong there
        end(console, Stalled.exit_code, message)
        sys.stdout.flush()
        os._exit(Stalled.exit_code)


def _stop_after_error(trainer, console: Console, code: int, first: str) -> None:
    """Take the run down; a second error is shown and does not replace the `first`."""
    try:
        trainer.stop("FAILED", ending=(code, first))
    except Exception as error:  # noqa: BLE001 - shown; the exit code is the first error's
        if (second := coded(error)[1]) != first:
            console.error("and the clean-up was not complete: " + second.splitlines()[0])


def _keep_group_ids(trainer, console: Console, error: BaseException, message: str) -> None:
    """Write down the groups that an error names, to be looked at."""
    causes = [one for one in _innermost(error) if isinstance(one, NonFinite)]
    ids = sorted({group_id for cause in causes for group_id in cause.group_ids})
    if not ids:
        return
    path = trainer.run_dir / "non_finite.json"
    facts = {"step": trainer.step_under_way, "group_ids": ids, "reason": message}
    try:
        path.write_text(json.dumps(facts), encoding="utf-8")
    except OSError as failure:
        console.error(
            f"the ids of their groups could not be written to {path} ({failure.strerror}): {ids}"
        )
        return
    console.info(
        f"their ids are in {path}; look at one with: async-grpo inspect "
        f"{shlex.quote(str(trainer.run_dir))} --group ID --text"
    )
