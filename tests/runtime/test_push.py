"""`rlctl export --push` with the hub's own client and a stand-in for the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from rlctl.__main__ import main
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.checkpoint.export import MARKER
from rlctl.runtime.checkpoint.store import CONFIG, CheckpointStore
from tests.hub_server import TOKEN, Hub, Repo, serving
from tests.ports import free_port

Rlctl = Callable[..., tuple[int, str, str]]


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
    """Return `rlctl export` of a run with a checkpoint whose policy is one small file."""
    run = RunDir.create(tmp_path / "runs", "p", "r", "ppo")
    run.write_config("trainer: {}\n", {})
    store = CheckpointStore(run.path / "checkpoints")
    aside = store.begin(1)
    (aside / "huggingface").mkdir()
    (aside / "huggingface" / "config.json").write_text("{}")
    (aside / CONFIG).write_text("trainer: {}\n")
    store.finish(1)

    def export(*words: str) -> tuple[int, str, str]:
        root = ["--root", str(tmp_path / "runs")]
        code = main(["export", "r", str(tmp_path / "model"), *words, *root])
        out, err = capfd.readouterr()
        assert TOKEN not in out + err
        return code, out, err

    return export


def test_push_creates_a_repository_and_later_adds_commits(
    rlctl: Rlctl, hub: Hub, tmp_path: Path
) -> None:
    code, out, err = rlctl("--push", "me/model", "--private", "--json")
    assert code == 0, err
    pushed = json.loads(out)
    assert (pushed["run"], pushed["step"], pushed["created"]) == ("p/r", 1, True)
    assert pushed["url"] == f"{hub.url}/me/model"
    repo = hub.repos["me/model"]
    assert repo.private
    assert set(repo.files) == {"config.json", "README.md"}  # the marker is for this machine
    assert repo.files["README.md"] == (tmp_path / "model" / "README.md").read_bytes()
    assert repo.commits == ["r after step 1"]
    repo.files.clear()
    code, out, err = rlctl("--push", "me/model", "--card-only", "--force")
    assert code == 0, err
    assert "me/model exists: the push adds a commit to it" in err
    assert "pushing " in err
    assert set(repo.files) == {"README.md"}
    assert len(repo.commits) == 2
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {"README.md", MARKER}


@pytest.mark.parametrize("name", ["model", "a/b/c", "me/mo del", "-me/model", "me/x..y"])
def test_a_name_without_org_is_refused(rlctl: Rlctl, tmp_path: Path, name: str) -> None:
    code, _, err = rlctl(f"--push={name}")
    assert code == 2
    assert "--push should be ORG/NAME" in err
    assert "my-org/my-model" in err
    assert not (tmp_path / "model").exists()


def test_private_needs_push_and_a_repository_that_is_not_public(rlctl: Rlctl, hub: Hub) -> None:
    code, _, err = rlctl("--private")
    assert code == 2
    assert "--private needs --push" in err
    hub.repos["me/model"] = Repo(private=False)
    code, _, err = rlctl("--private", "--push", "me/model")
    assert code == 5
    assert "me/model exists and is public" in err
    assert hub.repos["me/model"].commits == []


def test_a_missing_or_wrong_token_is_reported_before_the_export(
    rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "w" * 30)
    code, _, err = rlctl("--push", "me/model")
    assert code == 7
    assert "the hub refuses the token (401)" in err
    assert "w" * 30 not in err
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = rlctl("--push", "me/model")
    assert code == 7
    assert "no token for the Hugging Face hub is set" in err
    assert "HF_TOKEN" in err
    assert "hf auth login" in err
    assert "see: rlctl explain E-HUB-PUSH" in err
    assert not (tmp_path / "model").exists()


def test_a_hub_that_refuses_is_reported_with_its_reason(
    rlctl: Rlctl, hub: Hub, tmp_path: Path
) -> None:
    code, _, err = rlctl("--push", "others/model")
    assert code == 7
    assert "the token may not write to others/model (403): You cannot create" in err
    hub.full = True
    code, _, err = rlctl("--push", "me/model", "--force")
    assert code == 7
    assert "cannot push to me/model (413): Your storage is full" in err
    assert "hf upload me/model" in err
    assert (tmp_path / "model" / "config.json").exists()


def test_a_hub_without_a_network_is_reported(rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    code, _, err = rlctl("--push", "me/model")
    assert code == 7
    assert "the hub does not respond within 5 s" in err
    assert "HF_ENDPOINT=URL" in err
