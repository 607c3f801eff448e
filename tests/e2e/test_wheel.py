"""Installation from a wheel: the same recipes and the same dry run as in a checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import rlctl
from tests.e2e.test_third_party import EXAMPLE
from tests.e2e.wheel import ROOT, TIMEOUT_S, UV, build, install, run


@pytest.mark.soak
@pytest.mark.timeout(TIMEOUT_S)
def test_wheel_and_checkout_have_the_same_recipes_and_plans(tmp_path: Path) -> None:
    """Run the commands in an empty folder, in an environment that has only the wheel."""
    folder, installed = tmp_path / "empty", install(build(tmp_path), tmp_path)
    folder.mkdir()

    def both(*command: str) -> tuple[Any, Any]:
        from_wheel = json.loads(run(installed / "rlctl", *command, cwd=folder))
        return from_wheel, json.loads(rlctl(*command, cwd=ROOT).stdout)

    names = [[recipe["name"] for recipe in listed] for listed in both("recipes", "ls", "--json")]
    assert names[0] == names[1]
    assert {"ppo", "grpo", "sft", "gsm8k_ppo"} <= {*names[0]}
    command = ("train", "ppo", "--dry-run", "--json", "trainer.n_gpus_per_node=1")
    from_wheel, from_checkout = both(*command)
    assert from_wheel["batches"] == from_checkout["batches"]
    assert from_wheel["recipe"] == from_checkout["recipe"] == "ppo"
    assert not list(folder.iterdir())
    run(*UV, "pip", "install", "--quiet", "--python", installed / "python", EXAMPLE, cwd=tmp_path)
    assert "rlctl-example-plugins" in run(installed / "rlctl", "--help", cwd=folder)
