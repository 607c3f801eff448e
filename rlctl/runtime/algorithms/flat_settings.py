"""Settings of plug-ins that are still flat keys of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl import plugins
from rlctl.recipes import schema


def estimator_settings(config: schema.Algorithm) -> Mapping[str, Any]:
    """Return the settings of the advantage estimator."""
    flat = {
        "reward_keys": config.gdpo_reward_keys,
        "reward_weights": config.gdpo_reward_weights,
    }
    plugin = plugins.load("advantages", config.adv_estimator)
    return _known(plugin, flat) | config.adv_estimator_params


def policy_loss_settings(config: schema.Actor) -> Mapping[str, Any]:
    """Return the settings of the policy loss."""
    loss = config.policy_loss
    flat = {
        "tau_pos": config.tau_pos,
        "tau_neg": config.tau_neg,
        "clip_cov_ratio": loss.clip_cov_ratio,
        "clip_cov_lb": loss.clip_cov_lb,
        "clip_cov_ub": loss.clip_cov_ub,
        "kl_cov_ratio": loss.kl_cov_ratio,
        "ppo_kl_coef": loss.ppo_kl_coef,
        "beta": loss.dro_beta,
    }
    return _known(plugins.load("policy_losses", loss.loss_mode), flat) | loss.params


def _known(plugin: Any, flat: Mapping[str, Any]) -> dict[str, Any]:
    model = plugins.params_model(plugin)
    known = model.model_fields if model else ()
    return {name: value for name, value in flat.items() if name in known}
