"""Plays the episodes of a run of task `external`, a command for each; without any package.

    python examples/workers/worker.py RUN_DIR --slots 8 -- COMMAND ...

For example, with a container per episode:

    ... -- docker run --rm -i --network host -e OPENAI_BASE_URL -e OPENAI_API_KEY my-agent

A command finds what a program of task `program` finds: the problem as JSON on standard input, the
policy as OPENAI_BASE_URL and OPENAI_API_KEY; the last line that it prints is what it was worth. It
does not get the key that says so.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

WAIT_S, PAUSE_S = 20, 1.0
AWAY = (OSError, http.client.HTTPException)
"""What it looks like when an actor is gone, or busy."""


def post(url: str, key: str, body: dict, timeout_s: float = 60) -> dict | None:
    """Return the answer; None where there is none."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        found = reply.read()
    return json.loads(found) if found else None


def result_of(work: dict, command: list[str]) -> dict:
    """Run the command for an episode, and say that it goes on as long as it does."""
    url, key = work["base_url"], work["work_key"]
    variables = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": work["api_key"]}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, env=variables, text=True, errors="replace"
    )
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(work["lease_s"] / 3):
            try:
                post(url + "/work/heartbeat", key, {})
            except urllib.error.HTTPError as error:
                if error.code == 401:  # the episode has ended there
                    process.kill()
                    return
            except AWAY:
                continue  # the next one may arrive

    threading.Thread(target=beat, daemon=True).start()
    try:
        out, _ = process.communicate(json.dumps(work["problem"]))
    finally:
        ended.set()
        process.kill()
    if process.returncode != 0:
        return {"failure": f"exit status {process.returncode}"}
    try:
        found = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"failure": "no result in the last line"}
    return found if isinstance(found, dict) else {"failure": "a last line that is no result"}


def play(work: dict, command: list[str]) -> None:
    """Play one episode and say what it was worth, or why it failed."""
    try:
        result = result_of(work, command)
    except Exception as error:  # noqa: BLE001 - a slot goes on whatever happens to an episode
        traceback.print_exc()
        result = {"failure": f"{type(error).__name__}: {error}"}
    to = work["base_url"] + "/work/result", work["work_key"]
    try:
        post(*to, result)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        print(f"not taken: {said}", flush=True)
        if error.code == 400:  # what was printed is no result
            post(*to, {"failure": said[:300]})
    except AWAY as error:
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
            except (*AWAY, ValueError):  # it starts, or is gone
                time.sleep(PAUSE_S)
                continue
            if work is not None:
                try:
                    play(work, command)
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
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    for number in range(given.slots):
        work = (given.run_dir / "workers", number, given.command)
        threading.Thread(target=serve, args=work, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
