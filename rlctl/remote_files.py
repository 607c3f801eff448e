"""Remote files through fsspec: download into the cache, listings, copies and errors."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlctl.errors import ConfigError, MissingExtraError, NotFoundError, ResourceError, RlctlError
from rlctl.files import free_space, replacing
from rlctl.storage import CACHE_VARIABLE, cache_folder

LOG = logging.getLogger(__name__)
LOCK_S = 3600.0  # limit of the wait for another process that fetches the same files
_STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "crc32c",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
_EXTRAS = {"s3fs": "'rlctl[s3]'"}  # packages with an extra of rlctl


@dataclass(frozen=True)
class Listing:
    """Files at a URL: information of the filesystem by name relative to the URL."""

    is_file: bool
    files: dict[str, dict[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return sum(int(info.get("size") or 0) for info in self.files.values())


@functools.cache  # once per process, so that files do not change during a run
def fetched(url: str) -> str:
    """Return the local path of a URL; see `storage.local`."""
    with explained(url):
        fs, path = open_url(url)
        if "file" in _protocols(fs):
            fs.info(path)
            return path
        found = listing(fs, path)
    if not found.files:
        raise NotFoundError("no files at this URL", where=url)
    signature = [
        [name, info.get("size"), _stamp(info)] for name, info in sorted(found.files.items())
    ]
    key = hashlib.sha256(json.dumps([url, signature], default=str).encode()).hexdigest()[:16]
    folder = cache_folder() / key
    target = folder / PurePosixPath(path).name
    with locked(folder, url):
        if not target.exists():
            _fetch(fs, found, target, url)
    return str(target)


def open_url(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem and the path in it.

    The driver reads its settings from the environment: `AWS_*`, `FSSPEC_S3_*`, …
    """
    import fsspec

    options: dict[str, bool] = {}
    if url.startswith("file://"):
        options["auto_mkdir"] = True
    fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path.rstrip("/")


def listing(fs: Any, path: str) -> Listing:
    """List all files at or below `path`. Raises FileNotFoundError if it does not exist."""
    fs.invalidate_cache()
    info = fs.info(path)
    if info["type"] == "file":
        return Listing(True, {PurePosixPath(path).name: info})
    root = fs._strip_protocol(path).rstrip("/")
    files = {
        file.removeprefix(root).lstrip("/"): info
        for file, info in fs.find(path, detail=True).items()
        if info["type"] == "file" and not file.endswith("/")
    }
    if outside := next((name for name in files if ".." in name.split("/")), None):
        raise ConfigError(f"{outside!r} would be written outside its folder", where=path)
    return Listing(False, files)


def get(fs: Any, found: Listing, files: Mapping[str, Path]) -> None:
    """Copy each file of a listing to its path. Raises ResourceError for a wrong length."""
    for target in files.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    if files:
        fs.get([found.files[name]["name"] for name in files], [*map(str, files.values())])
    for name, target in files.items():
        wanted = found.files[name].get("size")
        size = target.stat().st_size
        if wanted not in (None, size):
            where = found.files[name]["name"]
            raise ResourceError(f"{name} has {size} bytes, expected {wanted}", where=where)


def put(fs: Any, files: dict[Path, str]) -> None:
    """Copy local files to paths of a filesystem, each atomically."""
    if not files:
        return
    if "file" not in _protocols(fs):
        fs.put([str(file) for file in files], list(files.values()))
        return
    for file, place in files.items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(place), unique=False, sync=False) as aside:
            shutil.copyfile(file, aside)


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn exceptions of filesystems into RlctlErrors. Drivers share no base class of errors."""
    try:
        yield
    except RlctlError:
        raise
    except Exception as error:
        raise _explanation(url, error) from error


def _explanation(url: str, error: Exception) -> RlctlError:
    scheme = url.partition("://")[0]
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, ImportError):
        from fsspec.registry import known_implementations

        package = known_implementations.get(scheme, {}).get("class", "").partition(".")[0] or scheme
        hint = f"pip install {_EXTRAS.get(package, package)}"
        return MissingExtraError(
            f"{scheme}:// needs the package {package!r}, which is not installed",
            where=url,
            hint=hint,
        )
    if isinstance(error, FileNotFoundError):
        return NotFoundError("no file or folder at this URL", where=url)
    if isinstance(error, PermissionError) or "credential" in reason.lower():
        hint = None
        if scheme == "s3":
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role"
        return ConfigError(f"access denied or no credentials: {reason}", where=url, hint=hint)
    if isinstance(error, ValueError) and "rotocol" in reason:
        return ConfigError(
            f"unknown URL scheme {scheme}://",
            where=url,
            hint="use s3://, gs://, abfs://, https:// or file://",
        )
    return ResourceError(f"storage error: {reason}", where=url)


def _protocols(fs: Any) -> tuple[str, ...]:
    if isinstance(fs.protocol, str):
        return (fs.protocol,)
    return tuple(fs.protocol)


def _stamp(info: dict[str, Any]) -> str | None:
    """Return an identifier of the version of a file, or None if the filesystem has none."""
    return next((str(info[name]) for name in _STAMPS if info.get(name) is not None), None)


def _fetch(fs: Any, found: Listing, target: Path, url: str) -> None:
    """Download to a temporary path beside `target`, then rename it."""
    size = found.num_bytes / 2**20
    files = "1 file"
    if len(found.files) > 1:
        files = f"{len(found.files)} files"
    LOG.info("fetching %s (%s, %.1f MiB)", url, files, size)
    free = free_space(target.parent)
    if free < found.num_bytes:
        raise ResourceError(
            f"{size:.0f} MiB to download, but only {free / 2**20:.0f} MiB free",
            where=str(target.parent),
            hint=f"set {CACHE_VARIABLE}=DIR to a folder on a larger disk",
        )
    with explained(url), replacing(target, unique=False, sync=False) as aside:
        targets = {name: aside / name for name in found.files}
        if found.is_file:
            targets = dict.fromkeys(found.files, aside)
        get(fs, found, targets)


@contextmanager
def locked(folder: Path, url: str) -> Iterator[None]:
    """Hold a lock on the cache folder; other processes of this machine wait and then reuse it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("wb")
    except OSError as error:
        raise ResourceError(
            f"cannot write into the cache: {error}",
            where=str(folder),
            hint=f"set {CACHE_VARIABLE}=DIR to another folder",
        ) from error
    deadline = time.monotonic() + LOCK_S
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ResourceError(
                        f"another process is still fetching {url} after {LOCK_S:.0f} s",
                        where=str(folder),
                    ) from error
                time.sleep(0.1)
        yield
