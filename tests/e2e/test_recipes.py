"""All shipped recipes: those of the embedded models train a step, the others compose.

Recipes of agents are trained in `tests/agents/test_quickstart_agent.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.recipes.roles import trained_role
from rlctl.recipes.search_path import library_recipes
from rlctl.runtime.build import load_algorithm
from tests.e2e.command import VERBS, metrics
from tests.recorded import called

SMALL = [
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"),
    *("trainer.critic_warmup=0", "trainer.val_before_train=false", "data.val_files=null"),
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else ())
        for name in library_recipes()
        if not name.endswith("_trainer")
    ],
)
def test_embedded_recipes_train_and_others_compose(name: str, tmp_path: Path) -> None:
    config = compose(name).config
    if not is_embedded(name, config):
        needs = load_algorithm(config, num_steps=1).needs
        size = trained_role(config, needs).learner(config).ppo_mini_batch_size
        assert config.data.train_batch_size % size == 0
        return
    settings = [*SMALL, *MORE.get(name, [])]
    verb = VERBS.get(name, "ppo")
    words = ["train", verb, "--recipe", name, "--name", "r", "--inline", *settings]
    done = called(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = tmp_path.glob("runs/*/r")
    [row] = metrics(run)
    role = "reward_model" if name == "rm" else "actor"
    assert 0 < row[f"{role}/grad_norm"] < math.inf
