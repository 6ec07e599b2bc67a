"""Engines that come and go while what changed between two versions is on its way to them: A has
head, driver, learner and an engine, B an engine behind a slow wire.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.hosts.run import HostsRun, lose_power, power_on
from tests.support import hosts as support
from tests.support.hosts import Host, Hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable()),
]
WIRE = {"delay_s": 0.1}
"""A sync to B takes several of these, so that it can be met in the middle."""
SYNC_S, TAKEN_S = 60.0, 240.0
ACTOR = "ray::WatchedRollout"


class Syncs:
    """Weight syncs of a run, by the record of its learner and its engines."""

    def __init__(self, run: HostsRun) -> None:
        self.run = run

    def staged(self) -> dict[str, str]:
        """Label -> bits of the learner's segment."""
        self.run.side.poll()
        return {one.values[0]: one.values[2] for one in self.run.side.having("staged")}

    def received(self, host: str, *, since: float = 0.0) -> dict[str, str]:
        """Label -> bits of the segment that an engine of the host has loaded, of versions."""
        staged = self.staged()
        entries = [one for one in self.run.side.having("received") if one.at > since]
        own = [one.values for one in entries if one.values[2] == host]
        return {label: bits for label, bits, _ in own if label in staged}

    def under_way(self, host: str) -> str:
        """Label of the newest version while the host's engine has not taken it, else ""."""
        newest = [*self.staged()][-1]
        return "" if newest in self.received(host) else newest

    def met(self, host: str) -> str:
        """Wait for one that is under way; its label."""
        return self.run.wait(lambda: self.under_way(host), SYNC_S, f"a sync that waits for {host}")


def kill_engine_in_a_sync(syncs: Syncs, host: Host) -> tuple[str, float]:
    """Kill the host's rollout actor; the label that it never took, and when."""
    while True:
        label = syncs.met(host.name)
        [actor] = [pid for pid, name in host.processes().items() if name.startswith(ACTOR)]
        os.kill(actor, signal.SIGSTOP)  # so that it takes nothing while this looks
        if syncs.under_way(host.name) == label:
            os.kill(actor, signal.SIGKILL)
            return label, time.monotonic()
        os.kill(actor, signal.SIGCONT)


def lose_host_in_a_sync(syncs: Syncs, hosts: Hosts, host: Host) -> tuple[str, float]:
    """Let the host lose its power; the label that it never took, and when."""
    while True:
        label = syncs.met(host.name)
        hosts.change(host.name, cut=True)
        if syncs.under_way(host.name) == label:
            lose_power(hosts, host)
            return label, time.monotonic()
        hosts.change(host.name, **WIRE)


def test_every_engine_has_the_learners_bits_after_an_engine_and_a_host_left_in_syncs(
    tmp_path: Path,
) -> None:
    with Hosts(tmp_path, ["a", "b"]) as hosts:
        a, b = hosts
        a.boot()
        b.boot()
        a.start_ray(cpus=3)
        b.start_ray(a, cpus=1)
        # every sync is compared: bytes by checksum, and each engine's log-probs
        sync = {"delta": "always", "verify_every": 1}
        run = HostsRun(tmp_path, hosts, a, weight_sync=sync)
        syncs = Syncs(run)
        run.start()
        run.wait(lambda: run.steps() > 5, support.BOOT_S + 240, "the first steps")
        run.has_actors(2)
        hosts.change("b", **WIRE)
        run.goes_on()

        killed = run.begins("B's engine is killed in a sync")
        label, since = kill_engine_in_a_sync(syncs, b)
        came = run.wait(lambda: syncs.received("b", since=since), TAKEN_S, "B's next engine")
        run.goes_on()
        run.is_over(killed, f"{label} never came; the next engine begins with {next(iter(came))}")

        left = run.begins("B dies in a sync")
        label, since = lose_host_in_a_sync(syncs, hosts, b)
        run.wait(lambda: run.has_said(left, b.address, "left the cluster"), 90, "the loss of B")
        power_on(hosts, b, a)
        hosts.change("b", **WIRE)
        came = run.wait(lambda: syncs.received("b", since=since), TAKEN_S, "an engine on B again")
        run.goes_on()
        run.is_over(left, f"{label} never came; the next engine begins with {next(iter(came))}")

        run.comes_to_its_end()
        staged, at_a, at_b = syncs.staged(), syncs.received("a"), syncs.received("b")
        last = next(label for label in reversed(staged) if label in at_a and label in at_b)
        print(f"{len(staged)} versions, A took {len(at_a)}, B {len(at_b)}, both {last}", flush=True)
        assert staged[last] == at_a[last] == at_b[last] != "", last
        for engine in (at_a, at_b):
            seen = {one: bits for one, bits in engine.items() if bits}
            assert len(seen) > 10 and all(staged[one] == bits for one, bits in seen.items())
        assert len(set(staged.values())) > 20, "the weights stood still"
        assert any("as what changed" in line for _, line in run.lines), run.text()
