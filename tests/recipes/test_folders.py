"""Recipes in any folder: search paths, custom parts, included recipes, override grammar."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.recipes.compose import compose


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Create team/ with a recipe and its search path, and mine/ with one that includes it."""
    write(
        tmp_path / "shared" / "optim" / "gentle.yaml",
        "defaults: [adamw, _self_]\nweight_decay: 0.2\n",
    )
    write(
        tmp_path / "team" / "team_grpo.yaml",
        "hydra: {searchpath: [file://../shared]}\n"
        "defaults: [gsm8k_grpo, override optim@actor_rollout_ref.actor.optim: gentle, _self_]\n"
        "trainer: {project_name: team}\n",
    )
    write(
        tmp_path / "mine" / "my.yaml",
        "hydra: {searchpath: [file://../team]}\ndefaults: [team_grpo, _self_]\n"
        "data: {max_prompt_length: 1024}\n",
    )
    return tmp_path


def test_search_path_is_relative_to_its_recipe(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "shared")
    recipe = compose(project / "mine" / "my.yaml")
    config = recipe.config
    assert config.data.max_prompt_length == 1024
    assert config.trainer.project_name == "team"
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.actor_rollout_ref.actor.optim.weight_decay == 0.2
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    decay = recipe.origins["actor_rollout_ref.actor.optim.weight_decay"]
    assert [(origin.value, origin.level) for origin in decay] == [(0.01, 1), (0.2, 2)]
    assert decay[-1].where == "optim/gentle.yaml:2"


def test_origins_are_relative_to_the_current_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    origins = compose("mine/my.yaml").origins
    assert origins["data.max_prompt_length"][-1].where == "mine/my.yaml:3"
    assert compose("mine/my").name == "my"


def test_search_paths_by_environment_and_by_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "parts" / "optim" / "mine.yaml",
        "defaults: [adamw, _self_]\nlr_warmup_steps: 7\n",
    )
    monkeypatch.setenv("RLCTL_TEST_PARTS", str(tmp_path / "parts"))
    write(
        tmp_path / "site" / "lab" / "parts" / "optim" / "slow.yaml",
        "defaults: [adamw, _self_]\nlr: 1.0e-9\n",
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    text = (
        "hydra: {searchpath: ['file://${oc.env:RLCTL_TEST_PARTS}', '${oc.env:RLCTL_NONE,parts}', "
        "pkg://lab.parts]}\n"
        "defaults: [ppo, override optim@critic.optim: mine, "
        "override optim@actor_rollout_ref.actor.optim: slow, _self_]\n"
    )
    config = compose(write(tmp_path / "x.yaml", text)).config
    assert config.critic.optim.lr_warmup_steps == 7


def test_a_search_path_and_a_part_on_the_command_line(project: Path) -> None:
    recipe = compose(
        "ppo",
        [
            f"hydra.searchpath=[{project / 'shared'}]",
            "optim@critic.optim=gentle",
            "critic.optim.lr=0.5",
        ],
    )
    assert (recipe.config.critic.optim.weight_decay, recipe.config.critic.optim.lr) == (0.2, 0.5)
    assert recipe.config.actor_rollout_ref.actor.optim.weight_decay == 0.01


def test_part_beside_the_recipe_takes_precedence(tmp_path: Path) -> None:
    write(tmp_path / "trainer" / "cluster.yaml", "defaults: [local, _self_]\nnnodes: 4\n")
    recipe = write(tmp_path / "x.yaml", "defaults: [ppo, override trainer: cluster, _self_]\n")
    assert compose(recipe).config.trainer.nnodes == 4
    assert compose(recipe, ["trainer=local"]).config.trainer.nnodes == 1


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.logger=[console,'jsonl']", "logger", ("console", "jsonl")),
        ('trainer.project_name="x,y"', "project_name", "x,y"),
        ("trainer.project_name='a=b'", "project_name", "a=b"),
        ("trainer.experiment_name=7", "experiment_name", "7"),
        ("trainer.experiment_name=null", "experiment_name", None),
        ("trainer.project_name=hello world", "project_name", "hello world"),
        ("trainer.run_dir=/a/b:c", "run_dir", "/a/b:c"),
        ("trainer.seed=${data.seed}", "seed", 1),
        ("++trainer.seed=5", "seed", 5),
        ("trainer={seed: 6}", "seed", 6),
        ("trainer.val_only=TRUE", "val_only", True),
    ],
)
def test_the_override_grammar(override: str, key: str, value: object) -> None:
    assert getattr(compose("ppo", [override]).config.trainer, key) == value


