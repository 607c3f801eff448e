"""Wheels of the packages that a bare machine lacks: it has only torch and transformers.

    python -m benchmarks.gpu.wheels FOLDER [--python-version 3.12] [--there pyarrow]

Run it where rlctl is installed and a registry is at hand. On the bare machine:

    python3 -m pip install --no-index --no-deps --target site FOLDER/*.whl
    PYTHONPATH=site python3 -m benchmarks.gpu

The packages are those that rlctl needs without Ray and vLLM, in the installed versions, less those
that torch and transformers name as their own needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.entry_points import ROOT

PRESENT = ("torch", "transformers")
LEFT_OUT = ("ray",)  # not imported with --inline
EXTRAS = ("peft",)
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def missing_packages(python_version: str, there: Collection[str] = ()) -> dict[str, str]:
    """Return name and version of each package to carry to a machine with this Python.

    Those named in `there` are on the machine.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in EXTRAS for line in optional[name])]
    names = {canonicalize_name(Requirement(line).name) for line in wanted}
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    present = {name for each in PRESENT for name in _needs(each, environment)}
    found = _closure(names, {*PRESENT, *LEFT_OUT, *present, *there}, environment)
    return {name: found[name] for name in sorted(found)}


def _closure(
    names: Iterable[str], without: set[str], environment: dict[str, str]
) -> dict[str, str]:
    """Return the installed versions of packages and of all that they need."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in without:
            continue
        with suppress(PackageNotFoundError):  # one of another platform
            found[name] = version(name)
            waiting += _needs(name, environment)
    return found


def _needs(package: str, environment: dict[str, str]) -> list[str]:
    """Return the packages that an installed one needs without its extras."""
    needed = [Requirement(line) for line in requires(package) or []]
    return [
        canonicalize_name(each.name)
        for each in needed
        if each.marker is None or each.marker.evaluate(environment | {"extra": ""})
    ]


def main() -> None:
    """Download the wheels; a package without one is built, which works for pure Python."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument("--there", nargs="*", default=[], help="packages that it has, as pyarrow")
    given = parser.parse_args()
    packages = missing_packages(given.python_version, given.there)
    pip = [sys.executable, "-m", "pip"]
    target = ["--python-version", given.python_version, "--implementation", "cp"]
    for platform in _PLATFORMS:
        target += ["--platform", platform]
    for package in packages.items():
        what = "==".join(package)
        download = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", *target]
        if subprocess.run([*download, "--dest", str(given.folder), what]).returncode:
            build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(given.folder), what]
            subprocess.run(build, check=True)
    size = sum(file.stat().st_size for file in given.folder.glob("*.whl"))
    print(f"{len(packages)} packages, {size / 2**20:.0f} MiB in {given.folder}")


if __name__ == "__main__":
    main()
