"""Every key of the schema is read by some code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from rlctl.recipes.compose import compose
from rlctl.recipes.keys import schema_keys
from rlctl.recipes.schema import Config, Section
from tests.models import write_tiny_model
from tests.plugin_folders import FOLDERS

# Patterns of keys that a run of PPO in one process does not read, with the reason.
ELSEWHERE = {
    "*params": "read by the plug-in that has settings, beside the key that selects it",
    "ray_kwargs.*": "read where Ray is started",
    "sweep.*": "read by rlctl sweep",
    "trainer.placement.device_fraction": "read where worker processes are placed",
    "trainer.timeouts.mirror_s": "read where a run is copied to shared storage",
    "trainer.timeouts.ray_start_s": "read where Ray is started",
    "trainer.timeouts.worker_start_s": "read where worker processes are started",
    "trainer.timeouts.rollout_restart_s": "read where worker processes are started",
    "trainer.placement.pools": "read where worker processes are placed",
    "trainer.balance_batch": "read where rows are shared out to ranks",
    "*.fsdp_config.offload_policy": "read where a model is sharded over ranks",
    "*.model.gradient_checkpointing_every_n_layers": "read with gradient checkpointing",
    "*.fsdp_config.reshard_after_forward": "read where a model is sharded over ranks",
    "*.fsdp_config.fsdp_size": "read where a model is sharded over ranks",
    "*.fsdp_config.pipeline_schedule": "read where a model is sharded over ranks",
    "trainer.tracking.*": "read from the stored configuration, also by `runs sync`",
    "trainer.log_val_generations": "likewise",
    "trainer.profile.*": "read where traces are recorded",
    "trainer.notify_on": "read where receivers of notices are named",
    "trainer.max_skipped_updates": "read when an update was skipped",
    "trainer.resume_from_path": "read when a run starts from another run's state",
    "trainer.checkpoint.load_contents": "read by the command `resume`",
    "trainer.price_per_hour": "read by lists of runs",
    "trainer.resume_mode": "read by the command `train`",
    "*.rollout.multi_turn.m*": "read by episodes",
    "*.rollout.multi_turn.[!e]*": "read by episodes",
    "*.rollout.agent.*": "read by episodes",
    "reward.judge.rollout.*": "read where the engines of the run's own judge are started",
    "reward.reward_model.*": "read by the reward model, and where one is trained",
    "trainer.placement.reward": "likewise",
    "data.response_key": "read by supervised fine-tuning",
    "data.chosen_key": "read by algorithms that learn from pairs",
    "data.rejected_key": "likewise",
    "*.checkpoint_engine.update_weights_bucket_megabytes": "read by the weight sync",
    "*.checkpoint_engine.only_changes": "likewise",
    "*.checkpoint_engine.backend": "likewise",
    "*.rollout.gpu_memory_utilization": "read by other engines; reported as unused with hf",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "likewise",
    "actor_rollout_ref.rollout.enforce_eager": "likewise",
    "actor_rollout_ref.rollout.free_cache_engine": "likewise",
}

# Patterns of keys that depend on a key with its default value here.
DEPENDENT = {
    "*.model.lora_alpha": "lora_rank",
    "*.model.target_modules": "lora_rank",
    "*.model.use_rslora": "lora_rank",
    "*.model.use_dora": "lora_rank",
    "*.rollout.lora_merge": "lora_rank",
}


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collect the dotted keys that are read from any configuration within the block."""
    read: set[str] = set()
    places: dict[int, tuple[Any, str]] = {}  # keeps the section alive, so that its id is unique

    def place(section: Section) -> str:
        return "" if isinstance(section, Config) else places.get(id(section), (None, "?."))[1]

    def get(self: Section, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in type(self).model_fields:
            key = f"{place(self)}{name}"
            if isinstance(value, Section):
                places[id(value)] = (value, f"{key}.")
            else:
                read.add(key)
        elif name == "model_dump":
            read.update(f"{place(self)}{field}" for field in type(self).model_fields)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(Section, "__getattribute__", get, raising=False)
        yield read


@pytest.mark.plugin(*FOLDERS)
def test_a_run_reads_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlctl.runtime.launch import train
    from rlctl.runtime.planning.plan import make_plan

    write_tiny_model(tmp_path / "model")
    training, validation = train_and_validation(16, 4, seed=1, level=1, careless=0.0)
    write_rows(tmp_path / "train.parquet", training)
    write_rows(tmp_path / "val.parquet", validation)
    monkeypatch.chdir(tmp_path)
    small = [
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "data.max_prompt_length=160",
        "data.max_response_length=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.model.path=model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "algorithm.use_kl_in_reward=true",
        "algorithm.overlong_buffer.enable=true",
        "algorithm.overlong_buffer.len=2",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "trainer.num_threads=1",
        "reward.functions=[gsm8k]",
    ]
    variant = [
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "data.max_prompt_length=20",
        "data.filter_overlong_prompts=false",
        "data.truncation=left",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
        "reward.custom_reward_function.path=score.py",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.filter_groups.enable=true",
        "algorithm.use_pf_ppo=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    ]
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(map(ord, solution_str)) % 7\n"
    )
    with recorded(monkeypatch) as read:
        for overrides in (small, [*small, *variant]):
            train(make_plan(compose("ppo_trainer", overrides), inline=True))
    keys = [key.name for key in schema_keys().values() if key.kind != "section"]
    unread = {
        key
        for key in keys
        if key not in read
        and not any(fnmatchcase(key, pattern) for pattern in (*ELSEWHERE, *DEPENDENT))
    }
    assert unread == set()
