"""Two steps of each algorithm beyond PPO, and the second again; a step of each shipped recipe.

Recipes of agents are trained in `tests/plugins/agents/test_quickstart_agent.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlctl.data_prep.arithmetic import generate
from rlctl.data_prep.rows import write_rows
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.recipes.role_table import trained_role
from rlctl.recipes.search_path import library_recipes
from rlctl.runtime.build import load_algorithm
from tests.e2e.command import VERBS, metrics, reproducible, rlctl, train
from tests.e2e.killed_runs import SCORE, learned
from tests.models import write_tiny_model
from tests.plugin_folders import folder_of_recipe, marks_of
from tests.settings import given
from tests.skips import sampled

SAMPLED = given(n=4, reward="score.py", reward_processes=1)
# Recipe -> settings, and a metric that shows that it learned.
CASES: dict[str, tuple[list[str], str]] = {
    "online_dpo": ([*SAMPLED, "algorithm.params.pairs=random"], "pairs/margin"),
    "raft": ([*SAMPLED, "actor_rollout_ref.actor.shuffle=true"], "raft/kept_score"),
    "distill": (
        [
            "algorithm.params.teacher_models={one: {key: rlctl/arithmetic, model_path: teacher}, "
            "others: {model_path: teacher}}"
        ],
        "distill/reverse_kl",
    ),
    "self_distill": (
        ["algorithm.params={loss_mode: forward_kl_topk, ema_decay: 0.5}"],
        "distill/forward_kl_topk",
    ),
    "dpo": (["data.train_files=pairs.parquet"], "pairs/accuracy"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "score.py").write_text(SCORE)
    rows = generate(16, seed=1, level=1, careless=0.0, split="train")
    for row in rows:
        row.extra_info["chosen"] = row.extra_info.pop("answer")
        row.extra_info["rejected"] = "#### 0"
    write_rows(folder / "pairs.parquet", rows)
    write_tiny_model(folder / "teacher", seed=5)
    return folder


@pytest.mark.plugin("objectives")
@pytest.mark.parametrize("recipe", sampled(CASES, CASES.keys() - {"raft", "distill"}))
def test_two_steps_and_an_exact_resume(recipe: str, folder: Path, settings: list[str]) -> None:
    more, metric = CASES[recipe]
    settings = [*settings, *given(response=8, save=1, validate_first=False, lr=1e-3), *more]
    verb = VERBS.get(recipe, "ppo")
    run = train(verb, recipe, "--recipe", recipe, "--inline", *settings, cwd=folder)
    assert [row["step"] for row in metrics(run)] == [1, 2]
    for row in metrics(run):
        assert math.isfinite(row[metric])
        assert row["actor/grad_norm"] > 0
    rlctl("resume", recipe, "--inline", "--from-step", "1", "--fork", f"{recipe}-2", cwd=folder)
    again = run.with_name(f"{recipe}-2")
    assert reproducible(again)[-1] == reproducible(run)[-1]
    assert learned(again) == learned(run)


SMALL = [
    *given(batch=4, mini_batch=2, steps=1, save=-1, validate=-1),
    *given(warmup=0, validate_first=False, val=None),
]
# Settings without which a recipe has nothing to do in a step.
MORE = {
    "dapo": ["algorithm.filter_groups.max_num_gen_batches=100"],
    "distill": ["+actor_rollout_ref.ref.model.override_config.rms_norm_eps=0.1"],  # any teacher
}

# Trained by other tests, or with another estimator or loss alone.
IN_SOAK = (
    *("ppo", "grpo", "online_dpo", "self_distill", "dpo", "sft"),
    *("rloo", "reinforce_plus_plus", "dr_grpo", "gspo"),
)


def is_embedded(name: str, config: schema.Config) -> bool:
    """Return True for a recipe that trains with the embedded model and nothing else."""
    return (
        config.actor_rollout_ref.model.path.startswith("quickstart")
        and not config.actor_rollout_ref.rollout.multi_turn.enable
        and not (config.reward.reward_model.enable and name != "rm")  # needs a trained one
        and name != "judge"  # needs a server: see `test_secrets.py`
    )


RECIPES = [name for name in library_recipes() if not name.endswith("_trainer")]
EACH = [
    pytest.param(*case.values, marks=[*case.marks, *marks_of(folder_of_recipe(*case.values))])
    for case in sampled(RECIPES, {*RECIPES} - {*IN_SOAK})
]


@pytest.mark.parametrize("name", EACH)
def test_embedded_recipes_train_and_others_compose(name: str, tmp_path: Path) -> None:
    config = compose(name).config
    if not is_embedded(name, config):
        needs = load_algorithm(config, num_steps=1).needs
        size = trained_role(config, needs).learner(config).ppo_mini_batch_size
        assert config.data.train_batch_size % size == 0
        return
    settings = [*SMALL, *MORE.get(name, [])]
    verb = VERBS.get(name, "ppo")
    [row] = metrics(train(verb, "r", "--recipe", name, "--inline", *settings, cwd=tmp_path))
    role = "reward_model" if name == "rm" else "actor"
    assert 0 < row[f"{role}/grad_norm"] < math.inf
