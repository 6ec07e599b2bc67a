"""Files that are on the disk when a call returns, with their checksums; who can read them; what
goes wrong with a disk; storages at an address.

Runs in: any process (standard library, and fsspec for an address). Hides fsync, chunks, and how
libraries word that a disk is full.
Invariant: a checksum is of the bytes that were written, taken while they were written or read back
after the write.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from async_grpo.errors import SetupError
from async_grpo.runtime.text import first_line, without_password

_CHUNK = 2**23
_OS_ERROR = re.compile(r"os error (\d+)")


class FileSum(TypedDict):
    """What a manifest says about a file."""

    size: int
    sha256: str


class StorageFailure(Exception):
    """Something could not be written; the message says what, where and why."""


@dataclass(frozen=True, slots=True)
class Written:
    """What the ranks wrote of a checkpoint. in_memory: to be copied to the disk; note: why not, if
    so. updates: of the optimizer, so far.
    """

    nbytes: int
    in_memory: bool
    note: str
    updates: int


def reach(address: str) -> tuple[Any, str]:
    """Return fsspec's storage of an address or a path, and the path there."""
    import fsspec

    options = {"auto_mkdir": True} if fsspec.utils.get_protocol(address) == "file" else {}
    storage, path = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
    return storage, path.rstrip("/")


def check_known(address: str) -> None:
    """Look whether fsspec knows the storage, without reaching it. Raises SetupError."""
    import fsspec

    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(address))
    except (ValueError, ImportError) as error:
        hint = " (pip install 'async_grpo[storage]')" * address.startswith("s3")
        shown = without_password(address)
        raise SetupError(f"{shown}: {first_line(error)}{hint}") from error


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_to_others(path: Path) -> bool:
    """Whether every user of this machine can read a file, or list a directory."""
    folders = path.resolve().parents
    return bool(path.stat().st_mode & 0o004) and all(one.stat().st_mode & 0o001 for one in folders)


def settle(path: Path) -> FileSum:
    """Wait until a file is on the disk, and describe it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def settle_folder(folder: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> FileSum:
    """Bring a file to the disk in another directory, and describe it; its name may follow."""
    if source.stat().st_dev == target.parent.stat().st_dev:
        described = settle(source)
        os.replace(source, target)
        return described
    digest, size = hashlib.sha256(), 0
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
            size += len(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    source.unlink()
    return {"size": size, "sha256": digest.hexdigest()}


def storage_error(error: BaseException) -> OSError | None:
    """Find the operating system's error behind an exception of a library; None without one."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, OSError):
            return current
        if found := _OS_ERROR.search(str(current)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
        current = current.__cause__ or current.__context__
    return None


def reason(error: OSError) -> str:
    """Say the error in words, with the file where it is known."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"
