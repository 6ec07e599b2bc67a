"""The copy of a run directory at an address (`checkpoint.mirror`), and a run that goes on from it.

Runs in: the driver; copies are made by a thread of its own, at the start, after each checkpoint and
at the end. Hides the storage, which fsspec reaches:

    ADDRESS/RUN/mirror.json   which objects are the copy: file -> object, size, sha256
    ADDRESS/RUN/FILE          as in the run directory; FILE.N where the copy before still needs FILE

    links to the files -> objects that are new -> mirror.json -> objects of the copy before removed

Invariants: what mirror.json lists is whole, whenever the driver or the storage dies; no step and no
checkpoint waits for the storage; one start of one run writes to a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from async_grpo.errors import RunError, SetupError
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.runtime.storage import check_known, reach, sha256
from async_grpo.runtime.text import first_line, without_password

INDEX, OWN = "mirror.json", "run_key.json"
HELD, FETCHED = "held.tmp", "fetched.tmp"
FILES = (
    *("config.yaml", "plan.json", "code.json", "code.diff", "metrics.jsonl", "samples.jsonl"),
    *("timeline.jsonl", "timeline.1.jsonl", "*_sent.json", "report/*", "post_mortem/*"),
)
"""What is copied besides checkpoints and journal."""
STUCK_S = 60.0
"""How long the end of a run waits for a storage that takes nothing."""
ANSWER_S = 10.0
"""How long the start waits to learn whose copy is at the address."""
_CHUNK = 2**22
_FIRST_RETRY_S, _LAST_RETRY_S, _POLL_S = 1.0, 60.0, 0.1

Entry = dict[str, Any]
Listed = dict[str, Any]
"""`mirror.json`. run: key of the run. start: of the start that wrote it. number: of the copy.
files: their entries. stale: objects that are not of this copy, or not yet.
"""


class MirrorTaken(SetupError):
    """The copy at the address is of another run, or another start goes on with it."""


class _Changed(Exception):
    """A file was replaced or removed while it was copied."""


class Mirror:
    """Copies one run directory: `begin`, `ready`, any number of `wake`, `finish`."""

    def __init__(self, address: str, run_dir: Path, *, note: Callable[[str], None]) -> None:
        """address: of the folder in which the run has one. note: shows a line."""
        self.address = f"{address.rstrip('/')}/{run_dir.resolve().name}"
        self._run_dir, self._note = run_dir, note
        self._start = uuid.uuid4().hex
        self._sent: dict[str, tuple[int, ...]] = {}
        """Object -> what `stat` said of the file that it is."""
        self._moved_at, self._error = time.monotonic(), ""
        self._answered, self._ending = threading.Event(), threading.Event()
        self._wake, self._taken = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="async_grpo-mirror", daemon=True)

    def begin(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def ready(self, check: Callable[[], None]) -> str:
        """Wait a while for the storage; a line that says where the copy is. check: called
        meanwhile. Raises MirrorTaken.
        """
        until = time.monotonic() + ANSWER_S
        while not self._answered.wait(_POLL_S) and time.monotonic() < until:
            check()
        if self._taken:
            raise MirrorTaken(self._taken)
        now = "copied to" if self._answered.is_set() else "to be copied, once it answers, to"
        return f"{now} {self}; to go on from there: checkpoint.resume={self}"

    def __str__(self) -> str:
        return without_password(self.address)

    def wake(self) -> None:
        """Copy what is new."""
        self._wake.set()

    def finish(self, *, limit_s: float) -> str:
        """Copy the rest, while the storage takes it, `limit_s` at most; "", or what is wrong."""
        if self._thread.ident is None:
            return ""
        self._moved_at, until = time.monotonic(), time.monotonic() + limit_s
        self._ending.set()
        self._wake.set()
        while self._thread.is_alive():
            self._thread.join(_POLL_S)
            if time.monotonic() > min(until, self._moved_at + STUCK_S):
                self._error = self._error or "the storage is too slow, or does not answer"
                break
        return self._taken or (
            self._error
            and (
                f"the copy at {self} is not complete ({self._error}); copy the rest with: "
                f"async-grpo report --sync {shlex.quote(str(self._run_dir))}"
            )
        )

    def copy(self) -> int:
        """Make the copy what the run directory is now; how many files were sent. Raises
        MirrorTaken, and what the storage raises.
        """
        storage, root = reach(self.address)
        listed = self._listed(storage, root)
        number = listed["number"] + 1
        before: dict[str, Entry] = listed["files"]
        with self._held() as held:
            files = {
                name: before[name]
                for name, path in held.items()
                if name in before and self._is_same(path, before[name])
            }
            new = {
                name: f"{name}.{number}" if name in before else name
                for name in held
                if name not in files
            }
            if files.keys() == before.keys() and not new:
                return 0
            listed |= {"number": number, "start": self._start}
            listed["stale"] = [*listed["stale"], *new.values()]
            _write(storage, root, listed)
            for name, target in new.items():
                files[name] = self._send(storage, root, held[name], target)
        used = {entry["object"] for entry in files.values()}
        objects = {*listed["stale"], *(entry["object"] for entry in before.values())}
        listed |= {"files": files, "stale": sorted(objects - used)}
        _write(storage, root, listed)
        for name in listed["stale"]:
            with suppress(FileNotFoundError):
                storage.rm_file(f"{root}/{name}")
            self._moved_at = time.monotonic()
        if listed["stale"]:
            _write(storage, root, listed | {"stale": []})
        return len(new)

    def _listed(self, storage: Any, root: str) -> Listed:
        """Read what the copy is, and look whose it is; from then on it is this start's."""
        own, found = _own(self._run_dir), _read(storage, root)
        if found and found["run"] != own["run"]:
            raise MirrorTaken(
                f"{self} has the copy of another run: set another checkpoint.mirror or run.dir, "
                f"or go on with that run: checkpoint.resume={self}"
            )
        if found and found["start"] not in own["starts"]:
            raise MirrorTaken(
                f"another start of this run has written to {self} since: go on from there "
                f"(checkpoint.resume={self}, in a new run.dir), or set another checkpoint.mirror"
            )
        if self._start not in own["starts"]:  # first: it may be there and nobody have heard of it
            _tell_own(self._run_dir, own["run"], *own["starts"], self._start)
        self._answered.set()
        return found or {"run": own["run"], "number": 0, "files": {}, "stale": []}

    def _is_same(self, path: Path, entry: Entry) -> bool:
        """Whether a file is as it was sent; one that another start sent is read once."""
        state = _state(path)
        if path.stat().st_size != entry["size"]:
            return False
        if self._sent.get(entry["object"]) != state and sha256(path) != entry["sha256"]:
            return False
        self._sent[entry["object"]] = state
        return True

    @contextmanager
    def _held(self) -> Iterator[dict[str, Path]]:
        """Hold what there is, by names: as links, so that nothing is removed meanwhile."""
        folder = self._run_dir / HELD
        shutil.rmtree(folder, ignore_errors=True)
        held: dict[str, Path] = {}
        try:
            for path in _present(self._run_dir):
                name, link = str(path.relative_to(self._run_dir)), folder / str(len(held))
                folder.mkdir(mode=0o700, exist_ok=True)
                try:
                    os.link(path, link)
                except FileNotFoundError:
                    continue
                except OSError:  # of a file system without links, or another one's
                    link = path
                held[name] = link
            yield held
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _send(self, storage: Any, root: str, path: Path, name: str) -> Entry:
        """Copy a file as long as it is now; its entry. Raises what the storage raises."""
        state, digest, target = _state(path), hashlib.sha256(), f"{root}/{name}"
        left = size = path.stat().st_size
        with open(path, "rb") as source, storage.open(target, "wb") as out:
            while left:
                if not (chunk := source.read(min(_CHUNK, left))):
                    raise _Changed
                out.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
                self._moved_at = time.monotonic()
        if storage.info(target)["size"] != size:
            raise OSError(f"{name} has {storage.info(target)['size']} bytes there, not {size}")
        self._sent[name] = state
        return {"object": name, "size": size, "sha256": digest.hexdigest()}

    # ---- the thread ----

    def _run(self) -> None:
        delay, failed = _FIRST_RETRY_S, False
        while True:
            self._wake.clear()
            last = self._ending.is_set()  # read last: what comes now wakes again
            try:
                self.copy()
            except _Changed:
                continue
            except MirrorTaken as error:
                self._error = self._taken = str(error)
                self._note(f"warning: {error}; nothing is copied")
                self._answered.set()
                return
            except Exception as error:  # noqa: BLE001 - shown; each storage has errors of its own
                self._error = f"{type(error).__name__}: {first_line(error)}"
                if not failed:
                    self._note(f"{self}: {self._error}; training continues, the copy comes later")
                failed = True
                (self._wake if last else self._ending).wait(delay)
                delay = min(2 * delay, _LAST_RETRY_S)
                continue
            if failed:
                self._note(f"{self} answers again, and has what there is")
            self._error, failed, delay = "", False, _FIRST_RETRY_S
            if last:
                return
            self._wake.wait()