def test_open_mappings_can_be_extended_and_reduced() -> None:
    kwargs = "reward.custom_reward_function.reward_kwargs"
    overrides = [
        f"+{kwargs}.a.b=1",
        f"{kwargs}.c=[2,3]",
        f"{kwargs}={{d: {{e: 4}}}}",
        f"{kwargs}.x=1",
        f"~{kwargs}.x",
    ]
    recipe = compose("ppo", overrides)
    assert recipe.config.reward.custom_reward_function.reward_kwargs == {
        "a": {"b": 1},
        "c": [2, 3],
        "d": {"e": 4},
    }
    assert f"{kwargs}.x" not in recipe.origins
    emptied = compose("ppo", [f"{kwargs}.x=1", f"~{kwargs}.x"])
    assert emptied.container["reward"]["custom_reward_function"]["reward_kwargs"] == {}
    assert emptied.origins[kwargs][-1].value == {}


@pytest.mark.plugin("bridges")
@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("trainer.val_generations_to_log_to_wandb=3", "trainer.log_val_generations", 3),
        ("reward.gsm8k.method=flexible", "reward.params.gsm8k.method", "flexible"),
        ("ray_init.timeline_json_file=t.json", "ray_kwargs.timeline_json_file", "t.json"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size=3",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            3,
        ),
        (
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            "cosine",
        ),
        ("trainer.max_actor_ckpt_to_keep=2", "trainer.max_ckpt_to_keep", 2),
        ("+trainer.max_critic_ckpt_to_keep=2", "trainer.max_ckpt_to_keep", 2),
    ],
)
def test_moved_key_is_accepted_with_a_notice(
    tmp_path: Path, old: str, new: str, value: object
) -> None:
    key, _, text = old.lstrip("+").partition("=")
    recipe = compose("ppo", [old])
    assert recipe.origins[new][-1].value == value
    assert recipe.notices[0] == f"{key} is now {new}"
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(key.split("."))]
    path = write(
        tmp_path / "old.yaml", "defaults: [ppo, _self_]\n" + "\n".join(lines) + f" {text}\n"
    )
    recipe = compose(path)
    assert (recipe.origins[new][-1].value, recipe.origins[new][-1].where) == (
        value,
        f"{path}:{1 + len(lines)}",
    )
    assert recipe.notices[0] == f"{key} is now {new}"


@pytest.mark.plugin("bridges")
def test_keys_that_change_nothing_are_dropped_with_a_notice() -> None:
    recipe = compose(
        "ppo",
        ["actor_rollout_ref.actor.fsdp_config.grad_offload=true", "trainer.default_hdfs_dir=null"],
    )
    assert [notice.split()[0].rpartition(".")[2] for notice in recipe.notices] == [
        "grad_offload=true",
        "default_hdfs_dir=null",
    ]


def test_parts_are_read_again_after_changes(project: Path) -> None:
    """Also if a new file comes before the part in the search path."""

    def weight_decay() -> float:
        config = compose(project / "team" / "team_grpo.yaml", [path]).config
        return config.actor_rollout_ref.actor.optim.weight_decay

    path = f"hydra.searchpath=[{project / 'mine'}]"
    assert weight_decay() == 0.2
    write(project / "shared" / "optim" / "gentle.yaml", "defaults: [adamw, _self_]\n")
    assert weight_decay() == 0.01
    write(
        project / "mine" / "optim" / "gentle.yaml",
        "defaults: [adamw, _self_]\nweight_decay: 0.3\n",
    )
    assert weight_decay() == 0.3
