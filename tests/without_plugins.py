"""Run the tests of the core in copies of this tree that lack folders of `rlctl/plugins`.

    python -m tests.without_plugins                      # without all four, then without each alone
    python -m tests.without_plugins console bridges      # without these two, in one copy
    python -m tests.without_plugins console -- tests/cli # the rest are arguments of pytest

The tests of the core are those outside of `tests/plugins`. Those marked `plugin(FOLDER)` are
skipped in a copy without this folder, which also lacks `tests/plugins/FOLDER`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.plugin_folders import FOLDERS, ROOT

# The options of `make test`.
OPTIONS = (
    "--ignore=tests/plugins",
    "-m",
    "not gpu and not soak and not real",
    *("--hypothesis-profile=ci", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"),
)


def copy_tree(folders: Sequence[str], to: Path) -> None:
    """Copy the files that Git does not ignore, without `folders` and their tests."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    left_out = {
        place / folder
        for place in map(Path, ("rlctl/plugins", "tests/plugins"))
        for folder in folders
    }
    for name in map(Path, filter(None, names.split("\0"))):
        if left_out.isdisjoint(name.parents) and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(tree: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run pytest in a copy; return its exit code and its output."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import rlctl; print(rlctl.__file__)"]
    imported = subprocess.run(
        where, cwd=tree.parent, env=environment, check=True, capture_output=True, text=True
    )
    if Path(imported.stdout.strip()) != tree / "rlctl" / "__init__.py":
        raise SystemExit(f"rlctl is imported from {imported.stdout.strip()}, not from {tree}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *arguments],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def try_without(folders: Sequence[str], arguments: Sequence[str]) -> bool:
    """Run the tests without `folders`; print the end of the output. Return True if they pass."""
    with tempfile.TemporaryDirectory(prefix="rlctl-without-") as place:
        tree = Path(place).resolve() / "rlctl"
        copy_tree(folders, tree)
        code, output = run_tests(tree, arguments)
    if code:
        print(output)
    last = output.strip().rpartition("\n")[2]
    print(f"without {', '.join(folders)}: {last}", flush=True)
    return code == 0


def main() -> None:
    """Run the tests in each copy and exit with 1 if any fails."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m tests.without_plugins",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"of {', '.join(FOLDERS)}")
    folders: list[str] = parser.parse_args(words[:end]).folders
    if unknown := {*folders} - {*FOLDERS}:
        parser.error(f"no folder of rlctl/plugins: {', '.join(sorted(unknown))}")
    copies = [folders] if folders else [[*FOLDERS], *([folder] for folder in FOLDERS)]
    passed = [try_without(copy, words[end + 1 :]) for copy in copies]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
