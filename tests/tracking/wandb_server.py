"""Substitute for W&B's server: user, state of a resumed run, streamed history, files, artifacts.

Another request gets an error; W&B's process logs that and continues.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from tests.tracking.faults import FaultyHandler, Switch

_PROJECT = {"id": "p", "name": "house", "entity": {"id": "e", "name": "me"}}


class _Handler(FaultyHandler):
    runs: dict[str, dict[int, dict[str, Any]]]  # history lines by run and offset
    files: dict[str, bytes]  # by path
    artifacts: dict[str, dict[str, Any]]  # by id

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.files[self.path.partition("/kept/")[2]] = body
        return self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.endswith(("/graphql", "/file_stream")):
            return self._answer({})
        asked = json.loads(
            gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        )
        if self.path == "/graphql":
            name = re.search(r"(?:query|mutation) (\w+)", asked["query"])
            known = name.group(1) if name else "Viewer" if "viewer" in asked["query"] else ""
            return self._answer(self._graphql(known, asked.get("variables") or {}))
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
        if name in ("Viewer", "GetViewer"):
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
        if (handled := self._content(name, variables)) is not None:
            return {"data": handled}
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

    def _content(self, name: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """Answer requests for history, files and artifacts."""
        url = f"http://{self.headers['Host']}/kept"
        artifact = given.get("artifactID") or given.get("id") or ""
        if name == "History":
            lines = [line for _, line in sorted(self.runs.get(given["run"], {}).items())]
            last = max((line["_step"] for line in lines), default=-1)
            first, end = given["min"], given["max"]
            page = [json.dumps(line) for line in lines if first <= line["_step"] < end]
            run = {"historyKeys": {"lastStep": last, "keys": {}}, "history": page}
            return {"project": {"run": run if given["run"] in self.runs else None}}
        if name == "Files":
            nodes = [{"name": n, "sizeBytes": len(self.files.get(n, ""))} for n in given["names"]]
            edges = [{"node": node} for node in nodes]
            return {"project": {"run": {"files": {"edges": edges}}}}
        if name == "ArtifactType":
            return {"project": {"artifact": None}}
        if name == "ClientIDMapping":
            found = [
                key for key, kept in self.artifacts.items() if kept["client"] == given["clientID"]
            ]
            return {"clientIDMapping": {"serverID": found[0]} if found else None}
        if name == "ArtifactState":
            return {"artifact": {"state": self.artifacts[artifact]["state"]}}
        if name == "CreateRunFiles":
            files = [{"name": n, "uploadUrl": f"{url}/{n}"} for n in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if name == "CreateArtifact":
            new = str(len(self.artifacts))
            asked = given.get("input", given)  # flat before 0.27
            self.artifacts[new] = {"client": asked["clientID"], "state": "PENDING", "files": []}
            sequence = {"id": "s", "latestArtifact": None}
            made = {"id": new, "state": "PENDING", "artifactSequence": sequence}
            return {"createArtifact": {"artifact": made}}
        if name == "CreateArtifactManifest":
            file = {"id": "f", "uploadUrl": f"{url}/manifest-{artifact}", "uploadHeaders": []}
            manifest = {"id": artifact, "file": {**file, "name": "m", "displayName": "m"}}
            return {"createArtifactManifest": {"artifactManifest": manifest}}
        if name == "UpdateArtifactManifest":
            key = given["artifactManifestID"]
            file = {"id": "f", "uploadUrl": f"{url}/manifest-{key}", "uploadHeaders": []}
            manifest = {"id": key, "file": {**file, "name": "m", "displayName": "m"}}
            return {"updateArtifactManifest": {"artifactManifest": manifest}}
        if name == "CreateArtifactFiles":
            edges = [
                {
                    "node": {
                        "id": "f",
                        "name": spec["name"],
                        "displayName": spec["name"],
                        "uploadUrl": f"{url}/artifact-{spec['artifactID']}/{spec['name']}",
                        "uploadHeaders": [],
                        "uploadMultipartUrls": None,
                        "storagePath": f"wandb_artifacts/{spec['artifactID']}/{spec['name']}",
                        "artifact": {"id": spec["artifactID"]},
                    }
                }
                for spec in given.get("input", given)["artifactFiles"]
            ]
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if name == "CommitArtifact":
            self.artifacts[artifact]["state"] = "COMMITTED"
            self.files[f"committed/{self.artifacts[artifact]['client']}"] = b"yes"
            return {"commitArtifact": {"artifact": {"id": artifact, "digest": "d"}}}
        return None

    def _answer(self, what: dict[str, Any]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def wandb_server(
    switch: Switch | None = None, files: dict[str, bytes] | None = None
) -> Iterator[tuple[str, dict[str, dict[int, dict[str, Any]]]]]:
    """Serve, and yield the address and the received history lines by run and offset.

    `files` receives the uploaded files by path, and `committed/ID` for an artifact of a client.
    """
    kept = {} if files is None else files
    fields = {"runs": {}, "files": kept, "artifacts": {}, "switch": switch or Switch()}
    handler = type("Handler", (_Handler,), fields)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.runs
        server.shutdown()
