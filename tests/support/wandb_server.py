"""A double of W&B's API, as far as its client calls it: it remembers runs, and fails on demand."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Answers until `ails` is `500` (to everything) or `hangs` (accepts and never answers)."""

    def __init__(self) -> None:
        self.ails = ""
        self.history: dict[str, dict[int, dict[str, Any]]] = {}
        """Run -> line -> row."""
        self.config: dict[str, dict[str, Any]] = {}
        self.exits: dict[str, list[int]] = {}
        self.uploads: dict[str, bytes] = {}
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if outer.ails == "hangs":
                    outer._closing.wait()
                    return
                answer = b"{}" if outer.ails else json.dumps(outer._answer(self.path, body))
                out = answer if isinstance(answer, bytes) else answer.encode()
                self.send_response(500 if outer.ails else 200)
                self.send_header("Content-Length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            do_PUT = do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Print nothing of clients that are gone."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def rows(self, run: str) -> list[dict[str, Any]]:
        """The run's history."""
        return [row for _, row in sorted(self.history.get(run, {}).items())]

    def table(self) -> dict[str, Any]:
        """The newest table of samples."""
        return json.loads(self.uploads["samples.table.json"])

    def _answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.startswith("/up/"):
            self.uploads[path.removeprefix("/up/")] = body
            return {}
        given = json.loads(body or b"{}")
        if path.endswith("/file_stream"):
            return self._stream(path.split("/")[-2], given)
        name = given.get("query", "").split("(")[0].split("{")[0].split()[-1:]
        answer = getattr(self, f"_{name[0]}", None) if name else None
        return {"data": answer(given.get("variables") or {}) if answer else {}}

    def _stream(self, run: str, given: dict[str, Any]) -> dict[str, Any]:
        part = given.get("files", {}).get("wandb-history.jsonl")
        if part:
            lines = enumerate(part["content"], part["offset"])
            self.history.setdefault(run, {}).update((n, json.loads(one)) for n, one in lines)
        if given.get("complete"):
            self.exits.setdefault(run, []).append(given["exitcode"])
        return {}

    def _Viewer(self, _: Any) -> dict[str, Any]:
        teams = {"edges": []}
        viewer = {"id": "v", "entity": "me", "username": "me", "email": "", "flags": "{}"}
        return {"viewer": viewer | {"teams": teams}}

    def _RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["name"]
        if run not in self.config:
            return {"model": None}
        rows = self.rows(run)
        bucket = self._bucket(run) | {
            "historyLineCount": len(rows),
            "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
            **{"eventsTail": "[]", "eventsLineCount": 0, "logLineCount": 0, "tags": []},
            **{"summaryMetrics": json.dumps(rows[-1] if rows else {}), "notes": None},
            **{"config": json.dumps(self.config[run]), "wandbConfig": "{}"},
        }
        project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
        return {"model": project | {"bucket": bucket}}

    def _UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        run, known = variables["name"], variables["name"] in self.config
        config = json.loads(variables.get("config") or "{}")
        self.config[run] = self.config.get(run, {}) | config
        project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
        bucket = self._bucket(run) | {"project": project, "config": "{}", "sweepName": None}
        return {"upsertBucket": {"bucket": bucket, "inserted": not known}}

    def _bucket(self, run: str) -> dict[str, Any]:
        return {"id": "b", "name": run, "displayName": run, "description": None}

    def _CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": one, "uploadUrl": f"{self.url}/up/{one}"} for one in variables["files"]]
        return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}

    def _ArtifactType(self, _: Any) -> dict[str, Any]:
        return {"project": {"artifact": None}}

    def _CreateArtifact(self, _: Any) -> dict[str, Any]:
        sequence = {"id": "s", "latestArtifact": None}
        artifact = {"id": "a", "state": "PENDING", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}

    def _CreateArtifactManifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        file = {"id": "f", "uploadUrl": f"{self.url}/up/{variables['name']}", "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}

    def _CreateArtifactFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        edges = [
            {
                "node": {
                    **{"storagePath": "", "uploadHeaders": [], "uploadMultipartUrls": None},
                    **{"uploadUrl": f"{self.url}/up/{one['name']}", "artifact": {"id": "a"}},
                }
            }
            for one in variables["input"]["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _CommitArtifact(self, _: Any) -> dict[str, Any]:
        return {"commitArtifact": {"artifact": {"id": "a", "digest": ""}}}
