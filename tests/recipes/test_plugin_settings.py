"""Names and settings of plug-ins: validation, verl's flat keys, origins, completion."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from rlctl.errors import ConfigError, Problem
from rlctl.plugins import load_with_params
from rlctl.recipes.completion import complete_override
from rlctl.recipes.compose import compose
from rlctl.tracking.loggers import settings_of
from tests.plugin_folders import folder_of, marks_of, of_settings

LOSS = "actor_rollout_ref.actor.policy_loss"


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose("ppo", overrides)
    return list(caught.value.problems)


def problem(*overrides: str) -> Problem:
    [found] = problems(*overrides)
    return found


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        (f"{LOSS}.loss_mode=vanila", "did you mean 'vanilla'?"),
        ("algorithm.adv_estimator=gea", "did you mean 'gae'?"),
        ("algorithm.kl_penalty=k4", "low_var_kl"),
        ("actor_rollout_ref.rollout.name=vlm", "did you mean 'vllm'?"),
        ("trainer.logger=[console,wandbb]", "did you mean 'wandb'?"),
        ("reward.functions=[gsm9k]", "did you mean 'gsm8k'?"),
        ("data.sampler=randon", "did you mean 'random'?"),
    ],
)
def test_unknown_plugin_is_a_problem_with_a_suggestion(override: str, hint: str) -> None:
    found = problem(override)
    assert found.where == f"override {override}"
    assert hint in (found.hint or "")


@pytest.mark.plugin("objectives")
@pytest.mark.parametrize(
    ("override", "word"),
    [
        (f"{LOSS}.params.tau_pos=x", "tau_pos"),
        (f"{LOSS}.params.tau_pos=-1", "tau_pos"),
        (f"{LOSS}.params.tau_poss=1", "'tau_poss'"),
    ],
)
def test_wrong_setting_is_a_problem_at_its_place(override: str, word: str) -> None:
    found = problem(f"{LOSS}.loss_mode=sapo", override)
    assert found.where == f"override {override}"
    assert word in found.message


@pytest.mark.plugin("objectives")
def test_settings_in_a_recipe_keep_their_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [ppo, _self_]\nactor_rollout_ref:\n  actor:\n    policy_loss:\n"
        "      loss_mode: sapo\n      params: {tau_pos: 2}\n"
    )
    [origin] = compose(path).origins[f"{LOSS}.params.tau_pos"]
    assert (origin.value, origin.where, origin.level) == (2, f"{path}:6", 2)
    switched = compose(path, [f"{LOSS}.loss_mode=vanilla"])
    assert switched.config.actor_rollout_ref.actor.policy_loss.params == {}
    assert switched.unused == []


@pytest.mark.plugin("agents")
@pytest.mark.parametrize("name", ["mine.py:Grid", "envs/mine.py:Grid", "no_such_module:Grid"])
def test_settings_of_user_code_are_left_to_its_process(name: str) -> None:
    """The settings of the recipe's environment are dropped, and the code is not imported here."""
    agent = "actor_rollout_ref.rollout.agent"
    selected = f"{agent}.environment={name}"
    assert compose("tools", [selected]).config.actor_rollout_ref.rollout.agent.params == {}
    recipe = compose("tools", [selected, f"{agent}.params={{size: 5}}"])
    assert recipe.config.actor_rollout_ref.rollout.agent.params == {"size": 5}
    assert recipe.unused == []


