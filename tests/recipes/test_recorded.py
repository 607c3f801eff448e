"""Configuration as records have it: references as written, no secrets, no drift, or damaged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from rlctl.errors import ConfigError, UsageError
from rlctl.recipes.compose import Recipe, compose
from rlctl.recipes.layers import Origin
from rlctl.recipes.recorded import missing_secrets
from rlctl.recipes.recorded_config import changes, recompose
from rlctl.redaction import redact

SECTION = "reward.custom_reward_function.reward_kwargs"
LITERAL = [f"+{SECTION}.api_key=planted-1", f"+{SECTION}.url='https://u:planted-2@h/x'"]
READ = [f"+{SECTION}.a=${{oc.env:PLANTED}}", f"+{SECTION}.b=x-${{{SECTION}.a}}"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "planted-3")


def kwargs(container: dict) -> dict:
    return container["reward"]["custom_reward_function"]["reward_kwargs"]


def stored(recipe: Recipe, folder: Path) -> Path:
    """Write the recipe as a run does."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe.recorded, sort_keys=False))
    return folder


def test_values_are_used_and_not_recorded() -> None:
    recipe = compose("ppo", [*LITERAL, *READ])
    assert kwargs(recipe.container) == {
        "api_key": "planted-1",
        "url": "https://u:planted-2@h/x",
        "a": "planted-3",
        "b": "x-planted-3",
    }
    assert kwargs(recipe.recorded) == {
        "api_key": "<secret>",
        "url": "https://<secret>@h/x",
        "a": "${oc.env:PLANTED}",
        "b": f"x-${{{SECTION}.a}}",
    }
    assert "planted" not in str(recipe.origins)
    assert recipe.origins[f"{SECTION}.api_key"][-1] == Origin(
        "<secret>", f"override +{SECTION}.api_key=<secret>", 3
    )
    assert recipe.recorded | {"reward": 0} == recipe.container | {"reward": 0}
    assert list(recipe.recorded) == list(recipe.container)
    shown = str(ConfigError("found planted-1, planted-2 and planted-3"))
    assert shown.endswith("found <secret>, <secret> and ${oc.env:PLANTED}")


def test_errors_show_values_of_the_environment_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_DATA", "/nowhere/data")
    first, second = ("${oc.env:RLCTL_DATA}/a.parquet", "${oc.env:RLCTL_DATA}/b.parquet")
    compose("ppo", [f'data.train_files=["{first}","{second}"]', f"data.val_files={second}"])
    for name, shown in (("a", first), ("b", second)):
        assert redact(f"no /nowhere/data/{name}.parquet") == f"no {shown}"


def test_resumed_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(compose("ppo", [*LITERAL, *READ]), tmp_path / "run")
    resumed = recompose(folder)
    assert changes(folder, resumed.recorded) == []
    assert kwargs(resumed.container)["b"] == "x-planted-3"
    first, second = missing_secrets(resumed.config)
    assert first.message.startswith(f"{SECTION}.api_key is a secret")
    assert second.message.startswith(f"{SECTION}.url is a secret")
    assert f"{SECTION}.api_key=…; " in str(ConfigError(first))
    assert f"{SECTION}.api_key='${{oc.env:NAME}}' is read" in str(ConfigError(first))
    again = recompose(folder, LITERAL)
    assert missing_secrets(again.config) == []
    assert changes(folder, again.recorded) == []
    rotated = recompose(folder, [f"{SECTION}.api_key=${{oc.env:PLANTED}}", LITERAL[1]])
    (change,) = changes(folder, rotated.recorded)
    assert change.free
    monkeypatch.delenv("PLANTED")
    with pytest.raises(ConfigError, match="the environment variable PLANTED is not set"):
        recompose(folder)


@pytest.mark.parametrize("wrong", ["trainer.seed=x", "nothing.here=1", f"{SECTION}=[planted-1"])
def test_errors_have_no_secrets(wrong: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose("ppo", [*LITERAL, *READ, wrong, f"+{SECTION}.token=planted-4,planted-5"])
    assert "planted-4" not in str(raised.value)
    assert "planted-5" not in str(raised.value)


def test_sweeps_name_axes_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    from rlctl.sweeps.sweep_plan import make_sweep_plan

    make_sweep_plan("sft", "sft", ["algorithm.gamma=0.9,1.0"])
    assert "algorithm.gamma has no effect" in caplog.text


def test_sweeps_and_jobs_refuse_literal_secrets() -> None:
    from rlctl.cli import remote_jobs
    from rlctl.sweeps.sweep_plan import make_sweep_plan

    axis = "actor_rollout_ref.actor.optim.lr=1e-5,1e-4"
    with pytest.raises(ConfigError, match="a literal secret, which a sweep cannot store") as raised:
        make_sweep_plan("ppo", "ppo", [LITERAL[0], axis])
    assert "planted" not in str(raised.value)
    with pytest.raises(UsageError, match="must not contain secrets") as refused:
        remote_jobs.run("http://127.0.0.1:1", False, "job", ["train", "ppo", LITERAL[0]])
    assert "planted" not in str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    container = compose("ppo", ["trainer.seed=7"]).container
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(container))
    return tmp_path


def test_a_mesh_that_was_defined_as_another_follows_it(tmp_path: Path) -> None:
    sizes = [f"actor_rollout_ref.{role}.fsdp_config" for role in ("actor", "ref")]
    tensor, sequence = "tensor_model_parallel_size", "ulysses_sequence_parallel_size"
    given = [f"{sizes[0]}.{tensor}=2", f"{sizes[0]}.{sequence}=2", f"{sizes[1]}.{sequence}=2"]
    recipe = compose("ppo", given)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe.container))
    chains = {key: [asdict(each) for each in chain] for key, chain in recipe.origins.items()}
    (tmp_path / "origins.json").write_text(json.dumps(chains))
    again = recompose(tmp_path, [f"{sizes[0]}.{tensor}=1", f"{sizes[0]}.{sequence}=1"])
    assert again.config.actor_rollout_ref.ref.fsdp_config.tensor_model_parallel_size == 1
    assert again.config.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size == 2
    assert recompose(tmp_path).config == recipe.config


def test_torn_origins_are_reported_and_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "origins.json").write_text('{"trainer.seed": [{"val')
    recipe = recompose(folder)
    assert recipe.config.trainer.seed == 7
    assert recipe.origins["trainer.seed"][-1].where == str(folder / "config.yaml")
    assert f"{folder / 'origins.json'} cannot be read" in caplog.text


def test_errors_name_the_stored_file(folder: Path) -> None:
    stored = folder / "config.yaml"
    stored.write_text(stored.read_text().replace("seed: 7", "seed: seven"))
    with pytest.raises(ConfigError) as caught:
        recompose(folder)
    assert [each.where for each in caught.value.problems] == [str(stored)]
