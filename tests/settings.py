"""Settings of small runs by short names: `given(batch=8, n=4)` is a list of overrides."""

from __future__ import annotations

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
KEYS = {
    "train": "data.train_files",
    "val": "data.val_files",
    "prompt": "data.max_prompt_length",
    "response": "data.max_response_length",
    "batch": "data.train_batch_size",
    "train_rows": "data.train_max_samples",
    "val_rows": "data.val_max_samples",
    "model": "actor_rollout_ref.model.path",
    "mini_batch": f"{_ACTOR}.ppo_mini_batch_size",
    "lr": f"{_ACTOR}.optim.lr",
    "kl_loss": f"{_ACTOR}.use_kl_loss",
    "n": f"{_ROLLOUT}.n",
    "engine": f"{_ROLLOUT}.name",
    "tensor": f"{_ROLLOUT}.tensor_model_parallel_size",
    "reward": "reward.custom_reward_function.path",
    "reward_processes": "reward.num_processes",
    "epochs": "trainer.total_epochs",
    "steps": "trainer.total_training_steps",
    "save": "trainer.save_freq",
    "validate": "trainer.test_freq",
    "validate_first": "trainer.val_before_train",
    "warmup": "trainer.critic_warmup",
    "keep": "trainer.max_ckpt_to_keep",
    "threads": "trainer.num_threads",
    "ranks": "trainer.n_gpus_per_node",
    "nodes": "trainer.nnodes",
    "device": "trainer.device",
    "logger": "trainer.logger",
    "runs": "trainer.run_dir",
    "project": "trainer.project_name",
    "name": "trainer.experiment_name",
}


def given(**values: object) -> list[str]:
    """Return `key=value` for each value; None is null."""
    texts = {None: "null", True: "true", False: "false"}
    return [
        f"{KEYS[name]}={texts[value] if value is None or isinstance(value, bool) else value}"
        for name, value in values.items()
    ]
