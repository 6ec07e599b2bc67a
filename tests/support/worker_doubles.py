"""Doubles for workers of task `external`: a rollout actor that gives episodes, and a docker whose
containers belong to nobody that a worker knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DOCKER = r"""#!/bin/bash
echo "$@" >>"$DOUBLES/calls"
case $1 in
    run)
        shift
        while [[ $1 == --* ]]; do
            case $1 in
                --name) name=$2; shift 2 ;;
                --network | --env) shift 2 ;;
                *) shift ;;
            esac
        done
        trap "" TERM
        setsid "${@:2}" <&0 &  # the image's name is not looked at
        echo $! >"$DOUBLES/$name.pid"
        wait $!
        code=$?
        rm "$DOUBLES/$name.pid"
        exit $code
        ;;
    rm) kill -KILL "$(cat "$DOUBLES/$3.pid")" && rm "$DOUBLES/$3.pid" ;;
esac
"""
"""It takes no notice of SIGTERM, as a client whose container takes none."""


class ActorDouble(ThreadingHTTPServer):
    """Gives episodes to a worker, and writes down what it says they were worth."""

    def __init__(self, home: Path, episodes: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.home, self.left = home, episodes
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.going_on = True
        """Whether episodes are still open."""
        self.results: list[dict[str, Any]] = []
        self._workers: list[subprocess.Popen[bytes]] = []
        (home / "workers").mkdir()
        (home / "workers" / "actor.json").write_text(json.dumps({"url": self.url, "key": "k"}))
        (home / "docker").write_text(DOCKER)
        (home / "docker").chmod(0o755)

    def __enter__(self) -> ActorDouble:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.terminate()  # and what it runs
            try:
                worker.wait(20)
            finally:
                worker.kill()
        self.shutdown()
        self.server_close()

    def worker(self, script: Path, *command: str, grace: float = 10.0) -> subprocess.Popen[bytes]:
        """Start a worker with a slot; this docker is the first on its PATH."""
        path = f"{self.home}:{os.environ['PATH']}"
        variables = os.environ | {"PATH": path, "DOUBLES": str(self.home)}
        words = [sys.executable, script, self.home, "--slots", "1", "--grace", str(grace), "--"]
        self._workers.append(subprocess.Popen([*words, *command], env=variables))
        return self._workers[-1]

    def calls(self) -> list[str]:
        """Return how docker was called."""
        return (self.home / "calls").read_text().rstrip("\n").split("\n")


class _Requests(BaseHTTPRequestHandler):
    server: ActorDouble

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        actor, path = self.server, self.path.removeprefix("/v1/work/")
        status, answer = 200, b"{}"
        if path == "lease":
            if actor.left:
                actor.left -= 1
                answer = json.dumps(
                    {
                        "base_url": actor.url,
                        "api_key": "of the agent",
                        "work_key": "w",
                        "lease_s": 0.3,
                        "problem": {"prompt": "2:7>", "reference": 3, "seed": 1},
                    }
                ).encode()
            else:
                threading.Event().wait(0.05)
                status, answer = 204, b""
        elif path == "heartbeat":
            status = 200 if actor.going_on else 401
        else:
            actor.results.append(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a worker that was ended
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
