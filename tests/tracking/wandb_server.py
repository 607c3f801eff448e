"""Substitute for W&B's server: user, state of a resumed run, and the streamed history.

It rejects files, artifacts and tables; W&B's process logs that and continues.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PROJECT = {"id": "p", "name": "house", "entity": {"id": "e", "name": "me"}}


class _Handler(BaseHTTPRequestHandler):
    runs: dict[str, dict[int, dict[str, Any]]]  # history lines by run and offset

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.endswith(("/graphql", "/file_stream")):
            return self._answer({})
        asked = json.loads(
            gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        )
        if self.path == "/graphql":
            name = re.search(r"(?:query|mutation) (\w+)", asked["query"])
            return self._answer(
                self._graphql(name.group(1) if name else "", asked.get("variables") or {})
            )
        chunk = asked.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        self.runs[self.path.split("/")[-2]].update(
            enumerate(map(json.loads, chunk["content"]), start=chunk["offset"])
        )
        return self._answer({"exitcode": None, "limits": {}})

    def _graphql(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables.get("name", "")
        if name == "RunResumeStatus" and run in self.runs:
            lines = self.runs[run]
            counts = {
                "historyLineCount": len(lines),
                "logLineCount": 0,
                "eventsLineCount": 0,
                "eventsTail": "[]",
                "summaryMetrics": "{}",
            }
            tail = json.dumps([json.dumps(lines[max(lines)])] if lines else [])
            bucket = {
                "id": "b",
                "name": run,
                "config": "{}",
                "tags": [],
                "wandbConfig": '{"t":1}',
                "historyTail": tail,
                **counts,
            }
            return {"data": {"model": {**_PROJECT, "bucket": bucket}}}
        if name == "RunResumeStatus":
            return {"data": {"model": None}}
        if name == "Viewer":
            return {
                "data": {
                    "viewer": {
                        "id": "me",
                        "username": "me",
                        "entity": "me",
                        "flags": "{}",
                        "teams": {"edges": []},
                    }
                }
            }
        if name == "UpsertBucket":
            bucket = {
                "id": "b",
                "name": run,
                "config": "{}",
                "historyLineCount": len(self.runs.setdefault(run, {})),
                "project": _PROJECT,
            }
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        return {"data": None, "errors": [{"message": f"{name} is not implemented"}]}

    def _answer(self, what: dict[str, Any]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def wandb_server() -> Iterator[tuple[str, dict[str, dict[int, dict[str, Any]]]]]:
    """Serve, and yield the address and the received history lines by run and offset."""
    handler = type("Handler", (_Handler,), {"runs": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.runs
        server.shutdown()
