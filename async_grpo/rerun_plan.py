"""Which recorded steps a learner alone can repeat, and from where.

Runs in: the driver. Hides what of a run directory has been kept: segments of the journal and checkpoints are deleted while a run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_grpo import checkpoint
from async_grpo.config.resume import compare, read_settings
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.replay.history import read_history
from async_grpo.replay.journal import JournalError, segments


@dataclass(frozen=True)
class Course:
    """Learner steps `first` to `last`, after a checkpoint; None is the initial model."""

    first: int
    last: int
    checkpoint: Path | None


def plan_rerun(source: Path, *, after: int | None, until: int) -> Course:
    """The longest course through the steps that `source` recorded: from the initial model, the oldest checkpoint, or that of step `after`.

    Raises SetupError where there is none.
    """
    if not segments(source / "journal"):
        raise SetupError(f"{source} has no journal: it is not the directory of a run (run.dir), or replay.journal.enable was false")
    try:
        steps = set(read_history(source / "journal").steps)
    except JournalError as error:
        raise SetupError(str(error)) from error
    kept = [step for step in checkpoint.steps(source) if step + 1 in steps]
    recorded = f"the journal has steps {min(steps)} to {max(steps)}" if steps else "the journal has no learner step yet"
    choices = [*([0] if 1 in steps else []), *kept]
    if not choices or after is not None and after not in choices:
        named = ", ".join(f"--after {step}" for step in kept) or "none"
        what = "has no step to begin a replay with" if after is None else f"cannot be repeated after step {after}"
        raise SetupError(f"{source} {what}: {recorded}, and the checkpoints to begin with are: {named}")
    begin = min(choices) if after is None else after
    last = begin + 1
    while last + 1 in steps and last < until:
        last += 1
    return Course(begin + 1, last, checkpoint.path_for(source, begin) if begin else None)


def differences(config: Config, recorded: Path) -> Iterator[str]:
    """`key: value there -> value here` of every setting that matters to a learner alone; nothing where the other file cannot be read."""
    yield from (str(change) for change in compare(read_settings(recorded), config).all if change.trains)
