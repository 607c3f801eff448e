"""Installation from a wheel: the same recipes and the same dry run as in a checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import rlctl
from tests.e2e.wheel import ROOT, TIMEOUT_S, install, run


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the commands of an environment that has only the wheel."""
    return install(tmp_path_factory.mktemp("wheel"))


@pytest.mark.timeout(TIMEOUT_S)
def test_wheel_and_checkout_have_the_same_recipes(installed: Path, tmp_path: Path) -> None:
    command = ("recipes", "ls", "--json")
    from_wheel = json.loads(run(installed / "python", "-m", "rlctl", *command, cwd=tmp_path))
    from_checkout = json.loads(rlctl(*command, cwd=ROOT).stdout)
    assert [each["name"] for each in from_wheel] == [each["name"] for each in from_checkout]
    assert {"ppo", "grpo", "sft", "gsm8k_ppo"} <= {each["name"] for each in from_wheel}


@pytest.mark.soak
@pytest.mark.timeout(TIMEOUT_S)
def test_a_wheel_plans_the_quickstart_from_any_folder(installed: Path, tmp_path: Path) -> None:
    command = ("train", "ppo", "--dry-run", "--json", "trainer.n_gpus_per_node=1")
    from_wheel = json.loads(run(installed / "rlctl", *command, cwd=tmp_path))
    from_checkout = json.loads(rlctl(*command, cwd=ROOT).stdout)
    assert from_wheel["batches"] == from_checkout["batches"]
    assert from_wheel["recipe"] == from_checkout["recipe"] == "ppo"
    assert not list(tmp_path.iterdir())
