"""Where a run goes on: at which checkpoint, or from its journal alone, and whether its settings allow that.

Runs in: the driver, before any process starts. Hides what is read for it: manifests, and the settings that the last start wrote down.
"""

from __future__ import annotations

from pathlib import Path

from async_grpo import checkpoint
from async_grpo.config.resume import Changes, compare, read_settings
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.replay.journal import segments
from async_grpo.tracking_files import last_logged_step


def has_past(config: Config) -> bool:
    """Whether the journal may bring the run to where it was, without a checkpoint too."""
    return config.checkpoint.resume != "never" and bool(segments(Path(config.run.dir) / "journal"))


def find_checkpoint(config: Config, *, total_steps: int) -> Path | None:
    """The checkpoint that the run continues, its files looked at; None where there is none. Raises SetupError for one that does not fit."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    found = checkpoint.latest(Path(config.run.dir)) if resume == "auto" else Path(resume).expanduser()
    if found is not None:
        try:
            manifest = checkpoint.read(found)
        except checkpoint.CheckpointError as error:
            raise SetupError(str(error)) from error
        if manifest["step"] > total_steps:
            raise SetupError(f"{found} is of step {manifest['step']}, the run ends at step {total_steps}; raise run.total_steps")
    return found


def changes(config: Config, found: Path | None) -> Changes:
    """What is set otherwise than when the run was left, by the checkpoint or, without one, by its directory. Raises SetupError for a fixed key."""
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


def verified(found: Path | None) -> dict | None:
    """The manifest, after every file was compared with its checksum. Raises SetupError with what to do where one is damaged."""
    if found is None:
        return None
    try:
        return checkpoint.verify(found)
    except checkpoint.CheckpointError as error:
        others = [step for step in checkpoint.steps(found.parent.parent) if checkpoint.path_for(found.parent.parent, step) != found]
        older = f"; go on from an older one: checkpoint.resume={checkpoint.path_for(found.parent.parent, others[-1])}" if others else ""
        raise SetupError(f"{error}{older}") from error
