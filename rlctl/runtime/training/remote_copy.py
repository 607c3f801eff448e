"""Remote copy of a run on shared storage (`trainer.mirror`), kept up to date while it runs.

A thread sends new files after each complete checkpoint and at the end. It sends the manifest of a
checkpoint last, so a remote checkpoint with a manifest is complete. Errors never stop the run.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from rlctl import remote_files as storage
from rlctl.errors import ConflictError, RlctlError
from rlctl.files import by_step, step_name, step_of
from rlctl.recipes import schema
from rlctl.runs.naming import check_writable
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE, RunDir
from rlctl.runtime.training.checkpoint_store import (
    MANIFEST,
    STATE,
    CheckpointStore,
    Retention,
    metrics_at,
    metrics_in,
)

LOG = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
_NOT_SENT = (".pt",)  # batches dumped for debugging, which are large


class Mirror:
    """Listener that keeps a copy of the run at `trainer.mirror`.

    At the end it waits for the last copy, at most `trainer.timeouts.mirror_s`.
    """

    def __init__(self, run: RunDir, config: schema.Config) -> None:
        trainer = config.trainer
        assert trainer.mirror is not None, "a run without a mirror has no copy"
        url = address(trainer.mirror, run.record.project, run.record.name)
        copy = RemoteCopy(run, url, Retention.from_config(trainer), trainer.timeouts.mirror_s)
        self.on_checkpoint = copy.push
        self.close = copy.close

    @classmethod
    def check(cls, config: schema.Config, run: Path | None, sources: Collection[str]) -> None:  # noqa: ARG003
        """Check that the storage can be written and has no other, or later, run of that name."""
        trainer = config.trainer
        assert trainer.mirror is not None, "a run without a mirror has no copy"
        check_remote_copy(trainer.mirror, trainer.project_name, trainer.experiment_name, run)


def address(mirror: str, project: str, name: str) -> str:
    """Return the URL of the remote copy of a run."""
    return f"{mirror.rstrip('/')}/{project}/{name}"


class RemoteCopy:
    """Remote copy of one run, written by a thread; only `close` waits for it."""

    def __init__(self, run: RunDir, url: str, retention: Retention, timeout_s: float) -> None:
        self.run = run
        self.url = url
        self.retention = retention
        self.timeout_s = timeout_s
        self.store = CheckpointStore(run.path / CHECKPOINTS)
        self._resumed = max(self.store.steps(), default=0)
        self.failure: str | None = None  # of the latest attempt
        self._sent: dict[str, tuple[int, int]] = {}  # relative name -> stamp when it was sent
        self._wanted = threading.Event()
        self._closing = False
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Request a copy of what is new, without waiting."""
        self._wanted.set()

    def close(self) -> None:
        """Copy a last time and wait for it; warn if the copy is incomplete."""
        self._closing = True
        self._wanted.set()
        self._thread.join(self.timeout_s)
        if self._thread.is_alive():
            self.failure = (
                f"it did not finish within {self.timeout_s:g} s (trainer.timeouts.mirror_s)"
            )
            self.run.event("mirror_failed", url=self.url, reason=self.failure)
        if self.failure is not None:
            LOG.warning("the copy of this run at %s is incomplete: %s", self.url, self.failure)

    def _work(self) -> None:
        for left in self.run.path.glob(f"{CHECKPOINTS}/.mirrored_*"):
            shutil.rmtree(left, ignore_errors=True)
        while True:
            self._wanted.wait()
            closing = self._closing
            self._wanted.clear()
            try:
                with storage.explained(self.url):
                    number = self._copy()
                self.failure = None
                self.run.event("mirrored", url=self.url, files=number)
            except RlctlError as error:
                self.failure = error.problems[0].message
                self.run.event("mirror_failed", url=self.url, reason=self.failure)
                if not self._warned and not closing:
                    self._warned = True
                    LOG.warning(
                        "the copy of this run at %s is out of date: %s; the run continues",
                        self.url,
                        self.failure,
                    )
            if closing:
                return

    def _copy(self) -> int:
        """Send new files and remove deleted ones; return the number of files sent."""
        fs, root = storage.open_url(self.url)
        remote = _names(fs, root)
        steps = self.store.steps()  # first: the metrics that are sent reach as far as these
        local = _plain_files(self.run.path)
        new = {
            name: stamp
            for name, file in local.items()
            if self._sent.get(name) != (stamp := _stamp(file))
        }
        storage.put(fs, {local[name]: f"{root}/{name}" for name in new})
        self._sent |= new
        deleted = [
            name for name in remote if not name.startswith(f"{CHECKPOINTS}/") and name not in local
        ]
        if deleted:
            fs.rm([f"{root}/{name}" for name in deleted])
        return len(new) + self._copy_checkpoints(fs, root, remote, steps)

    def _copy_checkpoints(self, fs: Any, root: str, remote: set[str], steps: Sequence[int]) -> int:
        number = 0
        for step in reversed(steps):
            folder = self.store.path(step)
            if not (folder / MANIFEST).exists():  # removed by retention in the meantime
                continue
            manifest = f"{CHECKPOINTS}/{folder.name}/{MANIFEST}"
            stamp = _stamp(folder / MANIFEST)
            if self._sent.get(manifest) == stamp:
                continue
            if (
                manifest not in remote
                or fs.cat_file(f"{root}/{manifest}") != (folder / MANIFEST).read_bytes()
            ):
                if manifest in remote:
                    fs.rm_file(f"{root}/{manifest}")
                number += _send_checkpoint(fs, f"{root}/{CHECKPOINTS}/{folder.name}", folder)
            self._sent[manifest] = stamp
        if steps:  # otherwise the remote checkpoints are the only ones
            for step in self._to_remove(fs, root, remote, steps):
                folder = f"{CHECKPOINTS}/{step_name(step)}"
                if f"{folder}/{MANIFEST}" in remote:  # without it, it is no longer a checkpoint
                    fs.rm_file(f"{root}/{folder}/{MANIFEST}")
                fs.rm(f"{root}/{folder}", recursive=True)
        return number

    def _to_remove(
        self, fs: Any, root: str, remote: set[str], steps: Sequence[int]
    ) -> Iterable[int]:
        """Return the steps of remote checkpoints that are incomplete, undone or not retained.

        Those before the step that this process started from need not exist here: a run that was
        downloaded has its latest checkpoint alone. Retention then applies to all of both places.
        """
        earlier = {step for step in remote_steps(remote) if step <= self._resumed}
        metrics = {step: metrics_at(self.store.path(step)) for step in steps}
        for step in earlier.difference(steps):
            file = f"{CHECKPOINTS}/{step_name(step)}/{STATE}"
            metrics[step] = {}
            if file in remote:
                metrics[step] = metrics_in(fs.cat_file(f"{root}/{file}"))
        kept = (earlier | set(steps)).difference(self.retention.to_delete(metrics))
        return _steps(remote).difference(steps, kept)


