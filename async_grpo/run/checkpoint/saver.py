"""Checkpoints of a running run: one at a time, sealed beside training; and disks that refuse them.

Runs in: the driver, on the event loop of the run. One checkpoint:

    settle, journal position, ranks write (training waits: the stall)
        -> ranks bring their files to the disk, checksummed -> manifest -> rename -> prune
        -> the journal forgets (all of it beside training)

Invariants: nothing is pruned or forgotten before the new checkpoint is complete; a checkpoint that
could not be written leaves nothing but a counter and a line, until `checkpoint.max_failures` in a
row end the run; a caller that waits for a checkpoint learns whether it is there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from async_grpo.config.operation import Checkpoint
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, RunError, Stalled
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.runtime import storage
from async_grpo.runtime.listener import RunListener
from async_grpo.runtime.provenance import (
    check_origin,
    code_version,
    copy_tokenizer,
    tokenizer_fingerprint,
)
from async_grpo.runtime.storage import FileSum, StorageFailure, Written


class SavedParts(Protocol):
    """The processes of the run, as far as checkpoints concern them."""

    async def save(self, directory: Path) -> tuple[dict[str, Any], Written]:
        """Write the ranks' part; the queue's snapshot. Raises StorageFailure."""

    async def finish_save(self, directory: Path) -> dict[str, FileSum]:
        """Bring the ranks' part to the disk; its files. Raises StorageFailure."""

    async def forget(self, *, segment: int, step: int) -> None:
        """Let the journal drop what only segments before this one need."""


@dataclass(frozen=True)
class _Draft:
    """A checkpoint that has been written and not sealed."""

    step: int
    directory: Path
    facts: dict[str, Any]
    snapshot: dict[str, Any]
    written: Written
    started: float
    stall_s: float