@pytest.mark.plugin("bridges", "objectives")
@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    of_settings(
        [
            ([f"{LOSS}.loss_mode=sapo", "actor_rollout_ref.actor.tau_neg=3"], "tau_neg", 3),
            ([f"{LOSS}.loss_mode=dro", f"{LOSS}.dro_beta=0.1"], "beta", 0.1),
            ([f"{LOSS}.loss_mode=kl_cov", f"{LOSS}.ppo_kl_coef=0.5"], "ppo_kl_coef", 0.5),
            ([f"{LOSS}.loss_mode=kl_cov", f"{LOSS}.kl_cov_ratio=0.5"], "kl_cov_ratio", 0.5),
            ([f"{LOSS}.loss_mode=sapo", "actor_rollout_ref.actor.tau_pos=3"], "tau_pos", 3),
            *(
                ([f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.{key}=0.5"], key, 0.5)
                for key in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
            ),
        ]
    ),
)
def test_flat_keys_of_verl_set_the_selected_plugin(
    overrides: list[str], key: str, value: float
) -> None:
    recipe = compose("ppo", overrides)
    assert recipe.config.actor_rollout_ref.actor.policy_loss.params == {key: value}
    assert len(recipe.notices) == 1
    assert recipe.unused == []


@pytest.mark.plugin("bridges", "objectives")
def test_flat_keys_of_other_plugins_are_unused() -> None:
    recipe = compose("ppo", ["actor_rollout_ref.actor.tau_neg=3", "algorithm.gdpo_reward_keys=[a]"])
    assert [each.key for each in recipe.unused] == [
        "algorithm.gdpo_reward_keys",
        "actor_rollout_ref.actor.tau_neg",
    ]
    assert recipe.notices == []
    assert recipe.config.algorithm.adv_estimator_params == {}


@pytest.mark.plugin("objectives")
def test_completion_offers_the_settings_of_the_selected_plugin() -> None:
    selected = ["algorithm.adv_estimator=gdpo"]
    assert complete_override("algorithm.adv_estimator_params.", selected) == [
        "algorithm.adv_estimator_params.reward_keys=",
        "algorithm.adv_estimator_params.reward_weights=",
    ]
    assert complete_override("algorithm.adv_estimator_params.") == []
    assert "reward.params.gsm8k." in complete_override("reward.params.")
    assert complete_override("reward.params.gsm8k.method=f") == [
        "reward.params.gsm8k.method=flexible"
    ]


LOGGER = """
from rlctl.plugins import Params


class TsvParams(Params):
    path: str = "a.tsv"
    columns: tuple[str, ...] = ()


class TsvTracker:
    Params = TsvParams
    start = log = finish = None
"""
TRACKING = "trainer.tracking.params"


@pytest.mark.parametrize(
    "override",
    [
        f"{TRACKING}={{parts.tsv_log:TsvTracker: {{path: x.tsv, columns: [a, b]}}}}",
        f"{TRACKING}={{parts.tsv_log\\:TsvTracker: {{path: x.tsv, columns: [a, b]}}}}",
        f"{TRACKING}={{TsvTracker: {{path: x.tsv, columns: [a, b]}}}}",
        f"{TRACKING}.TsvTracker={{path: x.tsv, columns: [a, b]}}",
        f"{TRACKING}.parts.tsv_log:TsvTracker={{path: x.tsv, columns: [a, b]}}",
        f"+{TRACKING}.TsvTracker={{path: x.tsv, columns: [a, b]}}",
    ],
)
def test_settings_of_a_logger_in_a_module_are_written_on_the_command_line(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/tsv_log.py").write_text(LOGGER)
    monkeypatch.syspath_prepend(tmp_path)
    name = "parts.tsv_log:TsvTracker"
    selected = f"trainer.logger=[console,{name}]"
    params = compose("ppo", [selected, override]).config.trainer.tracking.params
    tracker = partial(load_with_params, "loggers", name, key=TRACKING)
    settings = tracker(values=settings_of(name, params)[1]).keywords["params"]
    assert (settings.path, settings.columns) == ("x.tsv", ("a", "b"))
    wrong = problem(selected, override.replace("path", "pat"))
    assert (wrong.message, "'path'" in (wrong.hint or "")) == (f"{name} has no setting 'pat'", True)
    [unselected] = [
        found for found in problems("trainer.logger=[console]", override) if "path" in found.message
    ]
    assert "trainer.logger is console" in unselected.message


# The first of them is the example in the help of `trainer.tracking.params`.
OF_TRACKERS = (
    "{wandb: {entity: team, group: a, tags: [x, y], save_code: true}}",
    "{swanlab: {workspace: team, public: true, base_url: https://swan.example.com}}",
    "{mlflow: {tracking_uri: http://localhost:5000, tags: {team: a}}}",
    "{trackio: {space_id: me/space, private: true}}",
    "{tensorboard: {log_dir: /tmp/events}}",
)


def logger_of(override: str) -> str:
    return override.lstrip("{").partition(":")[0]


@pytest.mark.parametrize(
    "override",
    [
        pytest.param(each, marks=marks_of(folder_of("loggers", logger_of(each))))
        for each in OF_TRACKERS
    ],
)
def test_settings_of_the_trackers_are_accepted(override: str) -> None:
    logger = logger_of(override)
    recipe = compose("ppo", [f"trainer.logger=[console,{logger}]", f"{TRACKING}={override}"])
    assert list(recipe.config.trainer.tracking.params) == [logger]
    assert recipe.unused == []
