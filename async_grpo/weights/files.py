"""Weights as files, in a directory that all nodes see, or in a storage that fsspec reaches.

Runs in: relays; the driver, at both ends of a start. The relay of the learner's node writes each
version once, those of other nodes read it at their pace (`weight_sync.files`). A whole copy and
what changed from each write to the next are a chain of parts:

    ADDRESS/async_grpo-RUN-START/000007-3fa2c1d0.whole    header, a copy
    ADDRESS/async_grpo-RUN-START/000008-3fa2c1d0.delta    header, what changed since (`delta`)
    RUN_DIRECTORY/weights/async_grpo-RUN-START.files      the address, as long as there may be files

Hides names, headers, and storages that show files late. Invariants: a name is used once; the header
is compared with all that the part says before a byte is used, so that the file of another part,
start or run, or one that was cut off, is refused; what the newest chain needs is not removed, nor
what the one before it needs.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from async_grpo.runtime.storage import reach
from async_grpo.weights import delta
from async_grpo.weights.transport import TornTransfer

Write = tuple[str, int]
"""One write in shared memory: the segment's path, and the number of the write there."""

MOST_PARTS = 64
"""Parts of a chain, all of which a newcomer reads."""
_CHUNK = 2**23
_HEADER = 1024
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ChainPart:
    """What makes a copy of the weights, or makes it of an earlier one. source: the learner's write
    that it leads to; base: the one that it begins from, None for a whole copy. of: bytes of a copy;
    nbytes: its own. name, crc: of its file.
    """

    source: Write
    of: int
    nbytes: int
    base: Write | None = None
    name: str = ""
    crc: int = 0

    def header(self) -> bytes:
        """Return the beginning of the file, which is written before its checksum is known."""
        return json.dumps(asdict(replace(self, crc=0))).encode().ljust(_HEADER)


class WeightFiles:
    """The files of one start, for one relay: `save` and `add` on the learner's node, `fill` on
    every other. `chain` leads to the newest version; it is empty before the first.
    """

    def __init__(self, address: str, *, key: str, fallback: Path) -> None:
        """key: of the start. fallback: a directory in the run's."""
        self._address = address
        self._folder = f"async_grpo-{fallback.parent.resolve().name}-{key}"
        self._mark = fallback / f"{self._folder}.files"
        self._token, self._count = uuid.uuid4().hex[:8], 0
        self.chain: list[ChainPart] = []
        self._before: list[ChainPart] = []
        self._apart: list[ChainPart] = []

    def next_base(self) -> Write | None:
        """Return the write that the next part may begin from; None: a whole copy is due."""
        if not self.chain or len(self.chain) == MOST_PARTS:
            return None
        if 2 * sum(part.nbytes for part in self.chain[1:]) > self.chain[0].of:
            return None
        return self.chain[-1].source

    def save(self, source: Write, data: np.ndarray, *, of: int, base: Write | None) -> ChainPart:
        """Write a part with the bytes `data`. Raises what the storage raises."""
        if not self._count:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch(mode=0o600)  # an address may have a key in it
            self._mark.write_text(self._address, encoding="utf-8")
        self._count += 1
        kind, crc = "whole" if base is None else "delta", 0
        name = f"{self._folder}/{self._count:06d}-{self._token}.{kind}"
        part = ChainPart(source, of, data.nbytes, base, name)
        storage, root = reach(self._address)
        with storage.open(f"{root}/{name}", "wb") as file:
            file.write(part.header())
            for start in range(0, data.nbytes, _CHUNK):
                chunk = memoryview(data[start : start + _CHUNK])
                crc = zlib.crc32(chunk, crc)
                file.write(chunk)
        return replace(part, crc=crc)

    def add(self, part: ChainPart, *, version: bool) -> list[ChainPart]:
        """Return the chain that ends with a saved part, and remove what nobody needs any more.
        version: others may begin from it; else it is of a self-check, one of which is under way.
        """
        gone, found = list[ChainPart](), [*self.chain, part] if part.base is not None else [part]
        if not version:
            gone, self._apart = self._apart, found
        elif part.base is None:
            gone, self._before = self._before, self.chain
        self.chain = found if version else self.chain
        storage, root = reach(self._address)
        for one in gone:
            with suppress(Exception):  # it goes at the end of the start
                storage.rm_file(f"{root}/{one.name}")
        return found

    def fill(self, part: ChainPart, buffer: np.ndarray, *, until: float) -> None:
        """Bring the copy in `buffer` [of] uint8 to where a part leads, or raise and leave a mixture
        there. until: when the storage has to show it, by the monotonic clock.
        """
        header, crc, done = part.header(), 0, 0
        data = buffer if part.base is None else np.empty(part.nbytes, np.uint8)
        storage, root = reach(self._address)
        while not storage.exists(f"{root}/{part.name}") and time.monotonic() < until:
            time.sleep(_POLL_S)
        with storage.open(f"{root}/{part.name}", "rb") as file:
            if file.read(len(header)) != header or part.of != buffer.nbytes:
                raise TornTransfer(f"{part.name} is of other weights, or of another start")
            while chunk := file.read(min(_CHUNK, part.nbytes - done)):
                data[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
                crc, done = zlib.crc32(chunk, crc), done + len(chunk)
            if (done, crc) != (part.nbytes, part.crc) or file.read(1):
                raise TornTransfer(f"{part.name} has other bytes than were written")
        if part.base is not None:
            delta.apply(data, buffer, (part.base, part.source))

    def close(self) -> None:
        """Remove the files, if this relay wrote them."""
        if self._count:
            _remove(self._mark)


def remove_files(fallback: Path, *, wait_s: float) -> str:
    """Remove the files that starts of this run left; a line on those that stay after `wait_s`
    seconds, or "". fallback: a directory in the run's.
    """
    marks = list(fallback.glob("*.files"))

    def remove() -> None:
        for mark in marks:
            with suppress(Exception):  # what stays is told
                _remove(mark)

    removing = threading.Thread(target=remove, daemon=True)
    removing.start()
    removing.join(wait_s)
    left = ", ".join(mark.stem for mark in marks if mark.exists())
    return f"weights of an earlier start could not be removed from the storage: {left}" * bool(left)


def _remove(mark: Path) -> None:
    storage, root = reach(mark.read_text(encoding="utf-8"))
    with suppress(FileNotFoundError):
        storage.rm(f"{root}/{mark.stem}", recursive=True)
    mark.unlink(missing_ok=True)
