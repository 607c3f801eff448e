"""The copy of a run on shared storage (`trainer.mirror`): kept while it runs, and fetched again to go on elsewhere.

A thread of its own sends what is new after each whole checkpoint and at the end. A checkpoint's manifest goes last, so what has one is
whole. Nothing that goes wrong there stops the run.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlctl import storage
from rlctl.errors import ConflictError, NotFoundError, RlctlError
from rlctl.files import replacing
from rlctl.recipes import schema
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE, RunDir, check_free
from rlctl.runtime.checkpoint.store import MANIFEST, CheckpointStore, damage

_CHECKPOINTS = "checkpoints"
_NOT_SENT = (".pt",)  # batches kept for a post-mortem: as large as the step was


@contextmanager
def keep_remote_copy(run: RunDir, trainer: schema.Trainer) -> Iterator[Callable[[], None]]:
    """Gives what is to be called when there is something new; at the end waits for the last copy, `trainer.timeouts.mirror_s` at most."""
    if trainer.mirror is None:
        yield lambda: None
        return
    copy = RemoteCopy(
        run, address(trainer.mirror, run.record.project, run.record.name), trainer.timeouts.mirror_s
    )
    try:
        yield copy.push
    finally:
        copy.close()


def address(mirror: str, project: str, name: str) -> str:
    return f"{mirror.rstrip('/')}/{project}/{name}"


class RemoteCopy:
    """Everything but `_work` and what it calls runs in the threads of the run, and never waits but for `close`."""

    def __init__(self, run: RunDir, url: str, patience_s: float) -> None:
        self.run = run
        self.url = url
        self.patience_s = patience_s
        self.failure: str | None = None  # of the latest attempt
        self._sent: dict[
            str, tuple[int, int]
        ] = {}  # relative name -> size and time of change, as sent
        self._wanted = threading.Event()
        self._closing = False
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """There is something new to be copied."""
        self._wanted.set()

    def close(self) -> None:
        """Copy a last time and wait for it. A copy that is not complete then is a warning."""
        self._closing = True
        self._wanted.set()
        self._thread.join(self.patience_s)
        if self._thread.is_alive():
            self.failure = (
                f"it was not done within {self.patience_s:g} s (trainer.timeouts.mirror_s)"
            )
            self.run.event("mirror_failed", url=self.url, reason=self.failure)
        if self.failure is not None:
            self._warn(f"the copy of this run at {self.url} is not complete: {self.failure}")

    def _work(self) -> None:
        for left in self.run.path.glob(f"{_CHECKPOINTS}/.mirrored_*"):
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
                    self._warn(
                        f"the copy of this run at {self.url} lags behind: {self.failure}; the run goes on"
                    )
            if closing:
                return

    def _copy(self) -> int:
        """Send what is new and remove what is gone; how many files were sent."""
        fs, root = storage.open_url(self.url)
        there = _names(fs, root)
        here = _plain_files(self.run.path)
        new = {
            name: stamp
            for name, file in here.items()
            if self._sent.get(name) != (stamp := _stamp(file))
        }
        storage.put(fs, {here[name]: f"{root}/{name}" for name in new})
        self._sent |= new
        gone = [
            name for name in there if not name.startswith(f"{_CHECKPOINTS}/") and name not in here
        ]
        if gone:
            fs.rm([f"{root}/{name}" for name in gone])
        return len(new) + self._copy_checkpoints(fs, root, there)

    def _copy_checkpoints(self, fs: Any, root: str, there: set[str]) -> int:
        store = CheckpointStore(self.run.path / _CHECKPOINTS)
        steps, number = store.steps(), 0
        for step in reversed(steps):
            folder = store.path(step)
            manifest = f"{_CHECKPOINTS}/{folder.name}/{MANIFEST}"
            stamp = _stamp(folder / MANIFEST)
            if self._sent.get(manifest) == stamp:
                continue
            if (
                manifest not in there
                or fs.cat_file(f"{root}/{manifest}") != (folder / MANIFEST).read_bytes()
            ):
                if manifest in there:
                    fs.rm_file(f"{root}/{manifest}")
                number += _send_checkpoint(fs, f"{root}/{_CHECKPOINTS}/{folder.name}", folder)
            self._sent[manifest] = stamp
        if steps:  # or what lies there is all that is left
            kept = {store.path(step).name for step in steps}
            for name in {
                name.split("/")[1] for name in there if name.startswith(f"{_CHECKPOINTS}/")
            } - kept:
                if f"{_CHECKPOINTS}/{name}/{MANIFEST}" in there:
                    fs.rm_file(
                        f"{root}/{_CHECKPOINTS}/{name}/{MANIFEST}"
                    )  # from here on it no longer counts as a checkpoint
                fs.rm(f"{root}/{_CHECKPOINTS}/{name}", recursive=True)
        return number

    def _warn(self, message: str) -> None:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def check_remote_copy(mirror: str, project: str, name: str | None, run: Path | None) -> None:
    """Whether the storage answers, and nobody else's run lies in the place. ConflictError, and what `storage.local` raises."""
    with storage.explained(mirror):
        fs, root = storage.open_url(mirror)
        fs.invalidate_cache()
        fs.exists(root)
        if name is None:
            return
        url = address(mirror, project, name)
        there = _record(url)
    if there is not None and (run is None or there.id != RunRecord.read(run / RECORD_FILE).id):
        hint = f"another --name, or `rlctl resume {url}` to go on with that one"
        raise ConflictError(
            f"trainer.mirror has a copy of another run named {name!r}", where=url, hint=hint
        )


