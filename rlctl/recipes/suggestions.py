"""Suggestions for unknown keys: words of other libraries, other case, and typos."""

from __future__ import annotations

from rlctl.recipes.keys import schema_keys
from rlctl.suggest import nearest, question

_ACTOR = "actor_rollout_ref.actor"
# Words that other libraries use, with the key here.
_WORDS = {
    "epochs": "trainer.total_epochs",
    "num_epochs": "trainer.total_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "steps": "trainer.total_training_steps",
    "max_steps": "trainer.total_training_steps",
    "num_steps": "trainer.total_training_steps",
    "total_step": "trainer.total_training_steps",
    "total_steps": "trainer.total_training_steps",
    "gpus": "trainer.n_gpus_per_node",
    "ngpus": "trainer.n_gpus_per_node",
    "n_gpus": "trainer.n_gpus_per_node",
    "num_gpus": "trainer.n_gpus_per_node",
    "batch_size": "data.train_batch_size",
    "mini_batch_size": f"{_ACTOR}.ppo_mini_batch_size",
    "micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "per_device_train_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "learning_rate": f"{_ACTOR}.optim.lr",
    "max_grad_norm": f"{_ACTOR}.grad_clip",
    "beta": f"{_ACTOR}.kl_loss_coef",
    "epsilon": f"{_ACTOR}.clip_ratio",
    "model_path": "actor_rollout_ref.model.path",
    "model_name_or_path": "actor_rollout_ref.model.path",
    "partial_pretrain": "actor_rollout_ref.model.path",
    "num_generations": "actor_rollout_ref.rollout.n",
    "max_new_tokens": "data.max_response_length",
    "max_tokens": "data.max_response_length",
    "max_completion_length": "data.max_response_length",
    "run_name": "trainer.experiment_name",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.run_dir",
}


def suggest_key(name: str) -> str | None:
    """Return `did you mean KEY?` for an unknown key, or None if nothing is similar."""
    return question(similar_keys(name))


def similar_keys(name: str) -> list[str]:
    """Return the keys that an unknown one may stand for, the most probable first."""
    keys = schema_keys()
    if name.lower() in keys:
        return [name.lower()]
    section, _, leaf = name.rpartition(".")
    word = _WORDS.get(leaf.lower())
    if word is not None:
        nearby = f"{section}.{word.rpartition('.')[2]}"
        return [nearby if nearby in keys else word]
    return nearest(name, keys)
