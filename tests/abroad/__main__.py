"""Run rlctl with packages of other projects, each in an environment of its own.

    python -m tests.abroad                   # all, in about half an hour
    python -m tests.abroad skyrl-gym mcp
    python -m tests.abroad oldest newest     # the ends of all ranges; notes results in tried.json
    python -m tests.abroad trackers          # the group: trackers-newest and trackers-oldest
    python -m tests.abroad mcp --keep DIR    # makes an environment in DIR unless it is there

An environment has the wheel of this checkout, the packages that `packages.py` names, and pytest.
The tests run from this checkout. Needs the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.abroad.packages import GROUPS, TRIALS, Trial
from tests.abroad.tried import not_lowest, note
from tests.e2e.wheel import ROOT, TIMEOUT_S, UV, build, install, install_packages, run

# What the tests themselves import.
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6")


@dataclass(frozen=True)
class Outcome:
    """Numbers of tests by their end, and texts of those that failed or were skipped."""

    versions: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()


def prepare(trial: Trial, wheel: Path, folder: Path) -> None:
    """Make the environment, unless it is there. Raises AssertionError with uv's output."""
    if (folder / ".ready").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    own = () if trial.apart else trial.packages
    python = interpreter(trial.python) or sys.executable
    install(wheel, folder, trial.extras, python, packages=own, resolution=trial.resolution)
    install_packages(folder, TOOLS, resolution="highest" if trial.resolution else "")
    if trial.apart:
        (folder / "apart").mkdir(exist_ok=True)
        install_packages(folder / "apart", trial.packages)
    (folder / ".ready").touch()


def interpreter(number: str) -> str | None:
    """Return Python of this version: of pyenv, the system or uv, which may download its build."""
    if not number:
        return sys.executable
    installed = (Path.home() / ".pyenv" / "versions").glob(f"{number}.*/bin/python")
    found = max(map(str, installed), default=None) or shutil.which(f"python{number}")
    if found is None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            run(*UV, "python", "install", number, cwd=ROOT)
            found = run(*UV, "python", "find", number, cwd=ROOT).strip()
    return found


def try_packages(trial: Trial, wheel: Path, folder: Path) -> Outcome:
    """Make the environment of `trial` in `folder`, unless it is there, and run its tests."""
    if interpreter(trial.python) is None:
        return Outcome("", skipped=1, notes=(f"no Python {trial.python} is here or on uv's list",))
    try:
        prepare(trial, wheel, folder)
    except AssertionError as error:
        return Outcome(" ".join(trial.packages), failed=1, notes=(f"no environment: {error}",))
    if trial.resolution == "lowest-direct" and (
        newer := not_lowest(list_packages(folder / ".venv"))
    ):
        return Outcome(", ".join(newer), failed=1, notes=("not the lower ends of the ranges",))
    other = folder / "apart" / ".venv"
    commands, report = folder / ".venv/bin", folder / "report.xml"
    report.unlink(missing_ok=True)
    ended = subprocess.run(
        [
            *(commands / "python", "-m", "pytest", f"--junitxml={report}", *trial.tests),
            *(("-m", "not gpu and not soak and not real") if trial.resolution else ()),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "ABROAD_PYTHON": str(other / "bin/python"),
            "ABROAD_HOME": sys.executable,
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    (folder / "output.txt").write_text(ended.stdout)
    return outcome(versions(trial, other if trial.apart else folder / ".venv"), report, ended)


def versions(trial: Trial, environment: Path) -> str:
    """Return the installed versions of the packages of `trial` that have an index's name."""
    installed = list_packages(environment)
    names = [requirement.split("==")[0].split("[")[0] for requirement in trial.packages]
    names = [name for name in names if "/" not in name]
    python = [f"Python {trial.python}"] if trial.python else []
    return ", ".join(python + [f"{name} {installed[name.lower()]}" for name in names])


def list_packages(environment: Path) -> dict[str, str]:
    """Return the versions of installed packages."""
    listed = run(*UV, "pip", "list", "--format=json", "--python", environment, cwd=ROOT)
    return {package["name"]: package["version"] for package in json.loads(listed)}


def outcome(tried: str, report: Path, ended: subprocess.CompletedProcess[str]) -> Outcome:
    """Return what pytest reported; a run without a report, or that ran nothing, has failed."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    notes, counts = [], {"failure": 0, "error": 0, "skipped": 0}
    for case in cases:
        for kind in counts:
            for found in case.findall(kind):
                counts[kind] += 1
                notes.append(f"{kind} {case.get('name')}: {found.get('message', '')[:300]}")
    failed = counts["failure"] + counts["error"]
    passed = len(cases) - failed - counts["skipped"]
    if not failed and (ended.returncode or not passed):
        failed, notes = 1, [*notes, f"exit code {ended.returncode}: {ended.stdout[-1500:]}"]
    return Outcome(tried, passed, failed, counts["skipped"], tuple(notes))


def main() -> int:
    """Try the packages that the command line names, and print a table."""
    names = [trial.name for trial in TRIALS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"{', '.join(names)}; default: all")
    parser.add_argument("--keep", type=Path, help="folder of the environments, used again")
    options = parser.parse_args()
    groups = {name: [name] for name in names}
    groups |= {name: [each for each in names if each.startswith(f"{name}-")] for name in GROUPS}
    if unknown := set(options.names) - set(groups):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(groups)}")
    wanted = {each for name in options.names or names for each in groups[name]}
    chosen = [trial for trial in TRIALS if trial.name in wanted]
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="abroad-") as temporary:
        wheel = build(Path(temporary))
        print(f"{'':14} passed failed skipped       versions", flush=True)
        for trial in chosen:
            began = time.monotonic()
            environment = (options.keep or Path(temporary)).resolve() / trial.name
            found = try_packages(trial, wheel, environment)
            passed, failed = passed + found.passed, failed + found.failed
            numbers = f"{found.passed:6} {found.failed:6} {found.skipped:7}"
            seconds = time.monotonic() - began
            print(f"{trial.name:14} {numbers} {seconds:4.0f} s  {found.versions}", flush=True)
            if trial.resolution and found.passed:
                note(trial.name, list_packages(environment / ".venv"), found.passed, found.failed)
            print("".join(f"    {note}\n" for note in found.notes), end="", flush=True)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
