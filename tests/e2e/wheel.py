"""Environment that has the wheel alone, without an extra and without this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
UV = [sys.executable, "-m", "uv"]
TIMEOUT_S = 1800.0


def run(*command: object, cwd: Path) -> str:
    """Return the standard output of a successful command, without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environment | {"COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path) -> Path:
    """Return a new wheel in `folder`."""
    run(*UV, "build", "--wheel", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


def install(
    wheel: Path,
    folder: Path,
    extras: str = "",
    python: str = sys.executable,
    packages: Sequence[str] = (),
    resolution: str = "",
) -> Path:
    """Return the folder with the commands of a new environment in `folder`.

    `packages` are requirements besides the wheel with its `extras`. The versions are those that
    CI tests, or with a `resolution` of uv, "highest" or "lowest-direct", any that rlctl takes.
    """
    wanted = [f"rlctl[{extras}] @ {wheel.as_uri()}", *packages]
    if resolution:  # for uv those of a wheel are not direct
        wanted += map(str, requirements(extras))
    install_packages(folder, wanted, python, resolution)
    _copy_bytecode(folder / ".venv")
    return folder / ".venv" / "bin"


def requirements(extras: str = "") -> list[Requirement]:
    """Return what `pyproject.toml` requires, without and with extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"]]
    for extra in filter(None, extras.split(",")):
        listed += project["optional-dependencies"][extra]
    return [Requirement(each) for each in listed]


def install_packages(
    folder: Path,
    packages: Sequence[str],
    python: str = sys.executable,
    resolution: str = "",
) -> None:
    """Add `packages` to the environment in `folder`, which is made; paths are of the checkout.

    See `install` for `resolution`.
    """
    if not (folder / ".venv").exists():
        run(*UV, "venv", "--quiet", "--python", python, folder / ".venv", cwd=folder)
    links = os.environ.get("PIP_FIND_LINKS")
    run(
        *[*UV, "pip", "install", "--quiet", "--python", folder / ".venv/bin/python"],
        *(["--find-links", links] if links else []),
        *["--override", ROOT / "constraints.txt"],
        *(["--resolution", resolution] if resolution else ["--constraint", ROOT / "tested.txt"]),
        *packages,
        cwd=ROOT,
    )


def _copy_bytecode(environment: Path) -> None:
    """Link bytecode of this environment's packages into another one; copy it to another disk.

    Python uses it only for the source of the same time and size, and compiles others: torch and
    transformers take 20 s.
    """
    ours = Path(sysconfig.get_path("purelib"))
    theirs = environment / ours.relative_to(sys.prefix)
    for source in ours.rglob("__pycache__/*.pyc"):
        target = theirs / source.relative_to(ours)
        if target.parent.parent.is_dir() and not target.exists():
            target.parent.mkdir(exist_ok=True)
            try:
                target.hardlink_to(source)  # Python replaces such a file, it does not change it
            except OSError:
                shutil.copyfile(source, target)
