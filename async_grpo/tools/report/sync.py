"""Sends trackers, and the copy at `checkpoint.mirror`, what they did not get while the run was on.

Runs in: a process of its own, on any machine that sees the run's directory and reaches them.
Invariant: nothing is there twice afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from async_grpo.config.stored import read_settings
from async_grpo.errors import RunError, SetupError
from async_grpo.observe.tracking.delivery import Delivery
from async_grpo.observe.tracking.kinds import KINDS
from async_grpo.observe.tracking.outbox import METRICS, Outbox
from async_grpo.observe.tracking.sink import TrackerSink, TrackingError
from async_grpo.run.checkpoint.mirror import Mirror
from async_grpo.runtime.run_lock import RunLock
from async_grpo.runtime.text import counted, one_line, without_password


def sync_all(run_dir: Path, *, say: Callable[[str], None]) -> None:
    """Send all of them the rest, also where one fails. say: told lines. Raises RunError."""
    failed: SetupError | None = None
    kinds = [kind for kind in KINDS if Outbox(run_dir, kind.title).state.is_file()]
    settings = read_settings(run_dir / "config.yaml").get("checkpoint", {})
    work: list[Callable[[], list[str]]] = [partial(sync, run_dir, kind) for kind in kinds]
    if (address := settings.get("mirror")) is not None:
        work.append(partial(copy, run_dir, address, say=say))
    for send in work or [partial(sync, run_dir)]:
        try:
            for line in send():
                say(line)
        except SetupError as error:
            if failed is not None:
                say(str(failed))
            failed = error
    if failed is not None:
        raise failed


def copy(run_dir: Path, address: str, *, say: Callable[[str], None]) -> list[str]:
    """Copy what is new. Returns lines. Raises SetupError, also while the run is on."""
    lock, mirror = RunLock(run_dir, lost=say), Mirror(address, run_dir, note=say)
    lock.acquire(note=say, check=lambda: None)
    try:
        return [f"{counted(mirror.copy(), 'file')} copied to {mirror}"]
    except RunError:
        raise
    except Exception as error:  # each storage has errors of its own
        raise SetupError(f"{mirror} did not take everything ({one_line(error)})") from error
    finally:
        lock.release()


def sync(run_dir: Path, kind: type[TrackerSink] = KINDS[0]) -> list[str]:
    """Send the rest; a run without an end becomes KILLED. Returns lines. Raises RunError."""
    outbox = Outbox(run_dir, kind.title)
    if not outbox.state.is_file() or not (run_dir / METRICS).is_file():
        raise TrackingError(
            f"{run_dir} has no {outbox.state.name} and {METRICS}: it is no run directory, or the "
            f"run did without {kind.title}"
        )
    outbox.open()
    try:
        delivery = Delivery(outbox, kind)
        at = {run.key: without_password(delivery.sink(run).address) for run in outbox.runs}
        try:
            delivery.send()
        except Exception as error:  # a tracker raises what it likes; the user wants one sentence
            raise TrackingError(
                f"{kind.title} at {' or '.join(sorted(set(at.values())))} did not take everything "
                f"({one_line(error)}); {outbox.unsent} lines are left, try again later"
            ) from error
        lines = [
            f"{kind.title} run {run.run_id} at {at[run.key]} is complete: {run.status}"
            for run in outbox.runs
        ]
        if delivery.refused:
            lines.append(
                f"{delivery.refused} records were refused, the last one: {delivery.refusal}"
            )
        return [f"{outbox.rows_sent} lines sent to {kind.title}", *lines]
    finally:
        outbox.close()
