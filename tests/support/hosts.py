"""Machines with networks of their own, on this one: namespaces, and a wire between them that can be
slow, lossy or cut.

    with Hosts(shared, ["a", "b"]) as hosts:
        a, b = hosts
        a.boot(); b.boot()
        hosts.change("b", cut=True)

A host has a network (10.99.0.1, .2, ...), mounts, processes, a name, /tmp, /dev/shm and a home
directory of its own; `shared` is the storage that all of them see under the same path. What a
machine that loses its power takes with it, `Host.kill` takes: all processes, and what lay in /tmp
and /dev/shm. Its network stays, so that it may boot again.

    network of a host   held by a `sleep`, which has nothing else of its own
    wire                `wire.py`, in a network of its own: nothing changes in this machine's
    host                process 1 of a namespace of processes (`host.sh`), started in that network

Everything dies with the thread that made it, by the kernel's doing, so a test that is killed leaves
no host (`PR_SET_PDEATHSIG`; process 1 of a namespace takes all others with it).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
NETWORK, RAY_PORT = "10.99.0.{}", 6379
BOOT_S, GONE_S, RAY_START_S = 30.0, 30.0, 120.0
OBJECT_STORE = 200_000_000
_PR_SET_PDEATHSIG, _CLONE_NEWNET = 1, 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
Answer = TypeVar("Answer")


@cache
def unavailable() -> str:
    """Why this machine cannot have hosts, or ""."""
    missing = [name for name in ("ip", "nsenter", "unshare", "mount") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} of iproute2 and util-linux not found"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    tried = subprocess.run(
        [*_unshare("--net"), "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
        capture_output=True,
        text=True,
        timeout=BOOT_S,
    )
    said = (tried.stderr.strip().splitlines() or ["it failed"])[-1]
    return f"namespaces are forbidden here: {said}" if tried.returncode else ""


def _unshare(*further: str) -> list[str]:
    own = ["--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
    return ["unshare", *own, *further]


def _enter(network: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{network}/ns/net"]


def _die_with_thread() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Ping:
    """What came back of so many packets, and after how long."""

    sent: int
    seconds: list[float]

    @property
    def lost(self) -> float:
        return 1 - len(self.seconds) / self.sent

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Host:
    """One machine."""

    name: str
    address: str
    shared: Path
    network: int
    """The process that holds its network."""
    files: Path
    reaps: bool = True
    """Whether its process 1 reaps what is left to it."""
    environment: dict[str, str] = field(default_factory=dict)
    _outer: subprocess.Popen[str] | None = None
    init: int | None = None
    """Its process 1, as this machine numbers it."""

    @property
    def covered(self) -> set[Path]:
        """What of this machine lies below /tmp, and is seen there."""
        seen = {ROOT, Path(sys.prefix), Path(sys.base_prefix), self.shared}
        return {path for path in seen if path.is_relative_to("/tmp")}

    def boot(self, *, shares: bool = True) -> None:
        """Start it anew: with empty /tmp and /dev/shm, and no process but the first. shares:
        whether the shared directory is the others'; else it has one of its own, which is empty.
        """
        assert self.init is None, f"host {self.name} is up"
        covered = [str(path) for path in self.covered if shares or path != self.shared]
        script = [str(HERE / "host.sh"), self.name, "yes" if self.reaps else "no"]
        script += [str(self.files / "hosts"), "" if shares else str(self.shared)]
        self._outer = subprocess.Popen(
            [*_enter(self.network), *_unshare(), "bash", *script, *covered],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_thread,
        )
        assert self._outer.stdout.readline() == "ready\n", f"host {self.name} did not start"
        [self.init] = _children(self._outer.pid)

    def kill(self) -> None:
        """End it as a loss of power does. Its peers hear of it by what its network still says:
        cut the wire first, and they hear nothing.
        """
        os.kill(self.init, signal.SIGKILL)
        self._outer.wait(GONE_S)
        self._outer.stdout.close()
        self.init = self._outer = None

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on it; what `Popen` knows is the `nsenter` that waits for it, and ends as
        it ends.
        """
        assert self.init is not None, f"host {self.name} is down"
        spaces = ["--net", "--mount", "--uts", "--pid", f"--wdns={ROOT}"]
        return subprocess.Popen(
            ["nsenter", "--target", str(self.init), *spaces, *command],
            env=self.environment,
            text=True,
            preexec_fn=_die_with_thread,
            **options,
        )

    def run(self, command: Sequence[str], *, seconds: float) -> str:
        """Run a command on it to its end; what it printed. Fails unless that is 0."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{self.name}: {command} took more than {seconds} s") from None
        assert process.returncode == 0, f"{self.name}: {command}: {process.returncode}\n{said}"
        return said

    def start_ray(self, head: Host | None = None, *, cpus: int) -> None:
        """Start Ray's daemons, with the cluster of `head`, or as the head of one."""
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats"]
        where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if head is not None:
            where = [f"--address={head.address}:{RAY_PORT}"]
        size = [f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE}"]
        self.run([*ray, *where, f"--node-ip-address={self.address}", *size], seconds=RAY_START_S)

    # ---- looking at it ----

    def processes(self) -> dict[int, str]:
        """Living processes, as this machine numbers them, with their command lines, but for the
        first. A zombie does not live.
        """
        space, found = os.readlink(f"/proc/{self.init}/ns/pid"), {}
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and os.readlink(entry / "ns" / "pid") == space
                    and int(entry.name) != self.init
                    and _state(entry) not in "ZX"
                ):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = command.strip()
            except OSError:
                continue  # it ended meanwhile, or belongs to a namespace that we may not read
        return found

    def zombies(self) -> int:
        """How many dead processes nobody has reaped: those that are left to the first."""
        return sum(_state(Path(f"/proc/{pid}")) == "Z" for pid in _children(self.init))

    def files_in(self, directory: str) -> list[str]:
        """Names in one of its own directories, such as /dev/shm."""
        try:
            return sorted(os.listdir(f"/proc/{self.init}/root{directory}"))
        except FileNotFoundError:
            return []

    def in_network(self, function: Callable[[], Answer]) -> Answer:
        """Call in a thread whose sockets are this host's."""
        answers: list[Answer | BaseException] = []

        def enter() -> None:
            try:
                with open(f"/proc/{self.network}/ns/net") as space:
                    if _LIBC.setns(space.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                answers.append(function())
            except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
                answers.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    def ping(
        self,
        other: Host,
        *,
        count: int = 20,
        size: int = 56,
        every_s: float = 0.02,
        wait_s: float = 2.0,
    ) -> Ping:
        """Send so many packets of so many bytes; what came back, `wait_s` after the last one."""
        return self.in_network(lambda: _ping(other.address, count, size, every_s, wait_s))


class Hosts:
    """Several machines at one wire."""

    def __init__(self, shared: Path, names: Sequence[str], *, zombies: Sequence[str] = ()) -> None:
        """zombies: names of those whose process 1 reaps nothing."""
        self._files = shared / "hosts"
        self._files.mkdir(parents=True, exist_ok=True)
        self._set: dict[str, dict[str, Any]] = {name: {} for name in names}
        addresses = {name: NETWORK.format(number) for number, name in enumerate(names, 1)}
        table = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in addresses.items())]
        (self._files / "hosts").write_text("\n".join(table) + "\n")
        self._write()
        environment = {
            "HOME": "/tmp/home",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_memory_usage_threshold": "0.98",  # every host sees all of this machine's memory
        }
        self._helpers: list[subprocess.Popen[Any]] = []
        self._all: dict[str, Host] = {}
        try:
            for name in names:
                holder = self._helper(["unshare", "--net", "sleep", "infinity"])
                _wait(lambda: _has_other_network(holder.pid), "a network of its own")  # noqa: B023
                self._all[name] = Host(
                    name,
                    addresses[name],
                    shared,
                    holder.pid,
                    self._files,
                    reaps=name not in zombies,
                    environment=environment,
                )
            networks = [str(host.network) for host in self]
            control = ["unshare", "--net", sys.executable, str(HERE / "wire.py"), str(self.control)]
            wire = self._helper([*control, *networks], stdout=subprocess.PIPE)
            assert wire.stdout.readline() == b"ready\n", "the wire did not start"
            for host in self:
                self._connect(host)
        except BaseException:
            self.close()
            raise

    @property
    def control(self) -> Path:
        return self._files / "wire.json"

    def __iter__(self) -> Iterator[Host]:
        return iter(self._all.values())

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def change(self, name: str, **values: Any) -> None:
        """Set the wire of one host: `delay_s`, `loss`, `bytes_per_s`, `cut` (`wire`); without
        values it is a good wire again.
        """
        self._set[name] = values
        self._write()
        time.sleep(0.2)  # it is read every 0.1 s

    def close(self) -> None:
        """End all hosts, and what joins them."""
        for host in self:
            if host.init is not None:
                host.kill()
        for helper in reversed(self._helpers):  # the wire first
            helper.kill()
            helper.wait(GONE_S)
            if helper.stdout is not None:
                helper.stdout.close()

    def _helper(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        self._helpers.append(subprocess.Popen(command, preexec_fn=_die_with_thread, **options))
        return self._helpers[-1]

    def _write(self) -> None:
        draft = self.control.with_suffix(".draft")
        draft.write_text(json.dumps(list(self._set.values())))
        draft.replace(self.control)

    @staticmethod
    def _connect(host: Host) -> None:
        enter = [*_enter(host.network), "ip"]
        for change in (
            ["link", "set", "lo", "up"],
            ["address", "add", f"{host.address}/24", "dev", "wire"],
            ["link", "set", "wire", "up"],
            ["route", "add", "default", "dev", "wire"],  # Ray asks which address leads outside
        ):
            subprocess.run([*enter, *change], check=True, timeout=BOOT_S)


def _ping(address: str, count: int, size: int, every_s: float, wait_s: float) -> Ping:
    """Echo requests, and the times of their answers."""
    mark, sent, seconds = os.getpid() & 0xFFFF, {}, []
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:

        def listen(until: float) -> None:
            while (left := until - time.monotonic()) > 0 and len(seconds) < count:
                raw.settimeout(left)
                try:
                    packet = raw.recv(65536)[20:]
                except TimeoutError:
                    return
                kind, _, _, whose, number = struct.unpack("!BBHHH", packet[:8])
                if kind == 0 and whose == mark and number in sent:
                    seconds.append(time.monotonic() - sent.pop(number))

        for number in range(count):
            header = struct.pack("!BBHHH", 8, 0, 0, mark, number)
            packet = header[:2] + struct.pack("!H", _checksum(header + bytes(size))) + header[4:]
            sent[number] = time.monotonic()
            with contextlib.suppress(OSError):  # nobody answers to that address: it is lost
                raw.sendto(packet + bytes(size), (address, 0))
            listen(time.monotonic() + every_s)
        listen(time.monotonic() + wait_s)
    return Ping(count, seconds)


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def _has_other_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOOT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
