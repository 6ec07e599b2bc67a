"""What a version of the weights takes to another node over a slow network:
`python -m benchmarks.weight_sync.link [--versions DIR] [--mbit 200] [--delay-ms 50] [--out FILE]`.

    host a: Ray, the learner's segments, the home relay --wire--> host b: Ray, its relay

Two network namespaces of this machine with a wire that delays every frame (each way) and has a
bandwidth, a Ray node on each, and the relays of a run (`cluster.relays`). A version is a copy of
135 million bfloat16 weights; the next one has random changes in a given share of them, or is the
next of DIR (sorted, one .safetensors file each). Measured per version, from what an engine of host
b asks until it is told a path: seconds; bytes that the wire carried there; processor seconds of the
home relay, and the most private memory that it had (mapped segments and Ray's store are shared).
Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments_of, kilobytes, machine, spread

Copies = Iterator[tuple[str, np.ndarray]]
"""Names of what is measured, and copies [nbytes] uint8."""
WEIGHTS, ADAPTER_BYTES = 135_000_000, 5_000_000
SHARES = (0.001, 0.01, 0.05)
VERSIONS = 4
"""Per line of the table."""
STORE_BYTES = 700_000_000
START_S, LIMIT_S = 120.0, 600.0
TICK_S = 0.01
_ALIGN = 64


@dataclass(frozen=True)
class Version:
    """What one version took. sent: bytes over the wire. changed: share of the 16-bit words."""

    what: str
    changed: float
    nbytes: int
    seconds: float
    sent: int
    cpu_s: float
    peak_mb: float


class Watch:
    """Processor seconds of a process, and the most private memory it has inside the block."""

    def __init__(self, pid: int) -> None:
        self._status, self._stat = f"/proc/{pid}/status", Path(f"/proc/{pid}/stat")
        self._over = threading.Event()
        self.peak_kb, self.cpu_s = 0, 0.0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self.cpu_s = -self._cpu()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.cpu_s += self._cpu()

    def _look(self) -> None:
        while not self._over.wait(TICK_S):
            self.peak_kb = max(self.peak_kb, kilobytes(self._status, "RssAnon"))

    def _cpu(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sent() -> int:
    """Bytes that this host has put on the wire."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    [figures] = [line.partition(":")[2] for line in lines if line.strip().startswith("wire:")]
    return int(figures.split()[8])


