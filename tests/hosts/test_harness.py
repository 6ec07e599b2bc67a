"""The hosts themselves: a wire that failed would look like a run that survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hosts as support
from tests.support.hosts import Host, Hosts
from tests.support.waiting import wait_until, wait_until_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable()),
]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("shared"), ["a", "b", "c"], zombies=["c"]) as hosts:
        for host in hosts:
            host.boot()
        yield hosts


def test_the_wire_does_what_it_is_told(three: Hosts) -> None:
    a, b, c = three
    assert a.ping(b).lost == 0 and b.ping(c).lost == 0, "a good wire"
    good = a.ping(b).median_s
    three.change("b", delay_s=0.05)
    assert 0.1 <= a.ping(b).median_s < 0.1 + 50 * max(good, 0.002), "50 ms each way"
    assert a.ping(c).median_s < 0.05, "the others keep theirs"
    three.change("b", loss=0.2)  # each way, so of four packets more than one
    assert 0.2 < a.ping(b, count=200, every_s=0.002).lost < 0.55
    three.change("b", bytes_per_s=100_000)
    slow = a.ping(b, count=40, size=4000, every_s=0.0)
    assert slow.lost == 0.0 or max(slow.seconds) > 0.3, "40 packets of 4 kB wait for each other"
    assert max(slow.seconds) > 0.3
    three.change("b", cut=True)
    assert a.ping(b, wait_s=0.3).lost == 1 and c.ping(b, wait_s=0.3).lost == 1
    assert a.ping(c).lost == 0
    three.change("b")
    assert a.ping(b).lost == 0 and a.ping(b).median_s < 0.05, "mended"


def test_connections_outlive_a_cut(three: Hosts) -> None:
    a, b, _ = three
    serve = (
        "import socket; s = socket.create_server(('', 7000)); print('on', flush=True); "
        "c, _ = s.accept(); print(len(c.recv(100, socket.MSG_WAITALL)))"
    )
    server = b.start([sys.executable, "-c", serve], stdout=subprocess.PIPE)
    assert server.stdout.readline() == "on\n"
    import socket

    client = a.in_network(lambda: socket.create_connection((b.address, 7000), timeout=10))
    client.sendall(b"x" * 50)
    three.change("b", cut=True)
    client.sendall(b"x" * 50)
    time.sleep(1.0)
    three.change("b")
    assert server.communicate(timeout=30)[0] == "100\n"
    client.close()


def test_a_host_has_its_own_of_everything_but_the_shared_directory(
    three: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    a, b, _ = three
    for host in (a, b):
        host.run(["bash", "-c", f"touch /tmp/mine /dev/shm/{host.name} ~/at_home"], seconds=10)
        (three.control.parent / "seen").write_text("by all")
        assert host.run(["cat", str(three.control.parent / "seen")], seconds=10) == "by all"
        assert host.run(["hostname"], seconds=10).strip() == host.name
        assert host.files_in("/dev/shm") == [host.name]
        assert set(host.files_in("/tmp")) >= {"mine", "home"}
        assert host.run(["bash", "-c", "ls /proc | grep -c '^[0-9]'"], seconds=10).strip() <= "5"
    assert not Path("/tmp/mine").exists() and not Path("/dev/shm/a").exists()
    lookup = "import socket; print(socket.gethostbyname('b'))"
    assert a.run([sys.executable, "-c", lookup], seconds=10).strip() == b.address


def test_a_host_may_have_other_storage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Hosts(tmp_path, ["x"]) as hosts:
        [x] = hosts
        x.boot(shares=False)
        assert x.files_in(str(tmp_path)) == []
        x.kill()
        x.boot()
        assert "file" in x.files_in(str(tmp_path))


def orphan(host: Host) -> None:
    """Leave a process to the host's first one, and let it end."""
    host.run(["bash", "-c", "(sleep 0.1 & exit 0)"], seconds=10)
    commands = host.processes
    wait_until(lambda: not any("sleep 0.1" in one for one in commands().values()), 10, "its end")
    time.sleep(0.3)


def test_a_first_process_reaps_or_does_not(three: Hosts) -> None:
    _, b, c = three
    orphan(b)
    orphan(c)
    assert b.zombies() == 0 and c.zombies() == 1


def test_a_host_that_dies_takes_everything_with_it_and_comes_back(three: Hosts) -> None:
    a, b, _ = three
    b.start(["setsid", "sleep", "1234"])
    while not any("1234" in command for command in b.processes().values()):
        time.sleep(0.02)
    [pid] = [pid for pid, command in b.processes().items() if command == "sleep 1234"]
    b.run(["touch", "/dev/shm/left"], seconds=10)
    b.kill()
    wait_until_gone([pid], 10)
    b.boot()
    assert b.processes() == {} and b.files_in("/dev/shm") == []
    assert a.ping(b).lost == 0


KILLED = """
import sys, time
from pathlib import Path
from tests.support.hosts import Hosts
hosts = Hosts(Path(sys.argv[1]), ["x"])
[x] = hosts
x.boot()
x.start(["sleep", "4321"])
print(*[helper.pid for helper in hosts._helpers], x.init, flush=True)
time.sleep(100)
"""


def test_a_test_that_is_killed_leaves_no_host(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=support.ROOT)
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) == 3 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, "their end")
