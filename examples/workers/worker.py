"""Plays the episodes of a run of task `external`, a command for each; without any package.

    python examples/workers/worker.py RUN_DIR --slots 8 -- COMMAND ...

For example, with a container per episode:

    ... -- sh examples/workers/container.sh my-agent

A command finds what a program of task `program` finds: the problem as JSON on standard input, the
policy as OPENAI_BASE_URL and OPENAI_API_KEY; the last line that it prints, shorter than 64 KiB, is
what it was worth. It does not get the key that says so.

A command and what it started, as long as that stays in its process group, end with the episode and
with this worker: by SIGTERM, and after `--grace` seconds by SIGKILL. Where the worker is killed
itself, Linux sends SIGTERM to the command alone.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

WAIT_S, PAUSE_S, KEPT = 20, 1.0, 64 * 1024
AWAY = (OSError, http.client.HTTPException)
"""What it looks like when an actor is gone, or busy."""
RUNNING: set[subprocess.Popen] = set()
STARTING, STOPPING = threading.Lock(), threading.Event()
END_WITH_WORKER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"cannot be started: {sys.argv[2]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
"""
"""What becomes a command, and is sent SIGTERM when the worker is gone. It is no `preexec_fn`, which
may hang where there are threads.
"""


def post(url: str, key: str, body: dict, timeout_s: float = 60) -> dict | None:
    """Return the answer; None where there is none."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        found = reply.read()
    return json.loads(found) if found else None


def remains(process: subprocess.Popen) -> bool:
    """Tell whether a command, or what it started, is still there."""
    if process.poll() is not None:  # or this would take the command's status
        with contextlib.suppress(ChildProcessError):  # who is process 1 has orphans to bury
            while os.waitpid(-process.pid, os.WNOHANG)[0]:
                pass
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return not all_ended(process.pid)


def all_ended(group: int) -> bool:
    """Tell whether only dead processes are left of a group, whose parent does not bury them: one
    that is process 1 of a container without being an init.
    """
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    for stat in stats:
        with contextlib.suppress(OSError):  # it has just ended
            state, _, group_of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(group_of) == group and state != "Z":
                return False
    return bool(stats)  # only Linux has them


def end(grace_s: float, *processes: subprocess.Popen) -> None:
    """End commands and what they started: by SIGTERM, then what is left of them by SIGKILL."""
    deadline = time.monotonic() + grace_s
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, how)
        while any([remains(one) for one in processes]) and time.monotonic() < deadline:
            time.sleep(0.02)


def result_of(work: dict, command: list[str], grace_s: float) -> dict:
    """Run the command for an episode, and say that it goes on as long as it does."""
    url, key = work["base_url"], work["work_key"]
    variables = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": work["api_key"]}
    with tempfile.TemporaryFile() as out:
        with STARTING:
            if STOPPING.is_set():
                return {"failure": "its worker is being ended"}
            process = subprocess.Popen(
                [sys.executable, "-ISc", END_WITH_WORKER, str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                env=variables,
                start_new_session=True,
            )
            RUNNING.add(process)
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(work["lease_s"] / 3):
                try:
                    post(url + "/work/heartbeat", key, {})
                except urllib.error.HTTPError as error:
                    if error.code == 401:  # the episode has ended there
                        end(grace_s, process)
                        return
                except AWAY:
                    continue  # the next one may arrive

        threading.Thread(target=beat, daemon=True).start()
        try:
            process.communicate(json.dumps(work["problem"]).encode())
        finally:
            end(grace_s, process)
            ended.set()
            RUNNING.discard(process)
        out.seek(-min(KEPT, out.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = out.read().rstrip().splitlines()
    if process.returncode != 0:
        return {"failure": f"exit status {process.returncode}"}
    try:
        found = json.loads(lines[-1].decode(errors="replace"))
    except (IndexError, ValueError):
        return {"failure": f"no result of less than {KEPT} bytes in the last line"}
    return found if isinstance(found, dict) else {"failure": "a last line that is no result"}


def play(work: dict, command: list[str], grace_s: float) -> None:
    """Play one episode and say what it was worth, or why it failed."""
    try:
        result = result_of(work, command, grace_s)
    except Exception as error:  # noqa: BLE001 - a slot goes on whatever happens to an episode
        traceback.print_exc()
        result = {"failure": f"{type(error).__name__}: {error}"}
    to = work["base_url"] + "/work/result", work["work_key"]
    try:
        post(*to, result)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        print(f"result refused: {said}", flush=True)
        if error.code == 400:  # what was printed is no result
            post(*to, {"failure": said[:300]})
    except AWAY as error:
        print(f"result not sent: {error}", flush=True)


def serve(directory: Path, number: int, command: list[str], grace_s: float) -> None:
    """Ask one actor after the other for work, until the worker is ended."""
    while not STOPPING.is_set():
        actors = sorted(directory.glob("*.json"))
        if not actors:
            time.sleep(PAUSE_S)
        for at in range(len(actors)):
            try:
                actor = json.loads(actors[(at + number) % len(actors)].read_text())
                wait = {"wait_s": WAIT_S if len(actors) == 1 else 0}
                work = post(actor["url"] + "/work/lease", actor["key"], wait)
            except (*AWAY, ValueError):  # it starts, or is gone
                time.sleep(PAUSE_S)
                continue
            if work is not None:
                try:
                    play(work, command, grace_s)
                except AWAY:
                    traceback.print_exc()
                break
        else:
            time.sleep(0.05)


def main() -> None:
    """Work in as many threads as there are slots, until this process is ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--slots", type=int, default=8, help="episodes at the same time")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    if shutil.which(given.command[0]) is None:
        parser.error(f"{given.command[0]} is no program: give a path, or a name on PATH")
    for number in range(given.slots):
        work = (given.run_dir / "workers", number, given.command, given.grace)
        threading.Thread(target=serve, args=work, daemon=True).start()
    try:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda number, _: sys.exit(128 + number))
        while True:  # a signal that comes to a thread that forks does not end a wait here
            time.sleep(PAUSE_S)
    finally:
        with STARTING:
            STOPPING.set()
        end(given.grace, *RUNNING)


if __name__ == "__main__":
    main()
