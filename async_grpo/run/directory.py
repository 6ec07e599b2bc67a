"""The directory of a run, which one start at a time has.

Runs in: the driver. Hides the lock, what a start writes there first, and how it is told where the
run goes on:

    lock.json       who has the directory (`runtime.run_lock`)
    config.yaml     all settings of the newest start
    status.json     what the console knows (`observe.console.status_file`)
    metrics.jsonl   a line per learner step: one history
    checkpoints/    `checkpoint.directory`

Invariants: nothing is written before the directory is taken; a start that lost it finds out
(`check_own`), and its run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.errors import DirectoryTaken
from async_grpo.observe.console.console import Console
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint import mirror
from async_grpo.run.checkpoint.resume import changes, find_checkpoint
from async_grpo.run.preflight.run_check import Checked
from async_grpo.runtime.run_lock import RunLock


class RunDirectory:
    """A run's directory, as one start of the run has it."""

    def __init__(self, path: Path, *, lost: Callable[[DirectoryTaken], None]) -> None:
        """lost: told, in another thread, when another start has taken the directory."""
        self.path = path
        self._lock = RunLock(path, lost=self._give_up)
        self._lost = lost
        self._taken: DirectoryTaken | None = None

    def take(
        self, *, note: Callable[[str], None], check: Callable[[], None], copied: str | None = None
    ) -> bool:
        """Take the directory, bring what it lacks from the address `copied`, and finish what
        another start had begun to replace there; whether what was read in it before may have
        changed. note, check: as of `RunLock.acquire`. Raises SetupError where another run has it.
        """
        found = self._lock.acquire(note=note, check=check)
        if copied is not None:
            mirror.fetch(copied, self.path, note=note, check=check)
        changed = [found, mirror.settle(self.path), checkpoint.finish_replacing(self.path)]
        return any(changed)

    def check_own(self) -> None:
        """Raise DirectoryTaken once another start has it."""
        if self._taken is not None:
            raise self._taken

    def whole_checkpoint(
        self, config: Config, facts: Checked, *, note: Callable[[str], None]
    ) -> tuple[Checked, dict[str, Any] | None]:
        """Choose the checkpoint again, by the contents of all files, and say why; what is known
        then, and its manifest, None where the run begins without one. Raises SetupError.
        """
        found, notes = find_checkpoint(
            config, total_steps=facts.total_steps, data=facts.fingerprint, check=checkpoint.verify
        )
        for text in notes:
            note(f"warning: {text}")
        facts = replace(facts, checkpoint=found, changes=changes(config, found))
        return facts, None if found is None else checkpoint.read(found)

    def begin(self, config: Config, console: Console) -> None:
        """Write down the settings, and from now on the state that the console shows."""
        self.write(config)
        console.begin_run(self.path, run=config.run.name)

    def begin_again(self, config: Config) -> None:
        """Write down the settings, and forget the metrics: of an earlier replay, while replays are
        compared with each other.
        """
        (self.path / "metrics.jsonl").write_text("", encoding="utf-8")
        self.write(config)

    def go_on(self, step: int, *, note: Callable[[str], None]) -> None:
        """Set checkpoints of another history than that up to `step` aside."""
        for path in checkpoint.set_aside(self.path, step):
            note(f"a checkpoint after step {step}, where this run continues, is set aside: {path}")

    def release(self) -> None:
        """Let another start have it. A second call does nothing."""
        self._lock.release()

    def write(self, config: Config) -> None:
        """Write down the settings."""
        (self.path / "config.yaml").write_text(dump(config), encoding="utf-8")

    def _give_up(self, why: str) -> None:
        self._taken = DirectoryTaken(why)
        self._lost(self._taken)
