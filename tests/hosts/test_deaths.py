"""A run over two hosts that die, come back, and die again: A has head, driver, learner and an
engine, B an engine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import account
from tests.hosts.run import END_S, PROBE_S, HostsRun, R, lose_power, power_on, table
from tests.support import hosts as support
from tests.support.hosts import Host, Hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable()),
]
GRACE_S = 10.0
NOTICED_S = 120.0
"""Ray takes a minute to notice that a node is gone."""
HEADLESS_S = 480.0
"""And minutes to notice that the head is, where its host did not say goodbye."""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Hosts, Host, Host]]:
    """B's process 1 reaps nothing, as in many containers."""
    with Hosts(tmp_path, ["a", "b"], zombies=["b"]) as hosts:
        a, b = hosts
        a.boot()
        b.boot()
        a.start_ray(cpus=3)
        b.start_ray(a, cpus=1)
        yield hosts, a, b


def continues(run: HostsRun) -> None:
    """The same command goes on where the run was."""
    at = run.steps()
    run.start()
    run.wait(lambda: run.steps() > at + 10, 300, "steps after the resume")
    assert any("resumed" in line for _, line in run.lines), run.text()


def test_a_host_dies_and_comes_back_again_and_again(two, tmp_path: Path) -> None:
    hosts, a, b = two
    run = HostsRun(tmp_path, hosts, a)
    run.start()
    run.wait(lambda: run.steps() > 10, 300, "the first steps")
    run.has_actors(2)

    died = run.begins("B dies without a word")
    lose_power(hosts, b)
    run.wait(lambda: run.has_said(died, b.address, "left the cluster"), 90, "the loss of B")
    run.goes_on()
    run.is_over(died)
    assert run.rows()[-1]["cluster/faults"] == 1, "a node is one fault"

    back = run.begins("B comes back, with `ray start`")
    power_on(hosts, b, a)
    took = run.has_actors(2)
    run.goes_on()
    run.is_over(back, f"two serve after {took:.0f} s")

    raylet = run.begins("B's raylet is killed, and started again")
    [pid] = [pid for pid, command in b.processes().items() if "raylet/raylet" in command]
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: run.has_said(raylet, b.address, "left the cluster"), 90, "the loss of B")
    b.start_ray(a, cpus=1)
    took = run.has_actors(2)
    run.goes_on()
    run.is_over(raylet, f"two serve after {took:.0f} s; {b.zombies()} zombies on B")
    segments = [name for name in b.files_in("/dev/shm") if name.startswith("async_grpo")]
    assert b.zombies() and len(segments) <= 2, "those of the dead relay are gone"

    saving = run.begins("B dies during a checkpoint")
    before = run.newest_checkpoint()
    drafts = run.dir / "checkpoints"
    run.wait(lambda: [*drafts.glob("*.tmp")], 120, "a checkpoint that is being written")
    lose_power(hosts, b)
    run.wait(lambda: run.newest_checkpoint() > before, 60, "the checkpoint")
    run.wait(lambda: run.has_said(saving, b.address, "left the cluster"), 90, "the loss of B")
    run.goes_on()
    run.is_over(saving, f"checkpoint {run.newest_checkpoint()} is whole")

    run.comes_to_its_end()
    for event in run.events[:4]:
        assert event.gap <= PROBE_S + GRACE_S, (event.what, event.gap)


def test_a_host_dies_in_the_start(two, tmp_path: Path) -> None:
    hosts, a, b = two
    run = HostsRun(tmp_path, hosts, a)
    run.start()
    run.wait(
        lambda: any("EngineCore" in command for command in b.processes().values()),
        240,
        "an engine that starts on B",
    )
    start = run.begins("B dies while the run starts")
    lose_power(hosts, b)
    run.wait(lambda: run.steps() > 10, 300, "learner steps with the other engine")
    run.is_over(start, f"first steps after {run.rows()[0]['time'] - start.begin:.0f} s")
    assert run.actors() == 1 and start.said(b.address, "left the cluster", "actor-1.0"), start.lines

    other = run.begins("B comes back with storage of its own")
    power_on(hosts, b, a, shares=False)
    why = f"no rollout actor is started on node {b.address}"
    run.wait(lambda: any(why in line for _, line in run.lines), 60, why)
    run.goes_on()
    run.is_over(other)
    assert run.actors() == 1
    b.kill()

    back = run.begins("B comes back with the run's storage")
    power_on(hosts, b, a)
    took = run.has_actors(2)
    run.goes_on()
    run.is_over(back, f"two serve after {took:.0f} s")
    run.comes_to_its_end()


def test_the_driver_dies_and_then_the_learners_host(two, tmp_path: Path) -> None:
    """Nothing of the run goes on anywhere, and the same command continues it."""
    hosts, a, b = two
    run = HostsRun(tmp_path, hosts, a)
    run.start()
    run.wait(lambda: run.newest_checkpoint() > 0, 300, "a checkpoint")
    run.goes_on()
    killed = run.begins("driver killed with SIGKILL, same command again")
    run.signal(signal.SIGKILL)
    run.ends()
    run.leaves_nothing(files=False)
    continues(run)
    run.is_over(killed, "continued")

    lost = run.begins("the learner's host dies (head and driver too)")
    lose_power(hosts, a)
    run.ends()
    deadline = time.monotonic() + HEADLESS_S
    while left := run.leftovers(files=False):
        assert time.monotonic() < deadline, f"B still has {left}"
        time.sleep(0.5)
    gone = time.time() - lost.begin
    b.kill()
    hosts.change("a")
    a.boot()
    a.start_ray(cpus=3)
    power_on(hosts, b, a)
    continues(run)
    run.is_over(lost, f"B free of it after {gone:.0f} s; the same command continued")
    run.comes_to_its_end()


def test_the_only_engine_is_on_the_other_host(two, tmp_path: Path) -> None:
    """A's engine dies and no fault is left to replace it. A cut of B is waited for; when B dies,
    that is the end.
    """
    hosts, a, b = two
    run = HostsRun(tmp_path, hosts, a, restart_budget=0)
    run.start()
    run.wait(lambda: run.newest_checkpoint() > 0, 300, "a checkpoint")
    run.has_actors(2)
    alone = run.begins("A's engine dies, budget 0")
    [pid] = [pid for pid, command in a.processes().items() if "EngineCore" in command]
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: run.actors() == 1, 90, "one rollout actor")
    run.goes_on()
    run.is_over(alone)

    cut = run.begins("B, with the only engine, cut off for 6 s")
    hosts.change("b", cut=True)
    assert a.ping(b, count=3, wait_s=0.2).lost == 1
    time.sleep(max(0.0, cut.begin + 6 - time.time()))
    hosts.change("b")
    run.goes_on()
    run.is_over(cut)

    end = run.begins("B, with the only engine, dies")
    lose_power(hosts, b)
    code = run.ends(NOTICED_S + END_S)
    run.is_over(end, f"exit {code} after {time.time() - end.begin:.0f} s")
    print(table(run.events), run.text(), flush=True)
    assert code == 4, run.text()
    assert end.said("rollout_actors.min is 1"), end.lines
    run.leaves_nothing()
    counts = account.check(run, batch=R)
    assert counts["trained"] == R * counts["steps"]
