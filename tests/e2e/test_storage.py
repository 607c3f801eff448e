"""Data, model, recipe and run on shared storage: a folder, and S3 served by moto."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl import remote_files as remote
from rlctl import storage
from rlctl.__main__ import main
from rlctl.data_prep.sources import data_hashes
from rlctl.errors import ConfigError, ConflictError, MissingExtraError, NotFoundError, ResourceError
from rlctl.runs.events import read_events
from rlctl.runtime.training.complete_checkpoints import damage
from tests.e2e.command import metrics, reproducible
from tests.plugin_folders import is_there
from tests.ports import free_port
from tests.progress import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start moto in its own process: vLLM's tests must not import its modules in this one."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        assert process.poll() is None, "moto's server has exited"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_until(listens, process.pid, "moto's server")
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def surroundings(server: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a cache and credentials of this test only."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(here / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(here / "none"))
    monkeypatch.setenv(storage.CACHE_VARIABLE, str(here / "cache"))
    forget()
    yield
    forget()


def forget() -> None:
    """Clear cached look-ups, as in a new process."""
    remote.fetched.cache_clear()
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket() -> str:
    fs, path = remote.open_url("s3://shelf")
    if not fs.exists(path):
        fs.mkdir(path)
    return "s3://shelf"


@pytest.fixture(params=["s3", pytest.param("file", marks=pytest.mark.soak)])
def shared(request: pytest.FixtureRequest, bucket: str, shelf: Path, tmp_path: Path) -> str:
    """Return a URL with the files of `shelf` and a recipe."""
    url = bucket if request.param == "s3" else f"file://{tmp_path}/shared"
    fs, path = remote.open_url(url)
    files = {
        file: f"{path}/{file.relative_to(shelf)}" for file in shelf.rglob("*") if file.is_file()
    }
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "trainer: {save_freq: 1, max_ckpt_to_keep: 1, test_freq: 2}\n"
    )
    remote.put(fs, files | {recipe: f"{path}/tiny.yaml"})
    recipe.unlink()
    return url


def test_run_resumes_from_its_remote_copy(
    shared: str, settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Read and store everything remotely, lose the local folder, and resume from the copy.

    The run that it is compared with has a file in the place of its project's copies, and is not
    stopped.
    """
    recipe = ("trainer.save_freq", "trainer.test_freq")
    train = [
        *("train", "ppo", "--inline", "--recipe", f"{shared}/tiny.yaml"),
        *(setting for setting in settings if not setting.startswith(recipe)),
        f"data.train_files={shared}/train.parquet",
        f"data.val_files=[{shared}/val.parquet]",
        f"actor_rollout_ref.model.path={shared}/model",
        f"trainer.mirror={shared}/runs",
    ]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "quickstart").touch()
    blocked = f"trainer.mirror=file://{tmp_path}/full"
    assert main([*train, "--name", "straight", "trainer.total_training_steps=3", blocked]) == 0
    messages = capfd.readouterr().err
    assert messages.count("is out of date") == messages.count("is incomplete") == 1
    runs, copy = Path("runs/quickstart"), f"{shared}/runs/quickstart/moved"
    events = [event["kind"] for event in read_events(runs / "straight")]
    assert events.count("mirror_failed") >= 2
    assert main([*train, "--name", "moved"]) == 0
    record = json.loads((runs / "moved" / "run.json").read_text())
    files = [f"{shared}/train.parquet", f"{shared}/val.parquet"]
    assert record["data"] == data_hashes(files, "train")
    assert steps(copy) == ["step_000002"]  # checkpoints removed here are removed there
    shutil.rmtree(runs / "moved")
    forget()
    assert main(["resume", copy, "--inline", "trainer.total_training_steps=3"]) == 0
    assert "moved resumes from step 2 of 3" in capfd.readouterr().err
    assert len(metrics(runs / "moved")) == 4
    assert reproducible(runs / "moved") == reproducible(runs / "straight")
    assert steps(copy) == ["step_000003"]
    if is_there("console"):
        assert main(["runs", "pull", copy, "--root", str(tmp_path / "elsewhere")]) == 0
        pulled = tmp_path / "elsewhere" / "quickstart" / "moved"
        assert damage(pulled / "checkpoints" / "step_000003") is None
        assert json.loads((pulled / "run.json").read_text())["state"] == "finished"
        assert reproducible(pulled) == reproducible(runs / "straight")
    shutil.rmtree(runs / "moved")
    # Its copy would be overwritten.
    assert main([*train, "--name", "moved"]) == ConflictError.exit_code


def steps(copy: str) -> list[str]:
    fs, path = remote.open_url(copy)
    return sorted(
        {
            name.split("/")[1]
            for name in remote.listing(fs, path).files
            if name.startswith("checkpoints/")
        }
    )


def test_files_are_fetched_once_until_they_change(
    bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlctl")
    fs, path = remote.open_url(f"{bucket}/folder")
    for text in ("old", "new"):
        fs.pipe({f"{path}/a.txt": text.encode(), f"{path}/deep/b.txt": b"same"})
        for _ in range(2):
            forget()
            folder = Path(storage.local(f"{bucket}/folder"))
            assert folder.name == "folder"
            assert (folder / "a.txt").read_text() == text
            assert (folder / "deep" / "b.txt").read_text() == "same"
        assert caplog.text.count("fetching s3://shelf/folder (2 files") == 1
        caplog.clear()
    assert storage.local("models/mine") == "models/mine"
    assert storage.local(f"file://{tmp_path}") == str(tmp_path)


def test_fetch_errors_name_the_url(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match=f"{bucket}/nothing"):
        storage.local(f"{bucket}/nothing")
    with pytest.raises(MissingExtraError, match="pip install gcsfs") as error:
        storage.local("gs://bucket/model")
    assert error.value.exit_code == 6
    with pytest.raises(ConfigError, match="unknown URL scheme s4://"):
        storage.local("s4://bucket/model")
    forget()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="credentials"):
        storage.local(f"{bucket}/nothing")
    with pytest.raises(ResourceError), remote.explained(bucket):
        raise OSError("no route to host")
