"""Table of keys that have no effect because of other keys, or because a role is not built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlctl.recipes.roles import CRITIC, REFERENCE, REWARD_LEARNER, REWARD_MODEL, Role


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns of keys without effect if every condition holds.

    `causes` are conditions on the values of keys. The keys of each of `alike` have equal values.
    """

    keys: tuple[str, ...]
    causes: tuple[tuple[str, Callable[[Any], bool]], ...]
    alike: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Patterns of keys without effect if a role is not built.

    `causes` are the keys that decide about the role.
    """

    role: Role
    causes: tuple[str, ...]
    further_keys: tuple[str, ...] = ()
    owns_section: bool = True  # False: another role uses the section, too

    @property
    def keys(self) -> tuple[str, ...]:
        """Patterns of the role's own section, its placement, and `further_keys`."""
        if not self.owns_section:
            return self.further_keys
        placement = f"trainer.placement.{self.role.pool_key}"
        return (f"{self.role.section}.*", placement, *self.further_keys)


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda given: given in values


def _is_not(*values: Any) -> Callable[[Any], bool]:
    return lambda given: given not in values


def _positive(given: Any) -> bool:
    return given > 0


_ACTOR, _ROLLOUT, _REF = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
)
_CORRECTION = "algorithm.rollout_correction"


def _trained(model: str, section: str) -> Iterator[Rule]:
    """Yield the rules shared by actor and critic."""
    yield Rule((f"{section}.data_loader_seed",), ((f"{section}.shuffle", _is(False)),))
    yield Rule(
        (f"{section}.ppo_micro_batch_size_per_gpu",), ((f"{section}.use_dynamic_bsz", _is(True)),)
    )
    by_rows = (
        (f"{section}.use_dynamic_bsz", _is(False)),
        (f"{section}.ppo_micro_batch_size_per_gpu", _is_not(None)),
    )
    yield Rule((f"{section}.ppo_max_token_len_per_gpu",), by_rows)
    yield Rule(
        (f"{section}.optim.lr_warmup_steps_ratio",),
        ((f"{section}.optim.lr_warmup_steps", _positive),),
    )
    yield Rule(
        (f"{section}.optim.min_lr_ratio",),
        ((f"{section}.optim.lr_scheduler_type", _is("constant")),),
    )
    yield Rule(
        (f"{section}.optim.num_cycles",),
        ((f"{section}.optim.lr_scheduler_type", _is_not("cosine")),),
    )
    yield Rule(
        (f"{model}.gradient_checkpointing_every_n_layers",),
        ((f"{model}.enable_gradient_checkpointing", _is(False)),),
    )
    yield Rule(
        tuple(
            f"{model}.{key}"
            for key in ("lora_alpha", "target_modules", "use_rslora", "use_dora", "load_in_4bit")
        ),
        ((f"{model}.lora_rank", _is(0)),),
    )