class Saver:
    """Saves one run."""

    def __init__(
        self,
        settings: Checkpoint,
        run_dir: Path,
        *,
        facts: dict[str, Any],
        add_files: Callable[[Path], None],
        timeout_s: float,
        listener: RunListener,
    ) -> None:
        """facts: what every manifest holds. add_files(directory): writes what belongs to a
        checkpoint besides learner and queue. timeout_s: for bringing one to the disk.
        """
        self._settings, self._run_dir = settings, run_dir
        self._facts, self._add_files = facts, add_files
        self._timeout_s, self._listener = timeout_s, listener
        self._sealing: asyncio.Task[None] | None = None
        self._in_a_row = self._failures = 0
        self._awaited = False
        self._last_failure = ""
        self.saved_at: int | None = None
        """Step of the newest checkpoint that this process completed."""

    async def save(
        self, parts: SavedParts, *, step: int, facts: dict[str, Any], forget: bool, wait: bool
    ) -> Path:
        """Write a checkpoint after this learner step; with `wait` it is complete on return, or
        FaultBudgetSpent is raised. facts: of this manifest. forget: let the journal drop what is
        not needed.
        """
        started = time.perf_counter()
        self._awaited |= wait  # what is under way may be the one that is asked for
        await self.wait()
        self.check()
        if self.saved_at != step:
            self._awaited = wait
            await self._write(parts, step, facts, forget=forget, started=started)
            if wait:
                await self.wait()
                if self.saved_at != step:
                    raise FaultBudgetSpent(
                        f"the checkpoint of step {step} could not be written: "
                        f"{self._last_failure}; {self._best()}"
                    )
        return checkpoint.path_for(self._run_dir, step)

    async def wait(self) -> None:
        """Wait until a checkpoint under way is complete or failed. Raises Stalled if it is late."""
        await self.close(self._timeout_s)

    async def close(self, patience_s: float) -> None:
        """Like `wait`, for this many seconds."""
        task = self._sealing
        if task is None:
            return
        done, _ = await asyncio.wait({task}, timeout=patience_s)
        if not done:
            raise Stalled(
                f"a checkpoint was not written to the disk within {patience_s:g} s; {self._best()}"
            )
        self._sealing = None
        task.result()

    def check(self) -> None:
        """Raise an error of the background; FaultBudgetSpent after many in a row. Thread-safe."""
        task = self._sealing
        if task is not None and task.done() and (error := task.exception()) is not None:
            raise error
        if self._in_a_row >= self._settings.max_failures:
            raise FaultBudgetSpent(
                f"{self._in_a_row} checkpoints in a row could not be written, and "
                f"checkpoint.max_failures is {self._settings.max_failures}; "
                f"the last reason: {self._last_failure}; {self._best()}"
            )

    async def _write(
        self, parts: SavedParts, step: int, facts: dict[str, Any], *, forget: bool, started: float
    ) -> None:
        """Write the draft, while training waits."""
        try:
            directory = await asyncio.to_thread(checkpoint.begin, self._run_dir, step)
            snapshot, written = await parts.save(directory)
        except (OSError, StorageFailure) as error:
            await self._failed(step, error)
            return
        facts = (
            {"step": step, "policy_version": step, "updates": written.updates} | self._facts | facts
        )
        draft = _Draft(
            step, directory, facts, snapshot, written, started, time.perf_counter() - started
        )
        self._sealing = asyncio.create_task(self._seal(parts, draft, forget=forget))

    async def _seal(self, parts: SavedParts, draft: _Draft, *, forget: bool) -> None:
        """Complete the draft beside training."""
        try:
            sums = await parts.finish_save(draft.directory)
            await asyncio.to_thread(self._commit, draft, sums)
        # ranks that died are the next step's affair
        except (OSError, StorageFailure, checkpoint.CheckpointError, RunError) as error:
            await self._failed(draft.step, error, stall_s=draft.stall_s)
            return
        self._report(draft, seconds=time.perf_counter() - draft.started)
        self.saved_at, self._in_a_row = draft.step, 0
        try:
            await asyncio.to_thread(checkpoint.prune, self._run_dir, self._settings.keep)
        except OSError as error:
            self._listener.error(f"old checkpoints could not be removed: {storage.reason(error)}")
            forget = False
        # Behind that: who copies it must not meet files that go.
        self._listener.saved(draft.step, checkpoint.path_for(self._run_dir, draft.step))
        if forget and (oldest := await asyncio.to_thread(self._oldest_needed)) is not None:
            await parts.forget(segment=oldest[0], step=oldest[1])

    def _commit(self, draft: _Draft, sums: dict[str, FileSum]) -> None:
        (draft.directory / "queue.json").write_text(json.dumps(draft.snapshot), encoding="utf-8")
        self._add_files(draft.directory)
        checkpoint.commit(draft.directory, draft.facts, sums)

    def _oldest_needed(self) -> tuple[int, int] | None:
        """Journal segment and step of the oldest kept checkpoint; None without a journal."""
        kept = checkpoint.steps(self._run_dir)
        snapshots = [checkpoint.path_for(self._run_dir, step) / "queue.json" for step in kept]
        segments = [json.loads(path.read_text(encoding="utf-8"))["segment"] for path in snapshots]
        return None if not kept or None in segments else (min(segments), kept[0])

    def _report(self, draft: _Draft, *, seconds: float) -> None:
        """Record a complete checkpoint; a line if it was waited for, or not all is well."""
        nbytes = draft.written.nbytes
        self._listener.logged(
            draft.step,
            {
                "time/checkpoint_stall_s": draft.stall_s,
                "checkpoint/seconds": seconds,
                "checkpoint/mib": nbytes / 2**20,
                "checkpoint/failures": self._failures,
            },
        )
        why = f" ({draft.written.note})" if draft.written.note else ""
        if self._awaited or self._in_a_row or why:
            self._listener.note(
                f"checkpoint of step {draft.step}: {nbytes / 2**20:,.1f} MiB in {seconds:.1f} "
                f"s, training waited {draft.stall_s:.1f} s{why}"
            )

    async def _failed(self, step: int, error: Exception, *, stall_s: float = 0.0) -> None:
        """Report the failure and delete the draft."""
        self._failures += 1
        self._in_a_row += 1
        self._last_failure = storage.reason(error) if isinstance(error, OSError) else str(error)
        await asyncio.to_thread(checkpoint.discard, self._run_dir, step)
        self._listener.logged(
            step, {"time/checkpoint_stall_s": stall_s, "checkpoint/failures": self._failures}
        )
        failed = f"the checkpoint of step {step} could not be written: {self._last_failure}"
        self._listener.fault(failed)
        self._listener.error(
            f"{failed}; {await asyncio.to_thread(self._best)} (failure {self._in_a_row} in a row, "
            f"checkpoint.max_failures is {self._settings.max_failures})"
        )

    def _best(self) -> str:
        kept = checkpoint.steps(self._run_dir)
        if not kept:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is of step {kept[-1]}"


def saver_of(
    config: Config,
    *,
    model_dir: str,
    manifest: dict[str, Any] | None,
    total_steps: int,
    data: str,
    listener: RunListener,
) -> Saver:
    """Build the saver of a run. manifest: of the checkpoint that it continues. data: fingerprint of
    the training data. Raises SetupError for a checkpoint of another tokenizer.
    """
    trust = config.model.trust_remote_code
    tokenizer = tokenizer_fingerprint(model_dir, trust_remote_code=trust)
    if (
        manifest is not None
        and (note := check_origin(manifest, data=data, tokenizer=tokenizer)) is not None
    ):
        listener.note(note)
    facts = {
        "total_steps": total_steps,
        "ranks": config.learner.ranks,
        "code": code_version(),
        "data_fingerprint": data,
        "tokenizer_fingerprint": tokenizer,
    }
    return Saver(
        config.checkpoint,
        Path(config.run.dir),
        facts=facts,
        timeout_s=config.watchdog.step_timeout_s,
        listener=listener,
        add_files=lambda directory: copy_tokenizer(
            model_dir, directory / "hf", trust_remote_code=trust
        ),
    )
