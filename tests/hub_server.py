"""Stand-in for the Hugging Face hub: the requests of a push, with repositories in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "s" * 30


@dataclass
class Repo:
    """Model repository: its files and the titles of its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class Hub(ThreadingHTTPServer):
    """Server for user `me`, who may not write to names of `others`; `full` refuses commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, Repo] = {}
        self.full = False


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._reply(200, None)

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/api/models/")
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self._reply(401, {"error": "Invalid credentials"})
        elif self.path == "/api/whoami-v2":
            self._reply(200, {"type": "user", "name": "me"})
        elif name in self.server.repos:
            repo = self.server.repos[name]
            self._reply(200, {"id": name, "private": repo.private, "siblings": []})
        else:
            self._reply(404, {"error": "Repository not found"}, code="RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] == "others":
                self._reply(403, {"error": "You cannot create models under others"})
                return
            self.server.repos[name] = Repo(asked.get("visibility") == "private")
            self._reply(200, {"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            self._reply(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            self._reply(200, {"files": files})
        elif self.server.full:
            self._reply(413, {"error": "Your storage is full"})
        else:
            self._commit(self.path.removeprefix("/api/models/").partition("/commit/")[0], body)

    def _commit(self, name: str, body: bytes) -> None:
        repo = self.server.repos[name]
        for item in map(json.loads, body.splitlines()):
            if item["key"] == "header":
                repo.commits.append(item["value"]["summary"])
            else:
                repo.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        oid = f"{len(repo.commits):040d}"
        self._reply(200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid})

    def _reply(self, status: int, body: Any, code: str = "") -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving() -> Iterator[Hub]:
    """Yield a hub that serves until the end of the block."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
