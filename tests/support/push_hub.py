"""A hub on this machine that takes pushes: repositories, commits and large files (LFS), as far as
the client asks for them; and what can go wrong with one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "secretsecret" * 3
LARGE = 2**14
"""Bytes from which on a file is stored apart."""


@dataclass
class Repository:
    """What was pushed. commits: the paths that each of them wrote, and removed."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[list[str], list[str]]] = field(default_factory=list)


class PushHub(ThreadingHTTPServer):
    """`repositories` by name; `faults`: the beginning of a path -> the status of its answer, which
    repeats the token, or None for no answer; `asked`: requests; `stored`: large files.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Pushes)
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, int | None] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Pushes(BaseHTTPRequestHandler):
    server: PushHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def handle_all(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {path}")
        for beginning, status in hub.faults.items():
            if path.startswith(beginning):
                if status is None:
                    hub.released.wait(60)
                    self.close_connection = True
                    return
                sent = self.headers.get("Authorization")
                self.answer(status, {"error": f"the hub says {status} to {sent}"})
                return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and self.command != "PUT":
            self.answer(401, {"error": "Invalid credentials in Authorization header"})
            return
        self.answer(*self.respond(path, body))

    do_GET = do_POST = do_PUT = do_HEAD = handle_all

    def respond(self, path: str, body: bytes) -> tuple[int, Any]:
        hub = self.server
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/lfs/"):
            hub.stored[path.removeprefix("/lfs/")] = body
            return 200, {}
        name = "/".join(path.removeprefix("/api/models").removesuffix(".git").split("/")[1:3])
        if path.endswith("/info/lfs/objects/batch"):
            name = "/".join(path.split("/")[1:3]).removesuffix(".git")
            return 200, {
                "transfer": "basic",
                "objects": [self.room(one) for one in json.loads(body)["objects"]],
            }
        repository = hub.repositories.get(name)
        if repository is None:
            return 404, {"error": "Repository not found"}
        if "/preupload/" in path:
            return 200, {"files": [self.mode(one) for one in json.loads(body)["files"]]}
        if "/commit/" in path:
            return self.commit(name, repository, body)
        if "/tree/" in path:
            return 200, [
                {"type": "file", "path": one, "size": len(data), "oid": "0" * 40}
                for one, data in repository.files.items()
            ]
        return 200, {"id": name, "sha": "0" * 40, "siblings": []}

    def create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{self.server.url}/{name}"}
        if name in self.server.repositories:
            return 409, answer | {"error": "You already created this model repo"}
        private = asked.get("visibility") == "private" or asked.get("private", False)
        self.server.repositories[name] = Repository(private=private)
        return 200, answer

    def mode(self, file: dict[str, Any]) -> dict[str, Any]:
        large = "lfs" if file["size"] >= LARGE else "regular"
        return {"path": file["path"], "uploadMode": large, "shouldIgnore": False}

    def room(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.server.url}/lfs/{asked['oid']}", "header": {}}
        return {"oid": asked["oid"], "size": asked["size"], "actions": {"upload": upload}}

    def commit(self, name: str, repository: Repository, body: bytes) -> tuple[int, Any]:
        written, removed = list[str](), list[str]()
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
                written.append(value["path"])
            elif key == "lfsFile":
                data = self.server.stored[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                assert len(data) == value["size"]
                repository.files[value["path"]] = data
                written.append(value["path"])
            elif key == "deletedFile":
                del repository.files[value["path"]]
                removed.append(value["path"])
        repository.commits.append((written, removed))
        oid = f"{len(repository.commits):040}"
        return 200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid}

    def answer(self, status: int, content: Any) -> None:
        data = b"" if self.command == "HEAD" else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def taking_pushes() -> Iterator[PushHub]:
    """Serve a hub without repositories."""
    server = PushHub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
