"""One file with a run, for another machine. An archive may be from anybody, and so is checked.

Members are regular files `<project>/<run>/…`; the last one is the record, so that an archive that
was cut off has none.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rlctl.errors import ConfigError, ConflictError, UsageError
from rlctl.files import free_space, put_in_place, replacing
from rlctl.packages import require
from rlctl.process import lock_folder
from rlctl.runs.folders_elsewhere import PARTS
from rlctl.runs.idle import check_idle
from rlctl.runs.naming import check_free, remove_abandoned, unfinished
from rlctl.runs.record import RunRecord
from rlctl.runs.run import Run
from rlctl.runs.run_dir import RECORD_FILE

MOST_FILES = 1_000_000
MOST_HEADER = 2**16
_COMPRESSED = {".tar.zst": "", ".tar.gz": "gz", ".tgz": "gz", ".tar": ""}


class _Header(tarfile.TarInfo):
    """Header of a member that refuses names and attributes without a limit."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if not self.isreg() and self.size > MOST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]


def pack(run: Run, file: Path, checkpoints: bool, force: bool) -> int:
    """Write a run, with or without its checkpoints, to an archive; return the number of files.

    Links are left out, but for the run's folders on other disks. The archive appears complete or
    not at all. Raises ConflictError if the run is active, or the file exists without `force`.
    """
    check_idle(run.path, run.readable_record())
    if file.exists() and not force:
        raise ConflictError(f"{file} already exists", hint="--force replaces it")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", hint=f"mkdir -p {file.parent}")
    members = [(path, name) for path, name in _files(run.path) if name != RECORD_FILE]
    if not checkpoints:
        members = [member for member in members if not member[1].startswith("checkpoints/")]
    members.append((run.path / RECORD_FILE, RECORD_FILE))
    with replacing(file) as aside, _opened(aside, file.name, "w") as tar:
        for path, name in members:
            tar.add(path, f"{run.project}/{run.name}/{name}", recursive=False, filter=_anonymous)
    return len(members)


def unpack(file: Path, root: Path, name: str | None, most_bytes: int) -> Path:
    """Write the run of an archive below `root`; return its folder, which appears when complete.

    Raises ConfigError for an archive that is damaged or not of `pack`, or larger than `most_bytes`
    or the free space, and ConflictError if the name is taken.
    """
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    try:
        with _opened(file, file.name, "r") as tar:
            first = tar.next()
            if first is None:
                raise tarfile.ReadError("it is empty")
            project, run, *_ = _parts(first)
            name = run if name is None else name
            check_free(root, project, name)
            target = root / project / name
            with _aside(target.parent) as aside:
                _extract(tar, first, aside, min(most_bytes, free_space(root)))
                record = RunRecord.read(aside / RECORD_FILE)
                if (aside / "attempts" / str(record.attempts)).is_dir():
                    (aside / "attempts" / "latest").symlink_to(str(record.attempts))
                put_in_place(aside, target)
    except _errors() as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{file.name} cannot be imported: {reason}", where=str(file)) from error
    return target


@contextmanager
def _aside(project: Path) -> Iterator[Path]:
    """Yield a hidden folder of this process, which is removed unless it was renamed."""
    project.mkdir(parents=True, exist_ok=True)
    remove_abandoned(project)
    aside = unfinished(project)
    aside.mkdir(0o700)
    lock = lock_folder(aside)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if lock is not None:
            lock.close()


def _extract(tar: tarfile.TarFile, first: tarfile.TarInfo, aside: Path, most_bytes: int) -> None:
    """Write the files of an archive from `first` on. Raises ReadError for what is no file."""
    member: tarfile.TarInfo | None = first
    number = 0
    run = _parts(first)[:2]
    while member is not None:
        parts = _parts(member)
        number += 1
        most_bytes -= member.size
        if most_bytes < 0 or number > MOST_FILES:
            raise tarfile.ReadError("it is larger than --max-gib, or than the free space")
        source = tar.extractfile(member) if member.isreg() else None
        if source is None or parts[:2] != run:
            raise tarfile.ReadError(f"{member.name} is no file of the run")
        path = aside.joinpath(*parts[2:])
        path.parent.mkdir(parents=True, exist_ok=True)
        with source, path.open("xb") as written:
            shutil.copyfileobj(source, written)
        member = tar.next()
    if not (aside / RECORD_FILE).is_file():
        raise tarfile.ReadError("it ends before the record of the run")


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a run, and their names in it; hidden ones are unfinished or locks."""
    for part in (folder, *(folder / name for name in PARTS if (folder / name).is_symlink())):
        for place, folders, names in os.walk(part):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(place, name)
                if path.is_file() and not path.is_symlink() and not name.startswith("."):
                    yield path, str(path.relative_to(folder))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _parts(member: tarfile.TarInfo) -> tuple[str, ...]:
    """Return the parts of a member's name. Raises ReadError for one that leaves its folder."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or len(path.parts) < 3:
        raise tarfile.ReadError(f"{member.name} is no file of a run")
    return path.parts


@contextmanager
def _opened(path: Path, name: str, mode: Literal["r", "w"]) -> Iterator[tarfile.TarFile]:
    """Open the archive `path`, whose `name` tells its compression."""
    suffix = next((end for end in _COMPRESSED if name.endswith(end)), None)
    if suffix is None:
        raise UsageError(f"{name} has no known ending", hint=f"use one of {', '.join(_COMPRESSED)}")
    kind: Any = f"{mode}|{_COMPRESSED[suffix]}"
    with ExitStack() as stack:
        source: dict[str, Any] = {"name": str(path)}
        if suffix == ".tar.zst":
            require("zstandard", f"{name} (unlike .tar.gz) needs zstandard", "zstd")
            import zstandard

            source = {"fileobj": stack.enter_context(zstandard.open(path, f"{mode}b"))}
        yield stack.enter_context(tarfile.open(mode=kind, tarinfo=_Header, **source))


def _errors() -> tuple[type[BaseException], ...]:
    """Return the errors of damaged archives."""
    errors = (tarfile.TarError, EOFError, FileExistsError, zlib.error)
    if "zstandard" not in sys.modules:
        return errors
    from zstandard import ZstdError

    return (*errors, ZstdError)
