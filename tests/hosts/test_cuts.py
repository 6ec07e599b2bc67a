"""A run over hosts whose wire is cut, slow or lossy: head, driver, learner and an engine on A, an
engine on every other.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.hosts.run import PROBE_S, HostsRun
from tests.support import hosts as support
from tests.support.hosts import Host, Hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable()),
]
CUTS_S = (6, 20, 40, 90)
RAYLET_S, ENDED_S = 35, 120
LINE_S = 10.0
GRACE_S = 10.0


def raylets(host: Host) -> list[int]:
    return [pid for pid, command in host.processes().items() if "raylet/raylet" in command]


def test_an_engine_host_that_cannot_be_reached_stops_nothing_for_long(tmp_path: Path) -> None:
    with Hosts(tmp_path, ["a", "b"]) as hosts:
        a, b = hosts
        a.boot()
        b.boot()
        a.start_ray(cpus=3)
        b.start_ray(a, cpus=1)
        run = HostsRun(tmp_path, hosts, a)
        run.start()
        run.wait(lambda: run.steps() > 10, support.BOOT_S + 240, "the first steps")
        assert run.has_actors(2) and any("async_grpo" in name for name in b.files_in("/dev/shm"))
        clean = run.begins("nothing")
        run.goes_on(30)
        run.is_over(clean)
        for seconds in CUTS_S:
            assert a.ping(b).lost == 0
            cut = run.begins(f"B cut off for {seconds} s")
            hosts.change("b", cut=True)
            assert a.ping(b, count=3, wait_s=0.2).lost == 1
            time.sleep(max(0.0, cut.begin + seconds - time.time()))
            hosts.change("b")
            assert a.ping(b, wait_s=1.0).lost < 1
            run.goes_on()
            if seconds > RAYLET_S:
                # as a rule Ray's head does not take it back after so long, and it ends when it
                # hears; a head that had no time to notice takes it back
                run.wait(
                    lambda: not raylets(b) or run.actors() == 2,
                    ENDED_S,
                    "the end of B's raylet, or an engine there",
                )
            lost = not raylets(b)
            if lost:
                b.start_ray(a, cpus=1)
            took = run.has_actors(2)  # it takes away, too, what those before it left on B
            run.goes_on()
            ended = "ended" if lost else "stayed"
            run.is_over(cut, f"B's raylet {ended}; two serve after {took:.0f} s")
        run.comes_to_its_end()
        for event, seconds in zip(run.events[1:], CUTS_S, strict=True):
            assert event.gap <= min(seconds, PROBE_S) + GRACE_S, (event.what, event.gap)
            if seconds > LINE_S:
                said = event.said("waits for", b.address)
                assert said is not None and said <= LINE_S + 5, event.lines


def test_three_hosts_with_a_slow_wire_and_a_lossy_one(tmp_path: Path) -> None:
    """B is cut off while the run starts and during a checkpoint; then it is far away, and C's wire
    loses packets. No engine is given up for that, and the run stays what it was.
    """
    with Hosts(tmp_path, ["a", "b", "c"]) as hosts:
        a, b, c = hosts
        for host in hosts:
            host.boot()
        a.start_ray(cpus=3)
        for host in (b, c):
            host.start_ray(a, cpus=1)
        run = HostsRun(tmp_path, hosts, a, rollout_actors={"min": 1, "max": 3})
        run.start()
        run.wait(
            lambda: any("EngineCore" in command for command in b.processes().values()),
            support.BOOT_S + 240,
            "an engine that starts on B",
        )
        start = run.begins("B cut off for 6 s in the start")
        hosts.change("b", cut=True)
        assert a.ping(b, count=3, wait_s=0.2).lost == 1
        time.sleep(max(0.0, start.begin + 6 - time.time()))
        hosts.change("b")
        run.wait(lambda: run.steps() > 10, 300, "the first steps")
        took = run.has_actors(3)
        run.is_over(start, f"three serve after {took:.0f} s")

        saving = run.begins("B cut off for 6 s during a checkpoint")
        before = run.newest_checkpoint()
        drafts = run.dir / "checkpoints"
        run.wait(lambda: [*drafts.glob("*.tmp")], 120, "a checkpoint that is being written")
        hosts.change("b", cut=True)
        time.sleep(6)
        hosts.change("b")
        run.wait(lambda: run.newest_checkpoint() > before, 60, "the checkpoint")
        run.has_actors(3)
        run.goes_on()
        run.is_over(saving, f"checkpoint {run.newest_checkpoint()} is whole")

        for what, wires in {
            "good wires": {},
            "B 50 ms away, 20 MB/s": {"b": {"delay_s": 0.05, "bytes_per_s": 20e6}},
            "C loses 2 % of its packets": {"c": {"loss": 0.02}},
        }.items():
            for host in "bc":
                hosts.change(host, **wires.get(host, {}))
            event, faults = run.begins(what), run.rows()[-1]["cluster/faults"]
            run.goes_on(40)
            steps = [row for row in run.rows() if row["time"] > event.begin]
            per_step = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
            run.is_over(event, f"{per_step:.2f} s a step")
            assert steps[-1]["cluster/faults"] == faults and run.actors() == 3, event.lines
        for host in "bc":
            hosts.change(host)
        run.comes_to_its_end()
        for event in run.events[1:]:
            assert event.gap <= 6 + GRACE_S, (event.what, event.gap)
