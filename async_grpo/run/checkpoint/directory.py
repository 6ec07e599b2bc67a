"""Checkpoint directories: when one is complete, which is newest, which may go.

Runs in: the driver (begin, commit, latest, prune) and learner ranks (which only write files below a
begun directory). Hides the layout and the order of writes:

    <run_dir>/checkpoints/step_000123/
        learner/        the learner's own files (weights, optimizer, RNG states)
        hf/             the model as any Hugging Face tool reads it
        queue.json      the replay queue's ledger at that moment, and the segment of its journal
            that starts with it
        partial.msgpack the beginnings of responses that were being generated, with
            `checkpoint.partial_rollouts`
        manifest.json   what the caller wants to remember, and every file with its size and sha256,
            summed by who wrote it

Invariants: a checkpoint is written under a temporary name and renamed last, after the manifest and
every file are on the disk, so a directory with a final name is complete or damaged afterwards,
never half-written; whoever looks for the newest whole one is told what is wrong with newer ones;
`verify` reads every file before anything is unpickled; `prune` never removes the newest complete
checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import SetupError
from async_grpo.runtime import storage
from async_grpo.runtime.storage import FileSum

MANIFEST, MODEL = "manifest.json", "hf"
FORMAT_VERSION = 2

_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY, _REPLACED, _SUPERSEDED = ".tmp", ".old", ".superseded-"
_PICKLED = "learner"
_READERS = 8


class CheckpointError(RuntimeError):
    """A checkpoint that is incomplete, damaged or written by another format."""


@dataclass(frozen=True)
class Origin:
    """Where a learner begins: a checkpoint's directory and step, or the initial model (None, 0)."""

    path: Path | None
    step: int

    @property
    def learner(self) -> str | None:
        """What the ranks load."""
        return None if self.path is None else str(self.path / "learner")

    def snapshot(self) -> dict[str, Any] | None:
        """Return the queue at that moment."""
        if self.path is None:
            return None
        return json.loads((self.path / "queue.json").read_text(encoding="utf-8"))


