"""No silent no-ops: which keys have no effect in a configuration, and why. A key that depends on another adds a line to the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rlctl.errors import Problem, raise_problems
from rlctl.recipes.layers import Origin, Recipe
from rlctl.recipes.validate import lookup


@dataclass(frozen=True, slots=True)
class UnusedKey:
    """A key that was set and does nothing: `reason` names the setting that makes it so."""

    key: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} has no effect: {self.reason}"


@dataclass(frozen=True, slots=True)
class Rule:
    """`keys` (patterns) do nothing where every one of `causes` holds for the value of its key, and the keys of `alike` have the same."""

    keys: tuple[str, ...]
    causes: tuple[tuple[str, Callable[[Any], bool]], ...]
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleRule:
    """`keys` (patterns) do nothing where the algorithm builds no such role; `causes` are the keys on which that hangs."""

    keys: tuple[str, ...]
    role: str
    causes: tuple[str, ...]


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda given: given in values


def _is_not(*values: Any) -> Callable[[Any], bool]:
    return lambda given: given not in values


def _positive(given: Any) -> bool:
    return given > 0


def _other_than(name: str) -> Callable[[Any], bool]:
    """Whether a part of ours with another name was chosen: a plug-in, `module:name`, may read whatever it likes."""
    return lambda given: given != name and ":" not in given


def _names_a_server(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether the engine is a server that somebody else has started, with settings of its own."""
    return engine_kwargs.get("url") is not None


_ACTOR, _ROLLOUT, _REF = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
)
_ENGINE_DEVICE = tuple(
    f"{_ROLLOUT}.{key}"
    for key in ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager")
)


def _trained(model: str, section: str) -> Iterator[Rule]:
    """The rules that hold for the actor and for the critic alike."""
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
        (f"{model}.lora_alpha", f"{model}.target_modules"), ((f"{model}.lora_rank", _is(0)),)
    )


RULES: tuple[Rule, ...] = (
    *_trained("actor_rollout_ref.model", _ACTOR),
    *_trained("critic.model", "critic"),
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
    *(
        Rule(keys, ((f"{_ACTOR}.policy_loss.loss_mode", _other_than(loss)),))
        for loss, keys in {
            "sapo": (f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg"),
            "clip_cov": (f"{_ACTOR}.policy_loss.clip_cov_*",),
            "kl_cov": (f"{_ACTOR}.policy_loss.kl_cov_ratio", f"{_ACTOR}.policy_loss.ppo_kl_coef"),
            "dro": (f"{_ACTOR}.policy_loss.dro_beta",),
        }.items()
    ),
    Rule(("algorithm.gdpo_*",), (("algorithm.adv_estimator", _other_than("gdpo")),)),
    # rollout and log-probs
    Rule(
        (
            f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            f"{_REF}.log_prob_micro_batch_size_per_gpu",
        ),
        ((f"{_ACTOR}.use_dynamic_bsz", _is(True)),),
    ),
    # with adapters the actor's base is the reference, and its log-probs are computed as the actor's are
    Rule(
        (f"{_REF}.*",),
        (("actor_rollout_ref.model.lora_rank", _positive),),
        ("trainer.placement.actor", "trainer.placement.reference"),
    ),
    Rule((f"{_ROLLOUT}.free_cache_engine",), (("trainer.placement.rollout", _is_not(None)),)),
    Rule((*_ENGINE_DEVICE, f"{_ROLLOUT}.free_cache_engine"), ((f"{_ROLLOUT}.name", _is("hf")),)),
    Rule(
        _ENGINE_DEVICE,
        ((f"{_ROLLOUT}.name", _is("sglang")), (f"{_ROLLOUT}.engine_kwargs", _names_a_server)),
    ),
    Rule(
        (f"{_ROLLOUT}.enforce_eager", f"{_ROLLOUT}.free_cache_engine"),
        ((f"{_ROLLOUT}.name", _is("vllm")), ("trainer.device", _is("cpu"))),
    ),
    Rule(("trainer.timeouts.rollout_restart_s",), (("trainer.placement.rollout", _is(None)),)),
    Rule(
        (f"{_ROLLOUT}.mode",),
        ((f"{_ROLLOUT}.mode", _is("async")), ("trainer.placement.rollout", _is(None))),
    ),
    Rule((f"{_ROLLOUT}.checkpoint_engine.*",), (("trainer.placement.rollout", _is(None)),)),
    Rule((f"{_ROLLOUT}.multi_turn.[!e]*",), ((f"{_ROLLOUT}.multi_turn.enable", _is(False)),)),
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
        ("algorithm.rollout_correction.rollout_is_threshold",),
        (("algorithm.rollout_correction.rollout_is", _is(None)),),
    ),
    Rule(
        ("algorithm.rollout_correction.rollout_rs_threshold",),
        (("algorithm.rollout_correction.rollout_rs", _is(None)),),
    ),
    Rule(
        ("algorithm.rollout_correction.*", "trainer.mismatch.*"), (("algorithm.name", _is("sft")),)
    ),
    # reward
    Rule(
        ("reward.functions", "reward.weights", "reward.gsm8k.*"),
        (("reward.custom_reward_function.path", _is_not(None)),),
    ),
    Rule(
        ("reward.custom_reward_function.name", "reward.custom_reward_function.reward_kwargs*"),
        (("reward.custom_reward_function.path", _is(None)),),
    ),
    Rule(("reward.reward_model.path",), (("reward.reward_model.enable", _is(False)),)),
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
        ("critic.*", "trainer.critic_warmup", "trainer.placement.critic", "algorithm.lam"),
        "critic",
        ("algorithm.name", "algorithm.adv_estimator"),
    ),
    RoleRule(
        (f"{_REF}.*", "trainer.placement.reference"),
        "reference",
        ("algorithm.name", "algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss"),
    ),
)