def check_addresses(*addresses: str | None) -> None:
    """Look whether fsspec knows these storages, without reaching them. Raises SetupError."""
    for address in filter(None, addresses):
        if "://" not in address:
            raise SetupError(f"checkpoint.mirror is {address}, no address: scheme://...")
        check_known(address)


def fetch(
    address: str, run_dir: Path, *, note: Callable[[str], None], check: Callable[[], None]
) -> None:
    """Bring the copy at an address to a run directory that has no past; `settle` puts it in place.
    check: called meanwhile. Raises SetupError where the copy is not there, or not whole.
    """
    draft, shown = run_dir / "fetching.tmp", without_password(address.rstrip("/"))
    if any((run_dir / name).exists() for name in (FETCHED, "checkpoints", "journal")):
        note(f"{run_dir} has a past of its own: nothing is brought from {shown}")
        return
    shutil.rmtree(draft, ignore_errors=True)
    try:
        storage, root = reach(address.rstrip("/"))
        if (listed := _read(storage, root)) is None:
            raise SetupError(f"{shown} has no copy of a run: {INDEX} is missing")
        note(f"bringing {len(listed['files'])} files of {shown} to {run_dir}")
        for name, entry in listed["files"].items():
            if ".." in name or name.startswith("/"):
                raise ValueError(f"{INDEX} has the name {name!r}")
            _receive(storage, f"{root}/{entry['object']}", draft / name, entry, check)
        _tell_own(draft, listed["run"], listed["start"])
    except RunError:
        raise
    except Exception as error:  # each storage has errors of its own
        raise SetupError(
            f"{shown} cannot be brought: {type(error).__name__}: {first_line(error)}"
        ) from error
    os.replace(draft, run_dir / FETCHED)


