"""`rlctl export --push` with the hub's own client and a stand-in for the hub in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from rlctl.__main__ import main
from rlctl.runtime.checkpoint.export import MARKER
from tests.ports import free_port
from tests.recorded import exportable

Rlctl = Callable[..., tuple[str, str]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Yield a hub that the client of this process connects to, with a token."""
    huggingface_hub.close_session()
    with serving() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_OIDC_RESOURCE", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def rlctl(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Rlctl:
    """Return `rlctl export`, which checks the exit code and returns what it prints."""
    exportable(tmp_path / "runs")

    def export(*words: str, code: int = 0) -> tuple[str, str]:
        root = ["--root", str(tmp_path / "runs")]
        found = main(["export", "r", str(tmp_path / "model"), *words, *root])
        out, err = capfd.readouterr()
        assert TOKEN not in out + err
        assert found == code, err
        return out, err

    return export


def test_push_creates_a_repository_and_later_adds_commits(
    rlctl: Rlctl, hub: Hub, tmp_path: Path
) -> None:
    out, _ = rlctl("--push", "me/model", "--private", "--json")
    pushed = json.loads(out)
    assert (pushed["run"], pushed["step"], pushed["created"]) == ("p/r", 1, True)
    assert pushed["url"] == f"{hub.url}/me/model"
    repo = hub.repos["me/model"]
    assert repo.private
    assert set(repo.files) == {"config.json", "README.md"}  # the marker is for this machine
    assert repo.files["README.md"] == (tmp_path / "model" / "README.md").read_bytes()
    assert repo.commits == ["r after step 1"]
    repo.files.clear()
    _, err = rlctl("--push", "me/model", "--card-only", "--force")
    assert "me/model exists: the push adds a commit to it" in err
    assert "pushing " in err
    assert set(repo.files) == {"README.md"}
    assert len(repo.commits) == 2
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {"README.md", MARKER}


@pytest.mark.parametrize("name", ["model", "a/b/c", "me/mo del", "-me/model", "me/x..y"])
def test_a_name_without_org_is_refused(rlctl: Rlctl, tmp_path: Path, name: str) -> None:
    _, err = rlctl(f"--push={name}", code=2)
    assert "--push should be ORG/NAME" in err
    assert "my-org/my-model" in err
    assert not (tmp_path / "model").exists()


def test_private_needs_push_and_a_repository_that_is_not_public(rlctl: Rlctl, hub: Hub) -> None:
    assert "--private needs --push" in rlctl("--private", code=2)[1]
    hub.repos["me/model"] = Repo(private=False)
    _, err = rlctl("--private", "--push", "me/model", code=5)
    assert "me/model exists and is public" in err
    assert hub.repos["me/model"].commits == []


def test_a_missing_or_wrong_token_is_reported_before_the_export(
    rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "w" * 30)
    _, err = rlctl("--push", "me/model", code=7)
    assert "the hub refuses the token (401)" in err
    assert "w" * 30 not in err
    monkeypatch.delenv("HF_TOKEN")
    _, err = rlctl("--push", "me/model", code=7)
    for text in ("no token for the Hugging Face hub is set", "HF_TOKEN", "hf auth login"):
        assert text in err
    assert "see: rlctl explain E-HUB-PUSH" in err
    assert not (tmp_path / "model").exists()


def test_a_hub_that_refuses_is_reported_with_its_reason(
    rlctl: Rlctl, hub: Hub, tmp_path: Path
) -> None:
    _, err = rlctl("--push", "others/model", code=7)
    assert "the token may not write to others/model (403): You cannot create" in err
    hub.full = True
    _, err = rlctl("--push", "me/model", "--force", code=7)
    assert "cannot push to me/model (413): Your storage is full" in err
    assert "hf upload me/model" in err
    assert (tmp_path / "model" / "config.json").exists()


def test_a_hub_without_a_network_is_reported(rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    _, err = rlctl("--push", "me/model", code=7)
    assert "the hub does not respond within 5 s" in err
    assert "HF_ENDPOINT=URL" in err


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
