"""Folders of exports: what they may replace, model cards, with texts that try to be markup, pushes.

`rlctl export --push` uses the hub's own client and a stand-in for the hub in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import markdown
import pytest
import yaml
from huggingface_hub import constants

from rlctl.__main__ import main
from rlctl.errors import ConfigError, ConflictError, NotFoundError, ResourceError
from rlctl.recipes.role_table import ACTOR
from rlctl.runs.labels import Labels
from rlctl.runs.run import Run, read_run
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.card import MAX_POINTS, model_card
from rlctl.runtime.export import MARKER, export
from rlctl.runtime.training.checkpoint_store import MANIFEST, CheckpointStore
from rlctl.runtime.training.complete_checkpoints import policy_folder
from tests.ports import free_port
from tests.recorded import exportable
from tests.small_disk import small_disk

METRIC = "val-core/openai/gsm8k/acc/mean@1"
HOSTILE = "<img src=x onerror=alert(1)> | [x](javascript:alert(1)) `a` **b** _c_ &lt; ``` $$d$$"
SECRET = "sk-" + "a1" * 20


def run_in(folder: Path, name: str, settings: dict[str, Any], rows: list[dict[str, float]]) -> Run:
    made = RunDir.create(folder, "p", name, "grpo")
    made.write_config("algorithm: {name: ppo, adv_estimator: grpo}\n", {})
    origins = {
        key: [
            {"level": 1, "value": None, "where": "base"},
            {"level": 2, "value": value, "where": "x"},
        ]
        for key, value in settings.items()
    }
    (made.path / "origins.json").write_text(json.dumps(origins))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (made.path / "metrics.jsonl").write_text(lines)
    return read_run(made.path)


def split(card: str) -> tuple[dict[str, Any], str]:
    """Return the metadata and the text of a card."""
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_card_has_metadata_results_and_a_curve(tmp_path: Path) -> None:
    rows = [{"step": step, METRIC: step / 100, "critic/score/mean": 0.5} for step in range(41)]
    settings = {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B", "trainer.seed": 3}
    run = run_in(tmp_path, "r", settings, rows)
    front, text = split(model_card(run, 30, ACTOR, "merged"))
    assert front["base_model"] == "Qwen/Qwen2.5-0.5B"
    assert front["library_name"] == "transformers"
    (entry,) = front["model-index"]
    (result,) = entry["results"]
    assert result["dataset"]["name"] == "openai/gsm8k"
    assert result["metrics"] == [{"type": "accuracy", "name": METRIC, "value": 0.3}]
    assert "| this model (validated at step 30) | 30.0 % |" in text
    assert "| best of the run (step 40) | 40.0 % |" in text
    assert "| algorithm | ppo |\n| advantages | grpo |" in text
    assert "| trainer.seed | 3 |" in text
    curve = text.partition("## Curve\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(curve) == 2 + MAX_POINTS
    assert curve[2].startswith("| 0 | 0.0 % | 0.5 |")
    assert curve[-1].startswith("| 30 |")
    front, _ = split(model_card(run, 30, ACTOR, "adapter"))
    assert front["library_name"] == "peft"


def test_a_run_without_validation_has_no_index(tmp_path: Path) -> None:
    front, text = split(model_card(run_in(tmp_path, "r", {}, []), 1, ACTOR, "merged"))
    assert "model-index" not in front
    assert "base_model" not in front
    assert "The run was not validated." in text
    assert "## Curve" not in text


@pytest.mark.parametrize("hostile", [HOSTILE, "a: b\n---\n# c", "x\x1b[2J\u202ey"])
def test_texts_of_a_run_are_shown_and_never_rendered(tmp_path: Path, hostile: str) -> None:
    metric = f"val-core/{hostile.replace(chr(10), ' ')}/acc/mean@1"
    settings = {
        "trainer.api_key": SECRET,
        hostile: hostile,
        "actor_rollout_ref.model.path": hostile,
    }
    name = hostile.replace("/", "_").replace("\n", " ") if hostile.isprintable() else "r"
    run = run_in(tmp_path, name, settings, [{"step": 1, metric: 0.5}, {"step": 2, metric: 0.25}])
    assert run.record is not None
    record = replace(
        run.record, recipe=hostile, data={hostile: hostile}, command=["rlctl", hostile, SECRET]
    )
    run = replace(run, record=record, labels=Labels((hostile,), f"{hostile} {SECRET}"))
    card = model_card(run, 2, ACTOR, "merged")
    assert SECRET not in card
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", card)
    front, text = split(card)
    assert front["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.25
    assert "base_model" not in front
    html = markdown.markdown(text, extensions=["tables", "fenced_code"])
    outside = re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)
    tags = set(re.findall(r"<(\w+)", html))
    assert tags == {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"}
    assert outside.count("<code>") == 1  # `license:` in the last section
    for line in text.splitlines():
        if line.startswith("| "):
            assert line.count("|") in (3, 4)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(exportable(tmp_path / "runs").path)


def test_force_replaces_an_export(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    export(run, None, target)  # an empty folder is accepted
    with pytest.raises(ConflictError, match="already exists"):
        export(run, None, target)
    (target / "config.json").unlink()
    export(run, None, target, force=True)
    assert json.loads((target / MARKER).read_text())["run"] == "p/r"
    assert (target / "config.json").exists()


def test_force_keeps_a_folder_with_anything_else(run: Run, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter1.tex").write_text("years of work")
    with pytest.raises(ConflictError, match=f"is not an export: it has no {MARKER}") as caught:
        export(run, None, thesis, force=True)
    assert caught.value.exit_code == 5
    model = tmp_path / "model"
    export(run, None, model)
    (model / "notes").mkdir()
    (model / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ConflictError, match=r"it also has notes/mine\.txt"):
        export(run, None, model, force=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConflictError, match="is a file"):
        export(run, None, file, force=True)
    assert (thesis / "chapter1.tex").exists()
    assert (model / "notes" / "mine.txt").exists()


def test_a_full_disk_is_one_line(run: Run, tmp_path: Path) -> None:
    policy = policy_folder(CheckpointStore(run.path / "checkpoints"))
    content = b"x" * 100_000
    (policy / "model.safetensors").write_bytes(content)
    checkpoint = next(each for each in policy.parents if (each / MANIFEST).exists())
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    name = str((policy / "model.safetensors").relative_to(checkpoint))
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][name] = {"bytes": len(content), "sha256": digest}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        with pytest.raises(ResourceError) as caught:
            export(run, None, disk / "model")
        assert not list(disk.iterdir())
    (problem,) = caught.value.problems
    assert problem.message == "cannot write model: No space left on device"
    assert problem.where == f"{tmp_path}/disk/model"


def test_the_current_folder_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    with pytest.raises(ConflictError, match="is the current folder"):
        export(run, None, Path(), force=True)
    with pytest.raises(ConflictError, match="is not an export"):
        export(run, None, Path(".."), force=True)


def test_a_missing_or_damaged_checkpoint_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="of step 99"):
        export(run, 99, tmp_path / "never")
    policy = policy_folder(CheckpointStore(run.path / "checkpoints"))
    (policy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json has"):
        export(run, None, tmp_path / "never")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


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


@pytest.mark.plugin("console")
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


@pytest.mark.plugin("console")
@pytest.mark.parametrize("name", ["model", "a/b/c", "me/mo del", "-me/model", "me/x..y"])
def test_a_name_without_org_is_refused(rlctl: Rlctl, tmp_path: Path, name: str) -> None:
    _, err = rlctl(f"--push={name}", code=2)
    assert "--push should be ORG/NAME" in err
    assert "my-org/my-model" in err
    assert not (tmp_path / "model").exists()


@pytest.mark.plugin("console")
def test_private_needs_push_and_a_repository_that_is_not_public(rlctl: Rlctl, hub: Hub) -> None:
    assert "--private needs --push" in rlctl("--private", code=2)[1]
    hub.repos["me/model"] = Repo(private=False)
    _, err = rlctl("--private", "--push", "me/model", code=5)
    assert "me/model exists and is public" in err
    assert hub.repos["me/model"].commits == []


@pytest.mark.plugin("console")
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


@pytest.mark.plugin("console")
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


@pytest.mark.plugin("console")
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