def settle(run_dir: Path) -> bool:
    """Put what `fetch` has brought in its place, and remove what a killed copy left; whether there
    was something.
    """
    shutil.rmtree(run_dir / HELD, ignore_errors=True)
    if not (whole := run_dir / FETCHED).exists():
        return False
    for path in whole.iterdir():
        if (target := run_dir / path.name).is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    whole.rmdir()
    return True


def _receive(
    storage: Any, name: str, target: Path, entry: Entry, check: Callable[[], None]
) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with storage.open(name, "rb") as source, open(target, "wb") as out:
        while chunk := source.read(_CHUNK):
            check()
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise OSError(f"{entry['object']} is damaged: it is not what {INDEX} says")


def _present(run_dir: Path) -> Iterator[Path]:
    """List what a copy has: the journal last, which thereby has all that the others know of."""
    for step in checkpoint.steps(run_dir):
        folder = checkpoint.path_for(run_dir, step)
        yield from sorted(path for path in folder.rglob("*") if path.is_file())
    for pattern in (*FILES, "journal/*.journal"):
        yield from sorted(path for path in run_dir.glob(pattern) if path.is_file())


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _own(run_dir: Path) -> dict[str, Any]:
    """Read the key of the run, and the starts whose copy may be gone on with."""
    if not (run_dir / OWN).exists():
        _tell_own(run_dir, uuid.uuid4().hex)
    return dict(json.loads((run_dir / OWN).read_text(encoding="utf-8")))


def _tell_own(run_dir: Path, run: str, *starts: str) -> None:
    new = run_dir / f"{OWN}.new"
    new.write_text(json.dumps({"run": run, "starts": starts}), encoding="utf-8")
    os.replace(new, run_dir / OWN)


def _read(storage: Any, root: str) -> Listed | None:
    try:
        return dict(json.loads(storage.cat_file(f"{root}/{INDEX}")))
    except FileNotFoundError:
        return None


def _write(storage: Any, root: str, listed: Listed) -> None:
    """Replace mirror.json; a file system replaces it by renaming."""
    storage.pipe_file(f"{root}/{INDEX}.new", json.dumps(listed, indent=1).encode())
    storage.mv(f"{root}/{INDEX}.new", f"{root}/{INDEX}")
