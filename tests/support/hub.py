"""A hub on this machine: one repository, as far as a download asks for it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository; `asked` are those that were downloaded."""

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repository, self.files = repository, files
        self.asked: list[str] = []

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that downloads from here, with an empty cache in `home`."""
        return os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path, repository = self.path.partition("?")[0], self.server.repository
        name = path.rpartition("/")[2]
        headers, content, status = {}, b"", 200
        if path.startswith(f"/api/models/{repository}/tree/"):
            entries = [
                {"type": "file", "path": one, "size": len(data), "oid": one}
                for one, data in self.server.files.items()
            ]
            content = json.dumps(entries).encode()
        elif path.startswith(f"/api/models/{repository}"):
            siblings = [{"rfilename": one} for one in self.server.files]
            content = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"/{repository}/resolve/") and name in self.server.files:
            content = self.server.files[name]
            digest = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'}
            self.server.asked += [name] * body
        else:
            status = 404
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serving(repository: str, files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve these files of a repository."""
    server = Hub(repository, dict(files))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
