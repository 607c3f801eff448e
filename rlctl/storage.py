"""Files that lie elsewhere: `s3://…`, `gs://…`, `https://…` and every other address that fsspec has a driver for.

What is read from there is fetched once into a cache folder on each machine that needs it (`RLCTL_CACHE`, or `~/.cache/rlctl`), and again
when it has changed. `file://` means the path itself: a folder that all machines have mounted needs no copy.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlctl.errors import ConfigError, MissingExtraError, NotFoundError, ResourceError, RlctlError
from rlctl.files import free_space, replacing

LOG = logging.getLogger(__name__)
CACHE_VARIABLE = "RLCTL_CACHE"
LOCK_S = 3600.0  # another process of this machine may take so long to fetch the same files
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
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
_EXTRAS = {
    "s3fs": "'rlctl[s3]'"
}  # drivers that rlctl has an extra for; others go by the name of their package


@dataclass(frozen=True)
class Listing:
    """The files of one address: relative name -> what the filesystem says of it. Of a single file, its own name."""

    is_file: bool
    files: dict[str, dict[str, Any]]
    paths: dict[str, str]  # relative name -> path in the filesystem

    @property
    def num_bytes(self) -> int:
        return sum(int(info.get("size") or 0) for info in self.files.values())


def is_url(text: str) -> bool:
    """Whether this is an address (`scheme://…`) and not a path or a name."""
    return _URL.match(text) is not None


def local(text: str) -> str:
    """The path on this machine of what `text` names: an address is fetched unless the cache has it as it is now; anything else stays.

    Errors: NotFoundError, MissingExtraError for a driver that is not installed, ConfigError for access that is refused, ResourceError
    when nobody answers or the disk is full.
    """
    return _fetched(text) if is_url(text) else text


@functools.cache  # one look at the address for each process: what a run has begun with does not change under it
def _fetched(url: str) -> str:
    with explained(url):
        fs, path = open_url(url)
        if "file" in _protocols(fs):
            fs.info(path)
            return path
        found = listing(fs, path)
    if not found.files:
        raise NotFoundError("there are no files", where=url)
    signature = [
        [name, info.get("size"), _stamp(info)] for name, info in sorted(found.files.items())
    ]
    key = hashlib.sha256(json.dumps([url, signature], default=str).encode()).hexdigest()[:16]
    folder = cache_folder() / key
    target = folder / PurePosixPath(path).name
    with _locked(folder, url):
        if not target.exists():
            _fetch(fs, found, target, url)
    return str(target)


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rlctl").expanduser()


def open_url(url: str) -> tuple[Any, str]:
    """The filesystem (fsspec's) and the path in it. Settings come from where its driver looks: `AWS_*`, `FSSPEC_S3_*`, …"""
    import fsspec

    options = {"auto_mkdir": True} if url.startswith("file://") else {}
    fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path.rstrip("/")


def listing(fs: Any, path: str) -> Listing:
    """All files at or below `path`. FileNotFoundError where there is nothing of that name."""
    fs.invalidate_cache()
    info = fs.info(path)
    if info["type"] == "file":
        name = PurePosixPath(path).name
        return Listing(True, {name: info}, {name: path})
    found = {
        each: info
        for each, info in fs.find(path, detail=True).items()
        if info["type"] == "file" and not each.endswith("/")
    }
    root = fs._strip_protocol(path).rstrip("/")
    names = {each.removeprefix(root).lstrip("/"): each for each in found}
    if outside := next((name for name in names if ".." in name.split("/")), None):
        raise ConfigError(f"{outside!r} would lie outside of its folder", where=path)
    return Listing(False, {name: found[each] for name, each in names.items()}, names)


def get(fs: Any, found: Listing, names: list[str], target: Path) -> None:
    """Copy the files `names` of a listing below the folder `target`. ResourceError for one that came in another length."""
    _get(fs, found, {name: target / name for name in names})


def _get(fs: Any, found: Listing, files: Mapping[str, Path]) -> None:
    """Copy each file of a listing to its path. Raises ResourceError for a wrong length."""
    for place in files.values():
        place.parent.mkdir(parents=True, exist_ok=True)
    if files:
        fs.get([found.paths[name] for name in files], [str(place) for place in files.values()])
    for name, place in files.items():
        wanted = found.files[name].get("size")
        if wanted is not None and place.stat().st_size != wanted:
            raise ResourceError(
                f"{name} came with {place.stat().st_size} bytes instead of {wanted}",
                where=found.paths[name],
            )


def put(fs: Any, files: dict[Path, str]) -> None:
    """Copy files of this machine to paths of a filesystem; a reader sees each as it was or as it is to be."""
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
    """What a filesystem raises becomes an error of ours. Drivers share no class of errors, so all of them are looked at."""
    try:
        yield
    except RlctlError:
        raise
    except Exception as error:
        raise _explanation(url, error) from error


def _explanation(url: str, error: Exception) -> RlctlError:
    scheme, reason = (
        url.partition("://")[0],
        f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
    )
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
        return NotFoundError("there is nothing at this address", where=url)
    if isinstance(error, PermissionError) or "credential" in reason.lower():
        hint = (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role"
            if scheme == "s3"
            else None
        )
        return ConfigError(
            f"access is refused, or there are no credentials: {reason}", where=url, hint=hint
        )
    if isinstance(error, ValueError) and "rotocol" in reason:
        return ConfigError(
            f"nothing is known of {scheme}://",
            where=url,
            hint="s3://, gs://, abfs://, https:// and file:// are",
        )
    return ResourceError(f"the storage does not do what it is asked: {reason}", where=url)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _stamp(info: dict[str, Any]) -> str | None:
    """What tells one version of a file from the next, where the filesystem has something of the kind."""
    return next((str(info[name]) for name in _STAMPS if info.get(name) is not None), None)


def _fetch(fs: Any, found: Listing, target: Path, url: str) -> None:
    """Into a folder beside, then renamed: what carries the name is whole."""
    size, number = found.num_bytes / 2**20, len(found.files)
    LOG.info("fetching %s (%d file%s, %.1f MiB)", url, number, "s" if number > 1 else "", size)
    free = free_space(target.parent)
    if free < found.num_bytes:
        raise ResourceError(
            f"{size:.0f} MiB to be fetched, {free / 2**20:.0f} MiB free",
            where=str(target.parent),
            hint=f"{CACHE_VARIABLE}=DIR on a larger disk",
        )
    with explained(url), replacing(target, unique=False, sync=False) as aside:
        _get(fs, found, {name: aside if found.is_file else aside / name for name in found.files})


@contextmanager
def _locked(folder: Path, url: str) -> Iterator[None]:
    """One process of this machine at a time; the others wait for it and find the files there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ResourceError(
            f"cannot write into the cache: {error}",
            where=str(folder),
            hint=f"{CACHE_VARIABLE}=DIR elsewhere",
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
                        f"another process has been fetching {url} for {LOCK_S:.0f} s",
                        where=str(folder),
                    ) from error
                time.sleep(0.1)
        yield
