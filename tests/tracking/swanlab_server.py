"""SwanLab's dashboard, and a substitute for its server: login, project, experiment, summaries."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from tests.tracking.faults import FaultyHandler, Switch

_CREATED = "2026-01-01T00:00:00.000Z"
_PROJECT = {
    "cuid": "p",
    "name": "house",
    "path": "/me/house",
    "visibility": "PRIVATE",
    "group": {"username": "me"},
    "_count": {"experiments": 0},
}


@dataclass
class Experiment:
    """Received data of an experiment: curve points in order, steps of texts, last state."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    media: dict[str, list[int]] = field(default_factory=dict)
    state: str = "RUNNING"
    created: dict[str, Any] = field(default_factory=dict)  # the request that created it


class _Handler(FaultyHandler):
    experiments: dict[str, Experiment]
    exports: dict[str, str]
    project: str = ""  # path of the project that was opened last

    def do_GET(self) -> None:
        if "/house/metrics/summaries/" in self.path:
            known = self.experiments[self.path.partition("?")[0].rpartition("/")[2]]
            scalar = [
                {"key": name, "step": max(step for step, _ in points)}
                for name, points in known.curves.items()
            ]
            return self._answer(
                {
                    "log": [],
                    "media": [{"key": k, "step": max(v)} for k, v in known.media.items()],
                    "scalar": scalar,
                }
            )
        type(self).project = self.path
        if self.path.startswith("/exported/"):
            return self._answer(self.exports[self.path.rpartition("/")[2]])
        if "/runs/" in self.path:
            run = self.path.rpartition("/")[2]
            if run not in self.experiments:
                return self._answer({}, 404)
            return self._answer({"cuid": run, "name": "first", "createdAt": _CREATED})
        return self._answer(_PROJECT)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if self.path.endswith("/login/api_key"):
            return self._answer(
                {
                    "sid": "s",
                    "expiredAt": "2099-01-01T00:00:00.000Z",
                    "userInfo": {"username": "me"},
                }
            )
        if self.path.endswith("/experiment"):
            new = asked["cuid"] not in self.experiments
            created = {**asked, "project": self.project}
            self.experiments.setdefault(asked["cuid"], Experiment(created=created))
            return self._answer(
                {
                    "cuid": asked["cuid"],
                    "slug": asked["cuid"],
                    "name": asked["name"],
                    "createdAt": _CREATED,
                },
                201 if new else 200,
            )
        if self.path.endswith("/house/metrics"):
            known = self.experiments[asked["experimentId"]]
            for each in asked["metrics"]:
                if asked["type"] == "scalar":
                    known.curves.setdefault(each["key"], []).append((each["index"], each["data"]))
                elif asked["type"] == "media":
                    known.media.setdefault(each["key"], []).append(each["index"])
        if self.path.endswith("/scalar/export"):
            name = f"{len(self.exports)}.csv"
            self.exports[name] = self._table(asked["columns"])
            return self._answer({"cosKey": name})
        if self.path.endswith("/files/presigned/get"):
            host = self.headers["Host"]
            return self._answer({"urls": [f"http://{host}/exported/{n}" for n in asked["paths"]]})
        if self.path.endswith("/f_media"):
            column = asked["columns"][0]
            steps = self.experiments[column["experimentId"]].media.get(column["key"], [])
            return self._answer([{"metrics": [{"index": step, "data": []} for step in steps]}])
        if self.path.endswith("/presigned/put"):
            return self._answer(
                {"urls": [f"http://{self.headers['Host']}/kept" for _ in asked["paths"]]}
            )
        return self._answer({})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith("/state"):
            self.experiments[self.path.split("/")[-2]].state = json.loads(body)["state"]
        return self._answer({})

    def _table(self, columns: list[dict[str, Any]]) -> str:
        """Return the values of metrics by step, as CSV: a value and a time for each metric."""
        known = [
            dict(self.experiments[c["experimentId"]].curves.get(c["key"], ())) for c in columns
        ]
        lines = [",".join(["step", *(f"first-{c['key']}_step,time" for c in columns)])]
        for step in sorted({step for curve in known for step in curve}):
            cells = [f"{curve[step]},1" if step in curve else "," for curve in known]
            lines.append(",".join([str(step), *cells]))
        return "\n".join(lines)

    def _answer(self, what: Any, status: int = 200) -> None:
        body = what.encode() if isinstance(what, str) else json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def swanlab_server(switch: Switch | None = None) -> Iterator[tuple[str, dict[str, Experiment]]]:
    """Serve, and yield the address and the experiments by id."""
    fields = {"experiments": {}, "exports": {}, "switch": switch or Switch()}
    handler = type("Handler", (_Handler,), fields)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.experiments
        server.shutdown()
