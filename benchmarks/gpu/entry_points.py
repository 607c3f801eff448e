"""Entry points and requirements of rlctl for processes of a checkout that is not installed."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAME, _VERSION = "rlctl", "0.0.0"


def python_path(folder: Path) -> str:
    """Write rlctl's metadata as a package to `folder`; return a PYTHONPATH with both.

    The checkout comes first, so that its code is used even where another rlctl is installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    package = folder / f"{_NAME}-{_VERSION}.dist-info"
    package.mkdir(parents=True)
    (package / "entry_points.txt").write_text("\n".join(lines) + "\n")
    needs = [f"Requires-Dist: {each}" for each in project["dependencies"]]
    for extra, packages in project["optional-dependencies"].items():
        needs += [f'Requires-Dist: {each}; extra == "{extra}"' for each in packages]
    head = ["Metadata-Version: 2.1", f"Name: {_NAME}", f"Version: {_VERSION}"]
    head += [f"Requires-Python: {project['requires-python']}"]
    (package / "METADATA").write_text("\n".join([*head, *needs]) + "\n")
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT), str(folder), *([inherited] if inherited else [])])
