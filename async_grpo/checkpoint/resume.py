"""Where a run goes on (at which checkpoint, or from its journal alone), and whether its settings
allow that; which recorded steps a learner alone can repeat, and from where.

Runs in: the driver, before any process starts. Hides what is read for it (manifests, metrics, the
settings of the last start) and what of a run directory is kept: journal segments and checkpoints
are deleted while a run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_grpo.checkpoint import directory as checkpoint
from async_grpo.config import yaml12
from async_grpo.config.resume import Changes, compare
from async_grpo.config.schema import Config
from async_grpo.errors import JournalError, SetupError
from async_grpo.replay.history import read_history
from async_grpo.replay.journal import segments

_TAIL_BYTES = 2**20


def last_logged_step(run_dir: Path) -> int:
    """Read the newest learner step from the end of `metrics.jsonl`; 0 if there is none."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off: by the death of its writer, or at the beginning of the tail
        if "train/loss" in row:
            return int(row["step"])
    return 0


def first_evaluation(run_dir: Path) -> tuple[int, dict[str, float]] | None:
    """Read the run's first evaluation from `metrics.jsonl`: its step and metrics; None without."""
    try:
        with open(run_dir / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            for line in file:
                if '"eval/' in line:
                    row = json.loads(line)
                    return int(row["step"]), row
    except (FileNotFoundError, ValueError):  # a line that was cut off is the last one
        pass
    return None


def has_past(config: Config) -> bool:
    """Whether the journal may bring the run to where it was, without a checkpoint too."""
    return config.checkpoint.resume != "never" and bool(segments(Path(config.run.dir) / "journal"))


def find_checkpoint(config: Config, *, total_steps: int) -> Path | None:
    """Find the checkpoint to continue, or None. Raises SetupError for one that does not fit."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    found = (
        checkpoint.latest(Path(config.run.dir)) if resume == "auto" else Path(resume).expanduser()
    )
    if found is not None:
        try:
            manifest = checkpoint.read(found)
        except checkpoint.CheckpointError as error:
            raise SetupError(str(error)) from error
        if manifest["step"] > total_steps:
            raise SetupError(
                f"{found} is of step {manifest['step']}, the run ends at step "
                f"{total_steps}; raise run.total_steps"
            )
    return found


def changes(config: Config, found: Path | None) -> Changes:
    """Compare the settings with those when the run was left. Raises SetupError for a fixed key."""
    run_dir = Path(config.run.dir)
    if found is not None:
        saved, where = checkpoint.read(found).get("config", {}), found
    elif has_past(config) and last_logged_step(run_dir):
        saved, where = yaml12.read_settings(run_dir / "config.yaml"), run_dir
    else:
        return Changes()
    if not saved:
        return Changes()
    different = compare(saved, config)
    if refusal := different.refusal(where):
        raise SetupError(refusal)
    return different


def verified(found: Path | None) -> dict | None:
    """Verify a checkpoint's files; its manifest. Raises SetupError with what to do about damage."""
    if found is None:
        return None
    try:
        return checkpoint.verify(found)
    except checkpoint.CheckpointError as error:
        run_dir = found.parent.parent
        paths = [checkpoint.path_for(run_dir, step) for step in checkpoint.steps(run_dir)]
        others = [path for path in paths if path != found]
        older = f"; go on from an older one: checkpoint.resume={others[-1]}" if others else ""
        raise SetupError(f"{error}{older}") from error


@dataclass(frozen=True)
class Course:
    """Learner steps `first` to `last`, after a checkpoint; None is the initial model."""

    first: int
    last: int
    checkpoint: Path | None


def plan_rerun(source: Path, *, after: int | None, until: int) -> Course:
    """Find the longest course through the steps recorded in `source`: from the initial model, the
    oldest checkpoint, or that of step `after`. Raises SetupError without one.
    """
    if not segments(source / "journal"):
        raise SetupError(
            f"{source} has no journal: it is not the directory of a run (run.dir), or "
            "replay.journal.enable was false"
        )
    try:
        steps = set(read_history(source / "journal").steps)
    except JournalError as error:
        raise SetupError(str(error)) from error
    kept = [step for step in checkpoint.steps(source) if step + 1 in steps]
    span = f"steps {min(steps)} to {max(steps)}" if steps else "no learner step yet"
    choices = [*([0] if 1 in steps else []), *kept]
    if not choices or (after is not None and after not in choices):
        named = ", ".join(f"--after {step}" for step in kept) or "none"
        what = (
            "has no step to begin a replay with"
            if after is None
            else f"cannot be repeated after step {after}"
        )
        raise SetupError(
            f"{source} {what}: the journal has {span}, and the checkpoints to begin with are: "
            f"{named}"
        )
    begin = min(choices) if after is None else after
    last = begin + 1
    while last + 1 in steps and last < until:
        last += 1
    return Course(begin + 1, last, checkpoint.path_for(source, begin) if begin else None)


def differences(config: Config, recorded: Path) -> Iterator[str]:
    """List `key: value there -> value here` of the settings that matter to a learner alone."""
    yield from (
        str(change)
        for change in compare(yaml12.read_settings(recorded), config).all
        if change.trains
    )
