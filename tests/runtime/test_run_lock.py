"""One run at a time in a run directory, whoever died, and wherever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_grpo.errors import SetupError, StopRequested
from async_grpo.runtime import run_lock
from async_grpo.runtime.run_lock import LOCK, RunLock
from tests.support.waiting import wait_until

CONTENDER = """
import sys
from pathlib import Path
from async_grpo.errors import SetupError
from async_grpo.runtime.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), lost=print)
sys.stdin.readline()
try:
    lock.acquire(note=print, check=lambda: None)
    print("held", flush=True)
    sys.stdin.readline()
except SetupError as error:
    print(f"refused: {error}", flush=True)
"""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "POLL_S", 0.02)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Callable[[], RunLock]]:
    made: list[RunLock] = []

    def one() -> RunLock:
        made.append(RunLock(tmp_path / "run", lost=print))
        return made[-1]

    yield one
    for each in made:
        each.release()


def take(lock: RunLock, notes: list[str] | None = None) -> bool:
    return lock.acquire(note=([] if notes is None else notes).append, check=lambda: None)


def test_the_directory_is_made_for_this_user_alone_and_one_that_others_can_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # below one that everybody can enter
        Path(folder).chmod(0o755)
        made, found = Path(folder) / "made", Path(folder) / "found"
        found.mkdir(mode=0o755)
        for run_dir in (made, found):
            (notes, mine) = [], RunLock(run_dir, lost=print)
            take(mine, notes)
            (run_dir / "journal").write_text("text")
            if os.geteuid() == 0:
                look = ["cat", run_dir / "journal"]
                seen = subprocess.run(look, user=65534, capture_output=True, text=True).stdout
                assert seen == ("text" if run_dir == found else "")
            assert [f"chmod 700 {found}" in note for note in notes] == [True] * (run_dir == found)
            mine.release()
        assert (made.stat().st_mode & 0o777, found.stat().st_mode & 0o777) == (0o700, 0o755)


def rewrite(path: Path, **changes: object) -> None:
    """Change what the lock says of its owner."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_second_is_refused_and_told_who_has_it(lock, tmp_path: Path) -> None:
    first = lock()
    assert take(first) is False
    with pytest.raises(SetupError, match=rf"another run uses .*run: process {os.getpid()} on "):
        take(lock())
    first.release()
    first.release()
    assert list((tmp_path / "run").iterdir()) == []
    assert take(lock()) is False


def contenders(directory: Path, count: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]


def test_of_processes_that_start_at_once_one_runs_and_a_killed_one_is_taken_over(
    tmp_path: Path,
) -> None:
    processes = contenders(tmp_path / "run", 5)
    try:
        for process in processes[:4]:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = {process.pid: process.stdout.readline() for process in processes[:4]}
        [holder] = [process for process in processes[:4] if said[process.pid] == "held\n"]
        refusals = [line for line in said.values() if line.startswith("refused: ")]
        assert len(refusals) == 3 and all(f"process {holder.pid} on " in line for line in refusals)
        holder.kill()
        holder.wait(timeout=30)
        processes[4].stdin.write("go\n")
        processes[4].stdin.flush()
        assert processes[4].stdout.readline() == "held\n", "at once: the owner is seen to be dead"
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)


def test_a_process_with_the_id_of_a_dead_owner_is_not_the_owner(lock, tmp_path: Path) -> None:
    take(lock())
    rewrite(tmp_path / "run" / LOCK, begun=1)
    assert take(lock()) is True


@pytest.mark.parametrize("owner", [{"owner": "00000000-4.7"}, {"owner": "", "token": None}])
def test_an_owner_elsewhere_is_known_by_its_heartbeat(
    lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: dict[str, object]
) -> None:
    """Another node, or this machine before a reboot."""
    path = tmp_path / "run" / LOCK
    dead = lock()
    take(dead)
    dead.release()
    path.write_text(json.dumps({"host": "node7", "pid": 7, "begun": 7, "since": 0.0} | owner))
    now = time.time()
    os.utime(path, (now - 61, now - 61))
    assert take(lock()) is True, "it has said nothing for more than a minute"

    rewrite(path, **{"token": "another", "host": "node7"} | owner)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    notes: list[str] = [""]
    try:
        with pytest.raises(SetupError, match=r"another run uses .* on node7"):
            take(lock(), notes)
    finally:
        stop.set()
        thread.join()
    assert "cannot be seen from here" in notes[-1]

    monkeypatch.setattr(run_lock, "SILENT_S", 0.3)
    assert take(lock()) is True, "its beats have ended"


def test_a_stop_ends_the_wait_for_a_heartbeat(lock, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text('{"owner": "00000000-4.7"}')

    def check() -> None:
        raise StopRequested("the run was asked to end")

    with pytest.raises(StopRequested):
        lock().acquire(note=print, check=check)


def test_a_lock_cut_off_by_a_full_disk_is_nobodys_after_a_minute(lock, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / LOCK
    path.write_text('{"tok')
    os.utime(path, (0, 0))
    assert take(lock()) is True


def test_who_was_taken_over_finds_out_and_leaves_the_lock_alone(tmp_path: Path) -> None:
    said: list[str] = []
    sleeper = RunLock(tmp_path, lost=said.append)
    take(sleeper)
    rewrite(tmp_path / LOCK, token="another", host="node8")
    wait_until(lambda: said, 30, "the owner to find out")
    assert "process" in said[0] and "on node8" in said[0] and "taken over" in said[0]
    sleeper.release()
    assert (tmp_path / LOCK).exists()


def test_a_lock_that_somebody_removed_is_put_back(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, lost=print)
    take(lock)
    (tmp_path / LOCK).unlink()
    wait_until((tmp_path / LOCK).exists, 30, "the lock to be back")
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_a_directory_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot be written: .*; set run.dir to a directory"):
        take(RunLock(tmp_path / "file", lost=print))


def test_a_lock_that_was_released_is_taken_again_with_its_heartbeat(lock, tmp_path: Path) -> None:
    """As by a start that failed and is repeated in a notebook."""
    one, path = lock(), tmp_path / "run" / run_lock.LOCK
    take(one)
    assert take(one) is False, "held already"
    one.release()
    take(one)
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 30
    while path.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.stat().st_mtime > 0
