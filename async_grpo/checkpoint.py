"""Checkpoint directories: when one is complete, which is newest, which may go.

Runs in: the driver (begin, commit, latest, prune) and learner ranks (which only write files below a begun directory). Hides the
layout and the order of writes:

    <run_dir>/checkpoints/step_000123/
        learner/        the learner's own files (weights, optimizer, RNG states)
        hf/             the model as any Hugging Face tool reads it
        queue.json      the replay queue's ledger at that moment, and the segment of its journal that starts with it
        manifest.json   what the caller wants to remember, and every file with its size and, up to 64 MiB, its sha256

Invariants: a checkpoint is written under a temporary name and renamed last, after the manifest and every file are on the disk, so a
directory with a final name is complete or damaged afterwards, never half-written; `latest` returns only one whose files are all
there with their sizes; `prune` never removes the newest complete checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY, _SUPERSEDED = ".tmp", ".superseded-"
_HASH_LIMIT = 64 * 2**20


class CheckpointError(RuntimeError):
    """A checkpoint that is incomplete, damaged or written by another format."""


def path_for(run_dir: Path, step: int) -> Path:
    """Final directory of the checkpoint after `step` learner steps; nothing is created."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def begin(run_dir: Path, step: int) -> Path:
    """Create and return the empty temporary directory (with `learner/` and `hf/`) to write the checkpoint of `step` into.

    What an interrupted attempt at the same step left there is removed.
    """
    final = path_for(run_dir, step)
    directory = final.with_name(final.name + _TEMPORARY)
    if directory.exists():
        shutil.rmtree(directory)
    for part in ("learner", "hf"):
        (directory / part).mkdir(parents=True)
    return directory


def commit(directory: Path, manifest: dict[str, Any]) -> Path:
    """Seal a directory that `begin` returned and give it its final name, which is returned.

    `manifest` is any JSON map; `format_version` and `files` are added. A checkpoint of the same step is replaced (a resumed run
    writes its steps again). Raises CheckpointError for a directory that `begin` did not make.
    """
    if not directory.name.endswith(_TEMPORARY) or not _NAME.fullmatch(directory.name.removesuffix(_TEMPORARY)):
        raise CheckpointError(f"{directory} was not made by checkpoint.begin")
    final = directory.with_name(directory.name.removesuffix(_TEMPORARY))
    files = {str(path.relative_to(directory)): _describe(path) for path in _files(directory)}
    with open(directory / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**manifest, "format_version": FORMAT_VERSION, "files": files}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    for folder in {directory, *(path.parent for path in _files(directory))}:
        _sync(folder)
    if final.exists():
        # A directory cannot be replaced in one step; the old one keeps a name that `latest` ignores until it is gone.
        retired = final.with_name(f"{final.name}.old")
        if retired.exists():
            shutil.rmtree(retired)
        os.rename(final, retired)
        os.rename(directory, final)
        shutil.rmtree(retired)
    else:
        os.rename(directory, final)
    _sync(final.parent)
    return final


def read(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint; raises CheckpointError with what is wrong otherwise.

    Checks that every file is there with its size. Contents are checked by `verify`, which reads all small files.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {MANIFEST}: it is not a checkpoint, or was never finished") from error
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST} is not readable JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{path / MANIFEST} is not a manifest of format {FORMAT_VERSION}; use the program version that wrote it")
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != entry["size"]:
            raise CheckpointError(f"{path} is damaged: {name} has {file.stat().st_size} bytes instead of {entry['size']}")
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """Like `read`, and compares the sha256 of every file that has one. Raises CheckpointError."""
    manifest = read(path)
    for name, entry in manifest["files"].items():
        if "sha256" in entry and _sha256(path / name) != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged: the contents of {name} have changed")
    return manifest


def step_of(path: Path) -> int:
    """The number of learner steps that a checkpoint directory's name states."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named like a checkpoint (step_000123)")
    return int(match[1])


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run directory, or None. Incomplete and damaged ones are passed over."""
    return next((path for path in reversed(_finished(run_dir)) if _is_complete(path)), None)


def set_aside(run_dir: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps than `after`: the run goes on from there and writes its own. Returns the new names.

    They can be read by path still; `latest`, `steps` and `prune` are not told by their step numbers any more.
    """
    renamed = []
    for path in _finished(run_dir):
        if step_of(path) > after:
            number = next(number for number in range(1, 10**6) if not path.with_name(f"{path.name}{_SUPERSEDED}{number}").exists())
            renamed.append(path.rename(path.with_name(f"{path.name}{_SUPERSEDED}{number}")))
    return renamed


def steps(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints of a run directory, ascending."""
    return [step_of(path) for path in _finished(run_dir) if _is_complete(path)]


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest complete checkpoints, and everything older than them; returns what was removed.

    Unfinished directories newer than those are left alone: one of them may be being written. Raises ValueError for keep < 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    complete = [path for path in _finished(run_dir) if _is_complete(path)]
    if not complete:
        return []
    oldest = step_of(complete[-keep:][0])
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


def _is_complete(path: Path) -> bool:
    try:
        read(path)
    except CheckpointError:
        return False
    return True


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    size = path.stat().st_size
    return {"size": size, "sha256": _sha256(path)} if size <= _HASH_LIMIT else {"size": size}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