def pull(url: str, root: Path) -> Path:
    """Fetch the copy of a run into its place below `root`, with the newest checkpoint that is whole; the run's folder.

    A run that is here already is left as it is, if no newer checkpoint lies there. Errors: NotFoundError when there is no run,
    ConflictError when another run of that name is here or this one is behind; what `storage.local` raises.
    """
    with storage.explained(url):
        record = _record(url)
        if record is None:
            raise NotFoundError(
                "no copy of a run is there",
                where=url,
                hint="trainer.mirror=URL writes one to URL/<project>/<run>",
            )
        fs, path = storage.open_url(url)
        found = storage.listing(fs, path)
        target = root / record.project / record.name
        steps = sorted(
            (name.split("/")[1] for name in found.files if _is_manifest(name)), reverse=True
        )
        if (target / RECORD_FILE).is_file() and RunRecord.read(
            target / RECORD_FILE
        ).id == record.id:
            _check_not_behind(target, steps, url)
            return target
        check_free(root, record.project, record.name)
        with replacing(target, sync=False) as aside:
            for part in ("generations", "attempts", _CHECKPOINTS):
                (aside / part).mkdir(parents=True)
            storage.get(
                fs,
                found,
                [name for name in found.files if not name.startswith(f"{_CHECKPOINTS}/")],
                aside,
            )
            _get_newest(fs, found, steps, aside)
    return target


def _get_newest(fs: Any, found: storage.Listing, steps: list[str], target: Path) -> None:
    for step in steps:
        folder = f"{_CHECKPOINTS}/{step}"
        storage.get(
            fs, found, [name for name in found.files if name.startswith(f"{folder}/")], target
        )
        problem = damage(target / folder)
        if problem is None:
            return
        print(f"warning: {problem}; the one before it is fetched", file=sys.stderr, flush=True)
        shutil.rmtree(target / folder)


def _check_not_behind(run: Path, steps: list[str], url: str) -> None:
    here = CheckpointStore(run / _CHECKPOINTS)
    if steps and steps[0] > max((here.path(step).name for step in here.steps()), default=""):
        hint = (
            f"`rlctl runs rm {run.name}` puts that one into the trash, and the copy can be fetched"
        )
        raise ConflictError(
            f"{run.name!r} is here already, and behind its copy at {url}, which has {steps[0]}",
            where=str(run),
            hint=hint,
        )


def _record(url: str) -> RunRecord | None:
    """The record of the run whose copy lies at `url`, or None."""
    fs, path = storage.open_url(url)
    fs.invalidate_cache()
    if not fs.exists(f"{path}/{RECORD_FILE}"):
        return None
    with TemporaryDirectory() as folder:
        file = Path(folder) / RECORD_FILE
        file.write_bytes(fs.cat_file(f"{path}/{RECORD_FILE}"))
        return RunRecord.read(file)


def _names(fs: Any, root: str) -> set[str]:
    try:
        return set(storage.listing(fs, root).files)
    except FileNotFoundError:
        return set()


def _is_manifest(name: str) -> bool:
    return name.startswith(f"{_CHECKPOINTS}/step_") and name.endswith(f"/{MANIFEST}")


def _plain_files(run: Path) -> dict[str, Path]:
    """All files but those of checkpoints, by relative name. Parts that are kept elsewhere are followed, other links are not."""
    found = {}
    for part in run.iterdir():
        if part.name.startswith(".") or part.name == _CHECKPOINTS:
            continue
        for file in [part] if part.is_file() else part.resolve().rglob("*"):
            name = (
                part.name
                if file == part
                else f"{part.name}/{file.relative_to(part.resolve()).as_posix()}"
            )
            if file.is_file() and not file.name.startswith(".") and file.suffix not in _NOT_SENT:
                found[name] = file
    return found


def _send_checkpoint(fs: Any, rank_info: str, folder: Path) -> int:
    """The manifest last. Links hold the files meanwhile, so that a checkpoint that is no longer kept here still arrives whole."""
    held = folder.with_name(f".mirrored_{folder.name}")
    try:
        shutil.copytree(folder, held, copy_function=os.link)
    except (OSError, shutil.Error):  # a file system without links
        shutil.rmtree(held, ignore_errors=True)
        held = folder
    try:
        files = {
            file: f"{rank_info}/{file.relative_to(held).as_posix()}"
            for file in held.rglob("*")
            if file.is_file()
        }
        last = {held / MANIFEST: files.pop(held / MANIFEST)}
        storage.put(fs, files)
        storage.put(fs, last)
    finally:
        if held != folder:
            shutil.rmtree(held, ignore_errors=True)
    return len(files) + 1


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