def check_remote_copy(mirror: str, project: str, name: str | None, run: Path | None) -> None:
    """Check that the storage can be written and has no other, or later, run of that name.

    Raises ConflictError, ResourceError and the errors of `storage.local`.
    """
    with storage.explained(mirror):
        fs, root = storage.open_url(mirror)
        fs.invalidate_cache()
        fs.exists(root)
        if isinstance(fs, LocalFileSystem):
            check_writable(Path(root), "trainer.mirror", "the copy of the run")
        if name is None:
            return
        url = address(mirror, project, name)
        record = remote_record(url)
        steps = remote_steps(_names(fs, f"{root}/{project}/{name}")) if record else ()
    if record is None:
        return
    local = RunRecord.read(run / RECORD_FILE) if run is not None else None
    if local is None or record.id != local.id:
        message = f"trainer.mirror has a copy of another run named {name!r}"
        hint = f"another --name, or `rlctl resume {url}` to resume that one"
        raise ConflictError(message, where=url, hint=hint)
    if record.attempts > local.attempts:
        raise ConflictError(
            f"{name!r} was resumed from its copy on {record.process.host}; the copy has attempt "
            f"{record.attempts}, and this folder attempt {local.attempts}",
            where=url,
            hint=f"`rlctl runs rm {name}`, then `rlctl resume {url}`; or resume this folder with "
            "trainer.mirror=null",
        )
    if run is not None and max(steps, default=0) > _latest(run):
        raise ConflictError(
            f"the copy of {name!r} has a checkpoint of step {max(steps)}, and this folder has none "
            "as new: it may be a copy of the run that writes there",
            where=url,
            hint="give another trainer.mirror, or trainer.mirror=null; or "
            f"`rlctl runs rm {name}`, then `rlctl resume {url}`",
        )


