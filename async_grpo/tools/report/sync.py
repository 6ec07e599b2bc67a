"""Sends MLflow what it did not get while the run was on.

Runs in: a process of its own, on any machine that sees the run's directory and reaches MLflow.
Invariant: nothing is there twice afterwards.
"""

from __future__ import annotations

from pathlib import Path

from async_grpo.observe.tracking.mlflow_sender import Delivery
from async_grpo.observe.tracking.outbox import METRICS, STATE, Outbox, TrackingError
from async_grpo.runtime.text import one_line, without_password


def sync(run_dir: Path) -> list[str]:
    """Send the rest; a run without an end becomes KILLED. Returns lines. Raises RunError."""
    if not (run_dir / STATE).is_file() or not (run_dir / METRICS).is_file():
        raise TrackingError(
            f"{run_dir} has no {STATE} and {METRICS}: it is no run directory, or the run "
            "did without MLflow"
        )
    outbox = Outbox(run_dir)
    outbox.open()
    try:
        outbox.mark_killed()
        delivery = Delivery(outbox)
        try:
            delivery.send()
        except Exception as error:  # MLflow raises what it likes; the user wants one sentence
            uris = {without_password(delivery.uri(entry)) for entry in outbox.entries}
            raise TrackingError(
                f"MLflow at {' or '.join(sorted(uris))} did not take everything "
                f"({one_line(error)}); {outbox.rows_waiting()} rows are left, try again later"
            ) from error
        lines = [
            f"MLflow run {entry.run_id} at {without_password(delivery.uri(entry))} is "
            f"complete: {entry.status}"
            for entry in outbox.entries
        ]
        if delivery.refused:
            lines.append(
                f"{delivery.refused} records were refused, the last one: {delivery.refusal}"
            )
        return [f"{outbox.rows_sent} rows sent", *lines]
    finally:
        outbox.close()