def random_versions(nbytes: int, steps: list[tuple[str, float]]) -> Copies:
    """Random weights, and for each step (name, share) a copy with changes in about this share."""
    random = np.random.default_rng(1)
    words = random.integers(0, 2**16, nbytes // 2, dtype=np.uint16)
    for name, share in [("", 0.0), *steps]:
        words[random.integers(0, len(words), int(share * len(words)))] += 1
        yield name, words.view(np.uint8)


def stored_versions(directory: Path, name: str) -> Copies:
    """The versions of a directory."""
    import torch
    from safetensors.torch import load_file

    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        flat = [tensors[key].to(torch.bfloat16).flatten() for key in sorted(tensors)]
        copy = torch.cat(flat).view(torch.uint8).numpy()
        yield name, np.pad(copy, (0, -len(copy) % _ALIGN))


class Course:
    """Brings versions to the other node, one after another."""

    def __init__(self, home: str, far: str, on_node: Callable[[str], dict[str, Any]]) -> None:
        self._home, self._far, self._on_node = home, far, on_node

    async def run(self, directory: Path, delta: str, copies: Copies) -> None:
        """Measure all copies but the first, with which the relays start. directory: the run's."""
        from async_grpo.cluster.relays import Relays
        from async_grpo.config.schema import Config
        from async_grpo.weights.shared_memory import Segments, choose_directory
        from async_grpo.weights.transport import Announcement
        from tests.support.listener import RecordingListener

        config = Config.model_validate(
            {
                "run": {"total_steps": 1, "dir": str(directory)},
                "model": {"path": "m"},
                "weight_sync": {"delta": delta, "deadlines": {"acknowledge_s": 2 * LIMIT_S}},
            }
        )
        key, listener = f"test-{uuid.uuid4().hex[:8]}", RecordingListener()
        relays = Relays(config, home=self._home, key=key, where=self._on_node, listener=listener)
        _, before = next(copies)
        place, _ = choose_directory(len(before), directory)
        segments, before, pid = Segments(place, key, len(before)), before.copy(), 0
        for number, (what, copy) in enumerate(chain([("", before)], copies), 1):
            segments.begin(2 * number).numpy()[:] = copy
            payload = {"path": str(segments.commit()), "sequence": 2 * number, "checksums": []}
            news = Announcement(f"v0.{number}", "shared_memory", payload, "", len(copy))
            if not pid:
                await relays.local(news, self._far)
                pid = await relays._relays[self._home].pid.remote()
                continue
            words, old = copy.view(np.uint16), before.view(np.uint16)
            share = float(np.count_nonzero(words != old)) / len(words)
            with Watch(pid) as watch:
                started, wire = time.perf_counter(), sent()
                await relays.local(news, self._far)
                seconds, wire = time.perf_counter() - started, sent() - wire
            took = seconds, wire, watch.cpu_s, watch.peak_kb / 1024
            print(json.dumps(asdict(Version(what, share, len(copy), *took))), flush=True)
            before[:] = copy
        await relays.close()
        segments.close()
        for note in listener.notes:
            print(note, flush=True)


def drive(options: argparse.Namespace) -> None:
    """Measure, in the driver's process on host a."""
    import ray

    from async_grpo.cluster.session import RaySession

    ray.init(address="auto", log_to_driver=False)
    session = RaySession(local=False)
    home = ray.get_runtime_context().get_node_id()
    [far] = [node.node_id for node in session.nodes() if node.node_id != home]
    course, directory = Course(home, far, session.on_node), Path(options.drive)

    def copies(nbytes: int, *steps: tuple[str, float]) -> Copies:
        repeated = [step for step in steps for _ in range(VERSIONS)]
        return random_versions(nbytes // _ALIGN * _ALIGN, repeated)

    async def all_of_it() -> None:
        if options.versions is not None:
            for delta, name in (("off", "whole"), ("always", "changes")):
                await course.run(directory, delta, stored_versions(options.versions, name))
            return
        nbytes, shares = 2 * options.weights, [(f"{share:.1%} changed", share) for share in SHARES]
        await course.run(directory, "off", copies(nbytes, ("whole", 0.01)))
        await course.run(directory, "always", copies(nbytes, *shares))
        await course.run(directory, "off", copies(ADAPTER_BYTES, ("adapter", 1.0)))

    asyncio.run(all_of_it())


def table(found: list[Version]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| version | MB | words changed | seconds | MB over the wire | home relay: CPU s | "
        "private MB at most |",
        "|---|---|---|---|---|---|---|",
    ]
    for what in dict.fromkeys(one.what for one in found):
        of = [one for one in found if one.what == what]
        lines.append(
            f"| {what} | {of[0].nbytes / 1e6:,.0f} | "
            f"{100 * sum(one.changed for one in of) / len(of):.2f} % | "
            f"{spread([one.seconds for one in of])} | "
            f"{spread([one.sent / 1e6 for one in of], '.1f')} | "
            f"{spread([one.cpu_s for one in of])} | "
            f"{spread([one.peak_mb for one in of], ',.0f')} |"
        )
    return lines


def main() -> None:
    """Make the hosts, and let the driver on the first of them measure."""
    parser = arguments_of("weight_sync.link", __doc__.splitlines()[0])
    parser.add_argument("--versions", type=Path, help="a directory with one file per version")
    parser.add_argument("--weights", type=int, default=WEIGHTS, help="of a model of random words")
    parser.add_argument("--mbit", type=float, default=200.0, help="of the wire, per second")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="of the wire, each way")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive is not None:
        drive(options)
        return
    from tests.support import hosts as support

    if reason := support.unavailable():
        raise SystemExit(reason)
    print(machine("ray"), file=sys.stderr)
    versions = options.versions and options.versions.resolve()
    with (
        tempfile.TemporaryDirectory(prefix="link-", dir=versions and versions.parent) as place,
        support.Hosts(Path(place), ["a", "b"]) as hosts,
    ):
        a, b = hosts
        a.boot()
        b.boot()
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats"]
        for host, role in (
            (a, ["--head", f"--port={support.RAY_PORT}", "--include-dashboard=false"]),
            (b, [f"--address={a.address}:{support.RAY_PORT}"]),
        ):
            size = ["--num-cpus=2", f"--object-store-memory={STORE_BYTES}"]
            where = f"--node-ip-address={host.address}"
            host.run([*ray, *role, where, *size], seconds=START_S)
        slow = {"bytes_per_s": options.mbit * 1e6 / 8, "delay_s": options.delay_ms / 1e3}
        hosts.change("b", **slow)
        run_dir = Path(place) / "run"
        run_dir.mkdir()
        given = ["--drive", str(run_dir), "--weights", str(options.weights)]
        if versions is not None:  # linked, where the hosts see them
            (there := Path(place) / "versions").mkdir()
            for path in versions.glob("*.safetensors"):
                os.link(path, there / path.name)
            given += ["--versions", str(there)]
        driver = a.start(
            [
                *("env", f"RAY_ADDRESS={a.address}:{support.RAY_PORT}"),
                *(sys.executable, "-m", "benchmarks.weight_sync.link", *given),
            ],
            stdout=subprocess.PIPE,
        )
        found = []
        for line in driver.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            if line.startswith("{"):
                found.append(Version(**json.loads(line)))
        if code := driver.wait(LIMIT_S):
            raise SystemExit(f"the driver ended with {code}")
    print("\n".join(table(found)))
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
