"""Plays the episodes of a run of task `external`, a command for each; without any package.

    python examples/workers/worker.py RUN_DIR --slots 8 -- COMMAND ...

For example, with a container per episode:

    ... -- docker run --rm -i --network host -e OPENAI_BASE_URL -e OPENAI_API_KEY my-agent

A command finds what a program of task `program` finds: the problem as JSON on standard input, the
policy as OPENAI_BASE_URL and OPENAI_API_KEY; the last line that it prints is what it was worth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

WAIT_S, PAUSE_S = 20, 1.0


def post(url: str, key: str, body: dict, timeout_s: float = 60) -> dict | None:
    """Return the answer; None where there is none."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        found = reply.read()
    return json.loads(found) if found else None


def play(work: dict, command: list[str]) -> None:
    """Play one episode, and say that it goes on as long as it does."""
    url, key = work["base_url"], work["api_key"]
    variables = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True
    )
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(work["lease_s"] / 3):
            try:
                post(url + "/work/heartbeat", key, {})
            except OSError:  # the episode has ended there, or the actor is gone
                process.kill()
                return

    threading.Thread(target=beat, daemon=True).start()
    out, _ = process.communicate(json.dumps(work["problem"]))
    ended.set()
    try:
        result = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        result = {"failure": f"exit status {process.returncode}, and no result"}
    try:
        post(url + "/work/result", key, result)
    except urllib.error.HTTPError as error:
        print(f"not taken: {error.read().decode()}", flush=True)
    except OSError as error:
        print(f"not told: {error}", flush=True)


def serve(directory: Path, number: int, command: list[str]) -> None:
    """Ask one actor after the other for work, as long as the run has some."""
    while True:
        actors = sorted(directory.glob("*.json"))
        if not actors:
            time.sleep(PAUSE_S)
        for at in range(len(actors)):
            try:
                actor = json.loads(actors[(at + number) % len(actors)].read_text())
                wait = {"wait_s": WAIT_S if len(actors) == 1 else 0}
                work = post(actor["url"] + "/work/lease", actor["key"], wait)
            except (OSError, ValueError):  # it starts, or is gone
                time.sleep(PAUSE_S)
                continue
            if work is not None:
                play(work, command)
                break
        else:
            time.sleep(0.05)


def main() -> None:
    """Work in as many threads as there are slots, until this process is ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--slots", type=int, default=8, help="episodes at the same time")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    for number in range(given.slots):
        work = (given.run_dir / "workers", number, given.command)
        threading.Thread(target=serve, args=work, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