RULES: tuple[Rule, ...] = (
    *_trained("actor_rollout_ref.model", _ACTOR),
    *_trained(CRITIC.model_key, CRITIC.section),
    # lengths, order, validation
    Rule(("data.truncation",), (("data.filter_overlong_prompts", _is(True)),)),
    Rule(("data.seed",), (("data.shuffle", _is(False)),)),
    Rule(
        (
            "data.val_batch_size",
            "data.val_max_samples",
            "trainer.test_freq",
            "trainer.log_val_generations",
            f"{_ROLLOUT}.val_kwargs.*",
        ),
        (("data.val_files", _is(None)),),
    ),
    Rule(
        tuple(f"{_ROLLOUT}.val_kwargs.{key}" for key in ("temperature", "top_p", "top_k")),
        ((f"{_ROLLOUT}.val_kwargs.do_sample", _is(False)),),
    ),
    # the policy's loss
    Rule(
        (f"{_ACTOR}.clip_ratio",),
        ((f"{_ACTOR}.clip_ratio_low", _is_not(None)), (f"{_ACTOR}.clip_ratio_high", _is_not(None))),
    ),
    Rule(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        ((f"{_ACTOR}.use_kl_loss", _is(False)),),
    ),
    Rule(
        (f"{_ACTOR}.loss_scale_factor",),
        ((f"{_ACTOR}.loss_agg_mode", _is_not("seq-mean-token-sum-norm")),),
    ),
    # rollout and log-probs
    *(
        Rule(
            (f"{section}.log_prob_micro_batch_size_per_gpu",),
            ((f"{section}.log_prob_use_dynamic_bsz", _is(True)),),
        )
        for section in (_ROLLOUT, _REF)
    ),
    # with adapters, the actor's base model is the reference
    Rule(
        (f"{_REF}.*",),
        (("actor_rollout_ref.model.lora_rank", _positive),),
        (
            ("trainer.placement.actor", "trainer.placement.reference"),
            ("actor_rollout_ref.model.path", f"{_REF}.model.path"),
        ),
    ),
    Rule((f"{_ROLLOUT}.free_cache_engine",), (("trainer.placement.rollout", _is_not(None)),)),
    Rule(("trainer.timeouts.rollout_restart_s",), (("trainer.placement.rollout", _is(None)),)),
    Rule(
        (f"{_ROLLOUT}.mode",),
        ((f"{_ROLLOUT}.mode", _is("async")), ("trainer.placement.rollout", _is(None))),
    ),
    Rule((f"{_ROLLOUT}.mode",), ((f"{_ROLLOUT}.multi_turn.enable", _is(True)),)),
    Rule((f"{_ROLLOUT}.lora_merge",), (("actor_rollout_ref.model.lora_rank", _is(0)),)),
    Rule((f"{_ROLLOUT}.lora_merge",), (("actor_rollout_ref.model.use_dora", _is(True)),)),
    Rule((f"{_ROLLOUT}.checkpoint_engine.*",), (("trainer.placement.rollout", _is(None)),)),
    Rule(
        (f"{_ROLLOUT}.multi_turn.[!e]*", f"{_ROLLOUT}.agent.*"),
        ((f"{_ROLLOUT}.multi_turn.enable", _is(False)),),
    ),
    # algorithm
    Rule(
        ("algorithm.kl_ctrl.*", "algorithm.kl_penalty"),
        (("algorithm.use_kl_in_reward", _is(False)),),
    ),
    Rule(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        (("algorithm.kl_ctrl.type", _is("fixed")),),
    ),
    Rule(("algorithm.filter_groups.m*",), (("algorithm.filter_groups.enable", _is(False)),)),
    Rule(
        ("algorithm.overlong_buffer.len", "algorithm.overlong_buffer.penalty_factor"),
        (("algorithm.overlong_buffer.enable", _is(False)),),
    ),
    Rule(
        (f"{_CORRECTION}.rollout_is_threshold", f"{_CORRECTION}.rollout_is_batch_normalize"),
        ((f"{_CORRECTION}.rollout_is", _is(None)),),
    ),
    Rule((f"{_CORRECTION}.loss_type",), ((f"{_CORRECTION}.bypass_mode", _is(False)),)),
    Rule(
        (f"{_CORRECTION}.rollout_is_batch_normalize",),
        (
            (f"{_CORRECTION}.bypass_mode", _is(True)),
            (f"{_CORRECTION}.loss_type", _is("ppo_clip")),
        ),
    ),
    Rule(("data.gen_batch_size",), (("algorithm.filter_groups.enable", _is(False)),)),
    Rule(("algorithm.pf_ppo.*",), (("algorithm.use_pf_ppo", _is(False)),)),
    Rule(
        (f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.policy_loss.params*"),
        (
            (f"{_CORRECTION}.bypass_mode", _is(True)),
            (f"{_CORRECTION}.loss_type", _is("reinforce")),
        ),
    ),
    Rule(("trainer.mismatch.halt",), ((f"{_CORRECTION}.bypass_mode", _is(True)),)),
    Rule(("trainer.mismatch.*",), (("async_training.max_staleness", _positive),)),
    Rule(
        (f"{_CORRECTION}.rollout_rs_threshold*",),
        ((f"{_CORRECTION}.rollout_rs", _is(None)),),
    ),
    # reward
    Rule(
        ("reward.functions", "reward.weights", "reward.params*"),
        (("reward.custom_reward_function.path", _is_not(None)),),
    ),
    Rule(("reward.weights",), (("reward.functions", _is(None)),)),
    Rule(
        ("reward.custom_reward_function.name", "reward.custom_reward_function.reward_kwargs*"),
        (("reward.custom_reward_function.path", _is(None)),),
    ),
    Rule(
        (f"{REWARD_MODEL.section}.[!e]*", f"trainer.placement.{REWARD_MODEL.pool_key}"),
        ((f"{REWARD_MODEL.enabled_by}", _is(False)),),
    ),
    Rule(
        (f"{REWARD_MODEL.max_rows_key}",),
        ((f"{REWARD_MODEL.dynamic_bsz_key}", _is(True)),),
    ),
    # trainer and Ray
    Rule(("trainer.alarms.validation_falls",), (("data.val_files", _is(None)),)),
    Rule(("trainer.total_epochs",), (("trainer.total_training_steps", _is_not(None)),)),
    Rule(
        ("trainer.keep_best.mode", "trainer.keep_best.k"),
        (("trainer.keep_best.metric", _is(None)),),
    ),
    Rule(
        ("trainer.max_ckpt_to_keep", "trainer.keep_best.metric"), (("trainer.save_freq", _is(-1)),)
    ),
    Rule(("trainer.keep_best.*",), (("trainer.max_ckpt_to_keep", _is(None)),)),
    Rule(("trainer.timeouts.mirror_s",), (("trainer.mirror", _is(None)),)),
    Rule(
        ("trainer.resume_mode",),
        (("trainer.resume_mode", _is("auto")), ("trainer.experiment_name", _is(None))),
    ),
    Rule(("trainer.resume_from_path",), (("trainer.resume_mode", _is_not("resume_path")),)),
    Rule(
        tuple(
            f"ray_kwargs.ray_init.{key}"
            for key in ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard")
        ),
        (("ray_kwargs.ray_init.address", _is_not(None)),),
    ),
)

ROLE_RULES: tuple[RoleRule, ...] = (
    RoleRule(
        CRITIC,
        ("algorithm.name", "algorithm.adv_estimator"),
        ("trainer.critic_warmup", "algorithm.lam"),
    ),
    RoleRule(
        REWARD_LEARNER,
        ("algorithm.name",),
        tuple(
            f"{REWARD_MODEL.section}.{key}"
            for key in ("optim.*", "ppo_mini_batch_size", "grad_clip", "model.lora_*")
        ),
        owns_section=False,
    ),
    RoleRule(
        REFERENCE,
        ("algorithm.name", "algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss"),
    ),
)