def report_unused_keys(recipe: Recipe, roles: Collection[str] | None, *, strict: bool) -> list[str]:
    """One line for each key that was set and has no effect. Raises ConfigError with all of them when `strict`."""
    idle = unused_keys(recipe.container, recipe.origins, roles)
    if strict:
        raise_problems(
            [Problem(str(each), each.where, "take it out, or leave out --strict") for each in idle]
        )
    return [str(each) for each in idle]


def unused_keys(
    container: Mapping[str, Any],
    origins: Mapping[str, Sequence[Origin]],
    roles: Collection[str] | None = None,
) -> list[UnusedKey]:
    """The keys that a recipe or the command line set and that have no effect, with the reason.

    A switch on the command line may well idle what a recipe set for the case that it is on: that is not reported. `roles` are the roles
    that the algorithm builds beside actor and reward (`critic`, `reference`); None where that is not known: then nothing is said of them.
    """
    found: list[UnusedKey] = []
    for key, chain in origins.items():
        setting = chain[-1]
        if setting.level == 1:
            continue
        for causes, reason in _verdicts(key, container, origins, roles):
            if setting.level >= max(_level(cause, origins) for cause in causes):
                found.append(UnusedKey(key, setting.where, reason))
                break
    return found


def _verdicts(
    key: str,
    container: Mapping[str, Any],
    origins: Mapping[str, Sequence[Origin]],
    roles: Collection[str] | None,
) -> Iterator[tuple[Sequence[str], str]]:
    """Every reason why a key has no effect, with the keys that are the cause."""
    for rule in ROLE_RULES if roles is not None else ():
        if rule.role not in (roles or ()) and _matches(key, rule.keys):
            named = [
                _says(cause, container, origins)
                for cause in rule.causes
                if lookup(container, cause) is not True
            ]
            yield rule.causes, f"no {rule.role} is built ({', '.join(named)})"
    for rule in RULES:
        holding = all(holds(lookup(container, cause)) for cause, holds in rule.causes)
        if (
            _matches(key, rule.keys)
            and holding
            and len({lookup(container, other) for other in rule.alike}) < 2
        ):
            causes = [*(cause for cause, _ in rule.causes), *rule.alike]
            yield causes, " and ".join(_says(cause, container, origins) for cause in causes)


def _says(cause: str, container: Mapping[str, Any], origins: Mapping[str, Sequence[Origin]]) -> str:
    """`algorithm.use_kl_in_reward is false`, with the place where that was set, if it was."""
    value = lookup(container, cause)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    place = f" ({origins[cause][-1].where})" if _level(cause, origins) > 1 else ""
    return f"{cause} is {text}{place}"


def _level(key: str, origins: Mapping[str, Sequence[Origin]]) -> int:
    chain = origins.get(key, ())
    return chain[-1].level if chain else 1


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
