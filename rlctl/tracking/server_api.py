"""Requests to the servers of trackers, to test a key and to read back what arrived.

The SDKs retry for minutes and take a refused key for a network problem, so they are not used.
"""

from __future__ import annotations

import base64
import csv
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlctl.tracking.tracker import SAMPLES

PROBE_S = 6.0
_TIMEOUT_S = 20.0
INIT_TIMEOUT_S = 20  # for an SDK to open a run online
_PAGE = 1000  # rows of a history in one request
_BATCH = 50  # files or artifacts in one request
_EXPORTED = 16  # metrics in one export
_REFUSALS = {401: "the key is refused by", 403: "access is forbidden by"}


def ask(
    url: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT_S,
) -> Any:
    """Return the JSON that a server answers; POST if there is a body.

    Raises OSError, ValueError and HTTPException.
    """
    data = None
    if body is not None:
        data = json.dumps(body).encode()
    sent = {"Content-Type": "application/json", "User-Agent": "rlctl", **(headers or {})}
    return json.loads(_read(urllib.request.Request(url, data, sent), timeout))


def _read(request: urllib.request.Request | str, timeout: float = _TIMEOUT_S) -> str:
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read().decode()


def problem(url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> str | None:
    """Return the reason why a server cannot be used, as a clause; None if it answers.

    Unknown problems, such as a certificate that the SDK may accept, are no reason.
    """
    host = urlsplit(url).netloc.rpartition("@")[2]
    try:
        ask(url, body, headers, PROBE_S)
    except urllib.error.HTTPError as error:
        if error.code in _REFUSALS:
            return f"{_REFUSALS[error.code]} {host} (status {error.code})"
        if error.code < 500:
            return None
        return f"{host} fails with status {error.code}"
    except TimeoutError:
        return f"{host} does not answer within {PROBE_S:g} s"
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return f"{host} does not answer within {PROBE_S:g} s"
        if isinstance(error.reason, ssl.SSLError):  # of a certificate
            return None
        return f"{host} cannot be reached: {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"{host} closes connections: {error or type(error).__name__}"
    except ValueError:
        return None
    return None


def wandb_problem(base_url: str, key: str) -> str | None:
    """Return the reason why W&B's server cannot be used with this key, None if it can."""
    query = {"query": "query Viewer {viewer {id}}", "variables": {}}
    return problem(f"{base_url.rstrip('/')}/graphql", query, _basic(key))


def swanlab_problem(api_host: str, key: str) -> str | None:
    """Return the reason why SwanLab's server cannot be used with this key, None if it can."""
    return problem(f"{_root(api_host)}/login/api_key", {}, {"authorization": key})


def mlflow_problem(uri: str) -> str | None:
    """Return the reason why an MLflow server cannot be used, None if it can.

    The account is that of MLflow's environment variables.
    """
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    headers: dict[str, str] = {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if user:
        headers = _basic(os.environ.get("MLFLOW_TRACKING_PASSWORD", ""), user)
    return problem(
        f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/get?experiment_id=0", None, headers
    )


def _basic(key: str, user: str = "api") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


def _root(api_host: str) -> str:
    return f"{api_host.rstrip('/').removesuffix('/api')}/api"


def _batches(items: Iterable[str], size: int) -> list[list[str]]:
    every = list(items)
    return [every[first : first + size] for first in range(0, len(every), size)]


@dataclass(frozen=True)
class WandbRun:
    """Run on a W&B server; `step` is the metric with the training step."""

    base_url: str
    key: str
    entity: str
    project: str
    id: str
    step: str

    def received(self, names: Collection[str]) -> dict[str, set[int]]:
        """Return the steps of each metric, and of complete tables of samples."""
        found: dict[str, set[int]] = {name: set() for name in names}
        tables: dict[int, list[Mapping[str, Any]]] = {}
        for row in self._history():
            if (step := row.get(self.step)) is None:
                continue
            for name in row.keys() & found.keys():
                found[name].add(int(step))
            if isinstance(table := row.get(SAMPLES), Mapping):
                tables.setdefault(int(step), []).append(table)
        every = [table for known in tables.values() for table in known]
        stored = self._stored(every)
        found[SAMPLES] = {
            step for step, known in tables.items() if any(_id_of(each) in stored for each in known)
        }
        return found

    def _history(self) -> Iterable[dict[str, Any]]:
        first = 0
        end = 1
        while first < end:
            query = """query History($project: String!, $entity: String!, $run: String!,
                $min: Int64!, $max: Int64!, $size: Int!) {
                project(name: $project, entityName: $entity) { run(name: $run) {
                historyKeys history(minStep: $min, maxStep: $max, samples: $size) } } }"""
            run = self._run(query, min=first, max=first + _PAGE, size=_PAGE)
            end = int((run.get("historyKeys") or {}).get("lastStep", -1)) + 1
            first += _PAGE
            yield from map(json.loads, run.get("history") or ())

    def _stored(self, tables: Iterable[Mapping[str, Any]]) -> set[str]:
        """Return the ids of tables whose file is uploaded, and whose artifact is committed."""
        files = {str(table.get("path")): table for table in tables}
        stored: set[str] = set()
        query = """query Files($project: String!, $entity: String!, $run: String!,
            $names: [String], $size: Int!) {
            project(name: $project, entityName: $entity) { run(name: $run) {
            files(names: $names, first: $size) { edges { node { name sizeBytes } } } } } }"""
        for names in _batches(files, _BATCH):
            for edge in self._run(query, names=names, size=len(names))["files"]["edges"]:
                node = edge["node"]
                if node["name"] in files and int(node.get("sizeBytes") or 0) > 0:
                    stored.add(node["name"])
        return {name for name in stored if self._is_committed(files[name])}

    def _is_committed(self, table: Mapping[str, Any]) -> bool:
        client = str(table.get("artifact_path") or "").partition("://")[2].partition("/")[0]
        if not client:
            return True
        query = """query ClientIDMapping($clientID: ID!) {
            clientIDMapping(clientID: $clientID) { serverID } }"""
        mapping = self._ask(query, clientID=client).get("clientIDMapping")
        if not mapping:
            return False
        query = "query ArtifactState($id: ID!) { artifact(id: $id) { state } }"
        found = self._ask(query, id=mapping["serverID"]).get("artifact") or {}
        return found.get("state") == "COMMITTED"

    def _run(self, query: str, **variables: Any) -> dict[str, Any]:
        place = {"project": self.project, "entity": self.entity, "run": self.id}
        project = self._ask(query, **place, **variables).get("project") or {}
        return project.get("run") or {}

    def _ask(self, query: str, **variables: Any) -> dict[str, Any]:
        asked = {"query": query, "variables": variables}
        answer = ask(f"{self.base_url.rstrip('/')}/graphql", asked, _basic(self.key))
        if answer.get("errors"):
            raise ValueError(str(answer["errors"][0].get("message")))
        return answer["data"]


def _id_of(table: Mapping[str, Any]) -> str:
    return str(table.get("path"))


@dataclass(frozen=True)
class SwanLabRun:
    """Experiment on a SwanLab server; `path` is `/user/project/id`."""

    api_host: str
    key: str
    path: str

    def received(self, names: Collection[str]) -> dict[str, set[int]]:
        """Return the steps of each metric, and of the samples."""
        root = _root(self.api_host)
        session = {"authorization": self.key}
        session = {"Cookie": f"sid={ask(f'{root}/login/api_key', {}, session)['sid']}"}
        user, project, run = self.path.strip("/").split("/")
        known = ask(f"{root}/project/{user}/{project}/runs/{run}", None, session)
        home = ask(f"{root}/project/{user}/{project}", None, session)["cuid"]
        reference = {"experimentId": known["cuid"], "createdAt": _seconds(known["createdAt"])}
        found: dict[str, set[int]] = {}
        for keys in _batches((name for name in names if name != SAMPLES), _EXPORTED):
            columns = [{**reference, "experimentName": run, "key": key} for key in keys]
            asked = {"projectId": home, "columns": columns}
            export = ask(f"{root}/house/metrics/scalar/export", asked, session)["cosKey"]
            urls = ask(f"{root}/files/presigned/get", {"paths": [export]}, session)["urls"]
            found |= _exported(keys, _read(urls[0]))
        asked = {"projectId": home, "columns": [{**reference, "key": SAMPLES}]}
        media = ask(f"{root}/house/metrics/f_media", asked, session)
        rows = next(iter(media or ()), {}).get("metrics") or ()
        found[SAMPLES] = {int(row["index"]) for row in rows if row}
        return found


def _seconds(created_at: str) -> int:
    from datetime import datetime

    return int(datetime.fromisoformat(created_at.replace("Z", "+00:00")).timestamp())


def _exported(keys: list[str], text: str) -> dict[str, set[int]]:
    """Return the steps of each metric in an export: a step, then a value and a time for each."""
    found: dict[str, set[int]] = {key: set() for key in keys}
    for row in list(csv.reader(text.splitlines()))[1:]:
        for place, key in enumerate(keys):
            if row[1 + 2 * place : 2 + 2 * place] not in ([], [""]):
                found[key].add(int(float(row[0])))
    return found
