"""Atomic writes, flushes to disk, and free space.

A file or folder is written under a temporary name beside its target and then renamed. A reader
sees the old version or the new one, and an interrupted write leaves the target unchanged.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(target: Path, *, unique: bool = True, sync: bool = True) -> Iterator[Path]:
    """Yield a path beside `target`; what the block writes there replaces `target` if it succeeds.

    The block makes a file or a folder. `unique` adds the process id to the temporary name, so that
    processes can write the same target; a fixed name lets the next writer remove the leftovers of
    a killed one. `sync` flushes to disk before and after the rename. Raises OSError, also where
    `target` is a folder that is not empty.
    """
    suffix = f"{os.getpid()}.tmp" if unique else "partial"
    aside = target.with_name(f".{target.name}.{suffix}")
    remove(aside)
    try:
        yield aside
        put_in_place(aside, target, sync=sync)
    finally:
        remove(aside)


def put_in_place(aside: Path, target: Path, *, sync: bool = True) -> None:
    """Rename `aside` to `target`. `sync` flushes its files first, and the parent folder after.

    Empty files are not opened: a process that closes a file which it has locked loses the lock.
    """
    if sync:
        parts = aside.rglob("*") if aside.is_dir() else ()
        fsync(*(part for part in parts if part.is_dir() or part.stat().st_size), aside)
    aside.replace(target)
    if sync:
        fsync(target.parent)


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` by UTF-8 `text`: atomic, also across a power failure.

    Where the locale is not UTF-8, Python has surrogates for the bytes of a path. They are written
    as those bytes, and as � if these are not UTF-8.
    """
    write_bytes(path, text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file `path` by `content`, as `write_text` does."""
    with replacing(path) as aside:
        aside.write_bytes(content)


_FLAGS = {"rb": os.O_RDONLY, "rb+": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}


def open_record(path: Path | str, mode: str = "rb", buffering: int = -1) -> IO[bytes]:
    """Open a file of a run, which somebody else may have made. Raises OSError for a link."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "a file of a run must not be a link", str(path))
    flags = _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would not end
    return os.fdopen(os.open(path, flags, 0o666), mode, buffering)


def read_record(path: Path | str) -> bytes:
    """Return the content of a file; see `open_record`."""
    with open_record(path) as file:
        return file.read()


def append(path: Path, content: bytes) -> None:
    """Append to a file; raise OSError and leave it unchanged if not all of `content` fits."""
    with open_record(path, "ab", buffering=0) as file:
        end = file.tell()
        if file.write(content) < len(content):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def overwrite(path: Path, content: bytes) -> None:
    """Replace the content of a file in its place: not atomic, but possible on a full disk."""
    with path.open("r+b", buffering=0) as file:
        file.write(content)
        file.truncate(len(content))


def fsync(*paths: Path) -> None:
    """Flush files and folders to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def apply_umask(*paths: Path) -> None:
    """Give files the mode of new ones: safetensors makes all of its files the owner's only."""
    for path in paths:
        new = path.with_name(f".{path.name}.new")
        new.touch()
        path.chmod(new.stat().st_mode & 0o777)
        new.unlink()


def remove(path: Path) -> None:
    """Delete a file or a folder; ignore a missing one, and what cannot be deleted in a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def step_name(step: int) -> str:
    """Return the name of a file or folder of `step`, without a suffix."""
    return f"step_{step:06d}"


def step_of(name: str, suffix: str = "") -> int | None:
    """Return the step in a name of `step_name` and `suffix`, None for another name."""
    digits = name.removeprefix("step_").removesuffix(suffix)
    known = digits.isascii() and digits.isdigit() and name == step_name(int(digits)) + suffix
    return int(digits) if known else None


def by_step(folder: Path, suffix: str = "") -> dict[int, Path]:
    """Return what `folder` contains for each step, in order; ignore other names, such as copies."""
    found = {step_of(path.name, suffix): path for path in folder.glob(f"step_*{suffix}")}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest of its parents that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_space(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, or will hold it once it is created."""
    return shutil.disk_usage(existing_parent(path)).free
