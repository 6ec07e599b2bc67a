"""The wire between the hosts of `hosts`: Ethernet frames that come late, get lost, queue up or do
not arrive.

Runs in: a process of its own, as `python wire.py CONTROL PID...`, in a network namespace of its
own, where it makes one TAP device per host and gives it away to the network of the process PID,
as `wire`. CONTROL is a file of JSON, one object per host in order, read every 0.1 s: `delay_s`
(each way), `loss` (share of the frames), `bytes_per_s` and `cut`. What is set for a host holds for
all that it sends and all that it is sent. Imports nothing of ours, so that it starts at once.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

READ_S = 0.1
BACKLOG_S = 0.5
"""What would wait longer for a slow wire is lost, as in the queue of a router."""
MTU = 9000
ADDRESS = "02:00:00:00:00:{:02x}"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 2, 0x1000


def tap(index: int, pid: int) -> int:
    """Make the device of one host and give it to the network of that process."""
    handle, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"host{index}"
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    address = ADDRESS.format(index)
    for change in (["mtu", str(MTU)], ["address", address], ["name", "wire", "netns", str(pid)]):
        subprocess.run(["ip", "link", "set", "dev", name, *change], check=True, timeout=10)
    return handle


class Wire:
    """All ends, and the frames that are under way."""

    def __init__(self, control: Path, ends: list[int]) -> None:
        self._control, self._ends = control, ends
        self._set: list[dict[str, float]] = [{} for _ in ends]
        self._read_at = 0.0
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._busy_until: dict[tuple[int, str], float] = {}

    def turn(self) -> None:
        """Wait for what happens next, at most until the file is read again."""
        due = min([self._read_at, *[frame[0] for frame in self._under_way[:1]]])
        ready, _, _ = select.select(self._ends, [], [], max(0.0, due - time.monotonic()))
        now = time.monotonic()
        if now >= self._read_at:
            self._set, self._read_at = json.loads(self._control.read_text()), now + READ_S
        for end in ready:
            self._take(self._ends.index(end), os.read(end, 65536), now)
        while self._under_way and self._under_way[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._under_way)
            try:
                os.write(self._ends[target], frame)
            except (BlockingIOError, OSError):
                continue  # its device is full or down: the frame is lost

    def _take(self, source: int, frame: bytes, now: float) -> None:
        known = frame[:5] == b"\x02\0\0\0\0" and frame[5] < len(self._ends)
        for target in [frame[5]] if known else range(len(self._ends)):
            if target == source:
                continue
            due: float | None = now
            for index, way in ((source, "out"), (target, "in")):
                due = due and self._passes(index, way, len(frame), due)
            if due is not None:
                self._count += 1
                heapq.heappush(self._under_way, (due, self._count, target, frame))

    def _passes(self, index: int, way: str, size: int, at: float) -> float | None:
        """When a frame that comes at `at` is through, None if never."""
        what = self._set[index]
        if what.get("cut") or random.random() < what.get("loss", 0.0):
            return None
        if rate := what.get("bytes_per_s"):
            begin = max(at, self._busy_until.get((index, way), 0.0))
            if begin - at > BACKLOG_S:
                return None
            at = self._busy_until[index, way] = begin + size / rate
        return at + what.get("delay_s", 0.0)


if __name__ == "__main__":
    wire = Wire(Path(sys.argv[1]), [tap(index, int(pid)) for index, pid in enumerate(sys.argv[2:])])
    print("ready", flush=True)
    while True:
        wire.turn()
