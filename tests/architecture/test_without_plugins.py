"""Folders of `rlctl/plugins` can be deleted: the core works without them and says what is gone.

`python -m tests.without_plugins` (`make without`) runs the tests of the core in such copies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.plugin_folders import FOLDERS, is_there
from tests.settings import given

PLUGINS = ROOT / "rlctl" / "plugins"
SHORT = given(batch=8, mini_batch=8, val_rows=4, response=8, steps=1, validate=-1, threads=1)
TRAIN = " ".join(("train ppo --inline", *SHORT))
# For each folder: a command that needs it, and the message without it.
NEEDED = {
    "agents": ("env ls", "the command 'env' is not in this installation"),
    "bridges": (
        "train ppo --inline trainer.logger=[mlflow]",
        "the logger 'mlflow' is not in this installation",
    ),
    "console": ("board", "the command 'board' is not in this installation"),
    "objectives": (
        "train ppo --inline algorithm.adv_estimator=tir_optimal_token_baseline",
        "the advantage 'tir_optimal_token_baseline' is not in this installation",
    ),
}
# Further parts of these folders that commands and keys of the core name.
ALSO_GONE = {
    "import verl x.sh": "the command 'import' is not in this installation",
    "train rm --dry-run": "the algorithm 'bradley_terry' is not in this installation",
    "train ppo --inline --dry-run reward.reward_model.enable=true "
    "reward.reward_model.model.path=quickstart": "the role 'reward_model' is not in this "
    "installation",
}
RUN = """
import sys, rlctl
from rlctl.__main__ import main

for line in sys.stdin.read().splitlines():
    print("$", line, flush=True)
    print("exit", main(line.split()), flush=True)
print(rlctl.__file__)
"""


def without(folders: Sequence[str], here: Path, commands: list[str]) -> list[str]:
    """Run commands in a copy of rlctl without `folders`; return what each prints."""
    shutil.copytree(ROOT / "recipes", here / "recipes")
    shutil.copytree(ROOT / "rlctl", here / "rlctl", ignore=ignore(folders))
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input="\n".join(commands),
        cwd=here,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert str(here / "rlctl") in done.stdout, done.stdout
    printed = done.stdout.split("$ ")[1:]
    assert len(printed) == len(commands), done.stdout
    return printed


def ignore(folders: Sequence[str]) -> Callable[[str, list[str]], Sequence[str]]:
    """Return the `ignore` of `copytree` that leaves out folders of plug-ins."""
    return lambda folder, _: folders if Path(folder) == PLUGINS else []


def test_the_folders_are_known() -> None:
    here = {path.parent.name for path in PLUGINS.glob("*/__init__.py")}
    assert here == {*filter(is_there, FOLDERS)}


def test_the_core_works_without_any_plug_in_folder(tmp_path: Path) -> None:
    commands = [
        "--help",
        "loggers",
        "config show ppo",
        TRAIN,
        "eval @last data.val_max_samples=2",  # a stored configuration names their defaults
        *(command for command, _ in NEEDED.values()),
        *ALSO_GONE,
    ]
    listed, loggers, config, trained, evaluated, *refused = without(FOLDERS, tmp_path, commands)
    for printed in (listed, loggers, config, trained, evaluated):
        assert "exit 0" in printed, printed
    assert "│ train " in listed
    assert "│ board " not in listed
    assert "tensorboard" not in loggers
    messages = [*(message for _, message in NEEDED.values()), *ALSO_GONE.values()]
    for printed, message in zip(refused, messages, strict=True):
        assert f"error: {message}" in printed


@pytest.mark.soak
@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_can_be_deleted_alone(folder: str, tmp_path: Path) -> None:
    command, message = NEEDED[folder]
    commands = ["--help", TRAIN, command]
    listed, trained, refused = without([folder], tmp_path, commands)
    assert "exit 0" in listed
    assert "exit 0" in trained
    assert f"error: {message}" in refused