def path_for(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` learner steps; nothing is created."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def begin(run_dir: Path, step: int) -> Path:
    """Create the empty draft of the checkpoint of `step`, in place of an earlier attempt."""
    directory = path_for(run_dir, step).with_suffix(_TEMPORARY)
    if directory.exists():
        shutil.rmtree(directory)
    for part in ("learner", MODEL):
        (directory / part).mkdir(parents=True)
    return directory


def discard(run_dir: Path, step: int) -> None:
    """Remove what was begun for this step and will not be finished, as far as the disk allows."""
    shutil.rmtree(path_for(run_dir, step).with_suffix(_TEMPORARY), ignore_errors=True)


def commit(
    directory: Path, manifest: dict[str, Any], written: Mapping[str, FileSum] | None = None
) -> Path:
    """Seal a directory that `begin` returned and give it its final name, which is returned.

    `manifest` is any JSON map; `format_version` and `files` are added. written: files that are on
    the disk, as their writers describe them; all others are read here. A checkpoint of the same
    step is replaced (a resumed run writes its steps again). Raises CheckpointError for a directory
    that `begin` did not make, or that lacks a file of `written`.
    """
    final = directory.with_name(directory.name.removesuffix(_TEMPORARY))
    if final == directory or not _NAME.fullmatch(final.name):
        raise CheckpointError(f"{directory} was not made by checkpoint.begin")
    files: dict[str, FileSum] = dict(written or {})
    for path in _files(directory):
        name = str(path.relative_to(directory))
        if name not in files:
            files[name] = storage.settle(path)
    _check_sizes(directory, files)
    with open(directory / MANIFEST, "w", encoding="utf-8") as file:
        sealed = {**manifest, "format_version": FORMAT_VERSION, "files": files}
        json.dump(sealed, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    for folder in {directory, *(path.parent for path in _files(directory))}:
        storage.settle_folder(folder)
    if final.exists():
        # A directory cannot be replaced in one step; `latest` finds the old one where this ends
        # between the two.
        retired = final.with_name(final.name + _REPLACED)
        if retired.exists():
            shutil.rmtree(retired)
        os.rename(final, retired)
        os.rename(directory, final)
        shutil.rmtree(retired)
    else:
        os.rename(directory, final)
    storage.settle_folder(final.parent)
    return final


def read(path: Path) -> dict[str, Any]:
    """Read the manifest and check files' sizes. Raises CheckpointError with what is wrong."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it is not a checkpoint, or was never finished"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST} is not readable JSON: {error}") from error
    if (
        not isinstance(manifest, dict)
        or manifest.get("format_version") != FORMAT_VERSION
        or not isinstance(manifest.get("files"), dict)
    ):
        raise CheckpointError(
            f"{path / MANIFEST} is not a manifest of format {FORMAT_VERSION}; use the "
            "program version that wrote it"
        )
    _check_sizes(path, manifest["files"])
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """Read, and compare every sha256. Raises CheckpointError, also for unlisted learner files."""
    manifest = read(path)
    listed = manifest["files"]
    for file in _files(path / _PICKLED):
        if (name := str(file.relative_to(path))) not in listed:
            raise CheckpointError(f"{path} is not as it was written: {name} has been added")
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda name: storage.sha256(path / name), listed)
    for name, digest in zip(listed, found, strict=True):
        if listed[name]["sha256"] != digest:
            raise CheckpointError(f"{path} is damaged: the contents of {name} have changed")
    return manifest


def step_of(path: Path) -> int:
    """Return the number of learner steps that a checkpoint directory's name states."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named like a checkpoint (step_000123)")
    return int(match[1])


def newest_whole(
    run_dir: Path, *, check: Callable[[Path], object], steps: Container[int] | None = None
) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint, of these steps or of any, that `check` (`read` or `verify`) finds
    whole, also one that was about to be replaced; and what is wrong with each newer one.
    """
    half = {path.with_suffix(""): path for path in _half_replaced(run_dir)}
    damaged: list[str] = []
    for name in sorted([*_finished(run_dir), *half], key=step_of, reverse=True):
        if steps is not None and step_of(name) not in steps:
            continue
        try:
            check(half.get(name, name))
            return half.get(name, name), damaged
        except (CheckpointError, OSError) as error:  # it may be replaced or removed meanwhile
            damaged.append(str(error))
    return None, damaged


def latest(run_dir: Path) -> Path | None:
    """Find the newest complete checkpoint, or None; also one that was about to be replaced."""
    return newest_whole(run_dir, check=read)[0]


def finish_replacing(run_dir: Path) -> bool:
    """Give a checkpoint that was about to be replaced when the run ended its name back, while no
    run writes there; whether there was one.
    """
    replaced = _half_replaced(run_dir)
    for path in replaced:
        path.rename(path.with_suffix(""))
    return bool(replaced)


def find(source: Path) -> Path:
    """Find the checkpoint that `source` is, or the newest one of a run directory. Raises SetupError
    where there is none, or its files are not all there.
    """
    if (source / MANIFEST).is_file():
        return source
    newest, damaged = newest_whole(source, check=read)
    if damaged:
        older = f"; the newest whole one is {newest}" if newest else ""
        raise SetupError(f"{damaged[0]}{older}")
    if newest is None:
        raise SetupError(
            f"{source} is no checkpoint and has none: give .../checkpoints/step_N, or a run "
            "directory with a complete checkpoint"
        )
    return newest


def set_aside(run_dir: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps than `after`, whose history ends; the new names.

    They stay readable by path; `latest`, `steps` and `prune` pass over them.
    """
    renamed = []
    for path in _finished(run_dir):
        if step_of(path) > after:
            number = next(
                number
                for number in range(1, 10**6)
                if not path.with_name(f"{path.name}{_SUPERSEDED}{number}").exists()
            )
            renamed.append(path.rename(path.with_name(f"{path.name}{_SUPERSEDED}{number}")))
    return renamed


def steps(run_dir: Path) -> list[int]:
    """List the steps of the complete checkpoints of a run directory, ascending."""
    return [step_of(path) for path in _finished(run_dir) if _is_complete(path)]


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest complete checkpoints, and what is older; what was removed.

    Newer unfinished directories stay: one may be being written. Raises ValueError for keep < 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    complete = steps(run_dir)
    if not complete:
        return []
    oldest = complete[-keep:][0]
    removed = []
    for path in sorted((run_dir / "checkpoints").iterdir()):
        match = _NAME.match(path.name)
        if match and _SUPERSEDED not in path.name and int(match[1]) < oldest:
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _finished(run_dir: Path) -> list[Path]:
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def _half_replaced(run_dir: Path) -> list[Path]:
    """Find what has been put aside for a checkpoint that did not come."""
    found = (run_dir / "checkpoints").glob(f"step_*{_REPLACED}")
    return [path for path in found if not path.with_suffix("").exists()]


def _is_complete(path: Path) -> bool:
    try:
        read(path)
    except (CheckpointError, OSError):  # it may be replaced or removed meanwhile
        return False
    return True


def _files(directory: Path) -> list[Path]:
    return sorted(
        path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST
    )


def _check_sizes(path: Path, files: Mapping[str, FileSum]) -> None:
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != entry["size"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {file.stat().st_size} bytes instead of "
                f"{entry['size']}"
            )
