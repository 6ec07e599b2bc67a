"""Where a run goes on (at which checkpoint, or from its journal alone), and whether its settings
allow that; which recorded steps a learner alone can repeat, and from where.

Runs in: the driver, before any process starts. Hides what is read for it (manifests, metrics, the
settings of the last start) and what of a run directory is kept: journal segments and checkpoints
are deleted while a run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config.resume import Changes, compare, keep_chosen
from async_grpo.config.schema import Config
from async_grpo.config.stored import read_settings
from async_grpo.errors import JournalError, SetupError
from async_grpo.replay.history import find_past, read_history
from async_grpo.replay.journal import segments
from async_grpo.replay.resume import JournalSettings, last_logged_step
from async_grpo.run.checkpoint import directory as checkpoint


def earlier_evaluations(run_dir: Path, step: int) -> list[tuple[int, dict[str, float]]]:
    """Read the evaluations up to this step from `metrics.jsonl`: steps and metrics."""
    found = []
    try:
        with open(run_dir / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            for line in file:
                if '"eval/' in line and (row := json.loads(line))["step"] <= step:
                    found.append((int(row["step"]), row))
    except (FileNotFoundError, ValueError):  # a line that was cut off is the last one
        pass
    return found


def has_past(config: Config) -> bool:
    """Whether the journal may bring the run to where it was, without a checkpoint too."""
    return config.checkpoint.resume != "never" and bool(segments(Path(config.run.dir) / "journal"))


def find_checkpoint(
    config: Config, *, total_steps: int, data: str, check: Callable[[Path], dict] = checkpoint.read
) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to continue, or None, and what there is to say: of newer ones that are
    damaged, or that the run begins anew. Raises SetupError for one that does not fit, and where
    damage would let the run begin anew. data: fingerprint of the training data.
    """
    named, run_dir = config.checkpoint.resume_path, Path(config.run.dir)
    if config.checkpoint.resume == "never":
        return None, []
    if named is None:
        found, damaged = checkpoint.newest_whole(run_dir, check=check)
    else:
        found, damaged = Path(named).expanduser(), []
        verified(found, check=check)
    if found is None:
        return None, _without_checkpoint(config, damaged, data)
    if (step := checkpoint.read(found)["step"]) > total_steps:
        raise SetupError(
            f"{found} is of step {step}, the run ends at step {total_steps}; raise run.total_steps"
        )
    return found, [f"{error}; the run continues from {found}" for error in damaged]


def _without_checkpoint(config: Config, damaged: list[str], data: str) -> list[str]:
    """Say what is taken in place of checkpoints. Raises SetupError where damage leaves nothing."""
    run_dir, journal = Path(config.run.dir), config.replay.journal.enable
    reached = last_logged_step(run_dir)
    if not damaged and not (journal and has_past(config)):
        anew = f"{run_dir} has neither checkpoint nor journal: the run begins anew"
        return [f"{anew}, although it had come to learner step {reached}"] if reached else []
    settings, why = JournalSettings.of(config, start="", fingerprint=data), "there is no journal"
    if journal:  # the queue says where it is of other settings, which is no damage
        identity = settings.identity if damaged else None
        why = find_past(Path(settings.directory), None, step=0, identity=identity)[1]
    if why and (damaged or reached):
        raise SetupError(
            f"the run cannot go on from where it was: {'; '.join([*damaged, why])}. Bring the "
            "files back, or begin anew: checkpoint.resume=never, or another run.dir"
        )
    return [f"{error}; the run continues from its journal" for error in damaged]


def changes(config: Config, found: Path | None) -> Changes:
    """Compare the settings with those when the run was left. Raises SetupError for a fixed key."""
    run_dir = Path(config.run.dir)
    if found is not None:
        saved, where = checkpoint.read(found).get("config", {}), found
    elif has_past(config) and last_logged_step(run_dir):
        saved, where = read_settings(run_dir / "config.yaml"), run_dir
    else:
        return Changes()
    if not saved:
        return Changes()
    different = compare(saved, config)
    if refusal := different.refusal(where):
        raise SetupError(refusal)
    return different


def as_before(config: Config, found: Path | None) -> Config:
    """Keep the micro-batches that were chosen when the run began, on whatever machine it goes on:
    others would change the order of sums. Checkpointing changes no number, and is chosen again
    where it is `auto`; the run's own config.yaml has what was chosen.
    """
    past = read_settings(Path(config.run.dir) / "config.yaml") if has_past(config) else {}
    if not past and found is not None:
        past = checkpoint.read(found).get("config", {})
    return keep_chosen(config, past, "tokens_per_micro_batch")


def verified(found: Path, *, check: Callable[[Path], dict] = checkpoint.verify) -> dict:
    """Check a checkpoint's files; its manifest. Raises SetupError with what to do about damage."""
    try:
        return check(found)
    except (checkpoint.CheckpointError, OSError) as error:
        run_dir = found.parent.parent
        paths = [checkpoint.path_for(run_dir, step) for step in checkpoint.steps(run_dir)]
        others = [path for path in paths if path != found]
        another = f"; go on from another one: checkpoint.resume={others[-1]}" if others else ""
        raise SetupError(f"{error}{another}") from error


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
        str(change) for change in compare(read_settings(recorded), config).all if change.trains
    )