def _latest(run: Path) -> int:
    """Return the step of the latest checkpoint that is, or was before a resume, in the folder."""
    folders = [run / CHECKPOINTS, *(run / CHECKPOINTS).glob("before_attempt_*")]
    return max((step for folder in folders for step in by_step(folder)), default=0)


def remote_record(url: str) -> RunRecord | None:
    """Return the record of the run copied to `url`, or None."""
    fs, path = storage.open_url(url)
    fs.invalidate_cache()
    if not fs.exists(f"{path}/{RECORD_FILE}"):
        return None
    with TemporaryDirectory() as folder:
        file = Path(folder) / RECORD_FILE
        file.write_bytes(fs.cat_file(f"{path}/{RECORD_FILE}"))
        return RunRecord.read(file)


def remote_steps(names: Iterable[str]) -> set[int]:
    """Return the steps of the complete checkpoints in a listing of relative names."""
    return _steps(name for name in names if name.endswith(f"/{MANIFEST}"))


def _steps(names: Iterable[str]) -> set[int]:
    """Return the steps of the checkpoints to which files of these relative names belong."""
    parts = [name.split("/") for name in names if name.startswith(f"{CHECKPOINTS}/")]
    return {step for part in parts if (step := step_of(part[1])) is not None}


def _names(fs: Any, root: str) -> set[str]:
    """Return the names of all remote files, relative to `root`."""
    try:
        return set(storage.listing(fs, root).files)
    except FileNotFoundError:
        return set()


def _plain_files(run: Path) -> dict[str, Path]:
    """Return all files except those of checkpoints, by relative name.

    Follows links of the run's parts that are stored elsewhere, and no others.
    """
    found = {}
    for part in run.iterdir():
        if part.name.startswith(".") or part.name == CHECKPOINTS:
            continue
        if part.is_symlink() and part.is_file():
            continue
        files = [part] if part.is_file() else part.resolve().rglob("*")
        for file in files:
            name = part.name
            if file != part:
                if file.is_symlink():
                    continue
                name += f"/{file.relative_to(part.resolve()).as_posix()}"
            if file.is_file() and not file.name.startswith(".") and file.suffix not in _NOT_SENT:
                found[name] = file
    return found


def _send_checkpoint(fs: Any, target: str, folder: Path) -> int:
    """Send a checkpoint, its manifest last; return the number of files.

    Hard links keep the files alive while they are sent, so that retention cannot delete them.
    """
    held = folder.with_name(f".mirrored_{folder.name}")
    try:
        shutil.copytree(folder, held, symlinks=True, copy_function=os.link)
    except (OSError, shutil.Error):  # a file system without hard links
        shutil.rmtree(held, ignore_errors=True)
        held = folder
    try:
        files = {
            file: f"{target}/{file.relative_to(held).as_posix()}"
            for file in held.rglob("*")
            if file.is_file() and not file.is_symlink()
        }
        last = {held / MANIFEST: files.pop(held / MANIFEST)}
        storage.put(fs, files)
        storage.put(fs, last)
    finally:
        if held != folder:
            shutil.rmtree(held, ignore_errors=True)
    return len(files) + 1


def _stamp(file: Path) -> tuple[int, int]:
    """Return size and modification time, by which changed files are found."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns
