"""Installation from a wheel: the same recipes and the same dry run as in a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = [sys.executable, "-m", "uv"]
TIMEOUT_S = 600.0


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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the commands of an empty environment that has only the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*UV, "build", "--wheel", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    run(*UV, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    links = os.environ.get("PIP_FIND_LINKS")
    run(
        *[*UV, "pip", "install", "--quiet", "--python", folder / "venv/bin/python"],
        *(["--find-links", links] if links else []),
        *["--override", ROOT / "constraints.txt", next(folder.glob("*.whl"))],
        cwd=folder,
    )
    _copy_bytecode(folder / "venv")
    return folder / "venv" / "bin"


def _copy_bytecode(environment: Path) -> None:
    """Copy bytecode of this environment's packages to another one.

    Python uses it only for the source of the same time and size, and compiles others: torch and
    transformers take 20 s.
    """
    ours = Path(sysconfig.get_path("purelib"))
    theirs = environment / ours.relative_to(sys.prefix)
    for source in ours.rglob("__pycache__/*.pyc"):
        target = theirs / source.relative_to(ours)
        if target.parent.parent.is_dir() and not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)


@pytest.mark.timeout(TIMEOUT_S)
def test_wheel_and_checkout_have_the_same_recipes(installed: Path, tmp_path: Path) -> None:
    command = ("-m", "rlctl", "recipes", "ls", "--json")
    from_wheel = json.loads(run(installed / "python", *command, cwd=tmp_path))
    from_checkout = json.loads(run(sys.executable, *command, cwd=ROOT))
    assert [each["name"] for each in from_wheel] == [each["name"] for each in from_checkout]
    assert {"ppo", "grpo", "sft", "gsm8k_ppo"} <= {each["name"] for each in from_wheel}


@pytest.mark.timeout(TIMEOUT_S)
def test_a_wheel_plans_the_quickstart_from_any_folder(installed: Path, tmp_path: Path) -> None:
    command = ("train", "ppo", "--dry-run", "--json", "trainer.n_gpus_per_node=1")
    from_wheel = json.loads(run(installed / "rlctl", *command, cwd=tmp_path))
    from_checkout = json.loads(run(sys.executable, "-m", "rlctl", *command, cwd=ROOT))
    assert from_wheel["batches"] == from_checkout["batches"]
    assert from_wheel["recipe"] == from_checkout["recipe"] == "ppo"
    assert not list(tmp_path.iterdir())
