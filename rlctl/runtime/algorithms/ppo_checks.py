"""Checks of settings of the PPO family that depend on the advantage estimator."""

from __future__ import annotations

from rlctl.errors import ConfigError
from rlctl.log import warn_once
from rlctl.recipes import schema
from rlctl.runtime.algorithms.advantages.base import Estimator
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.algorithms.correction import Correction
from rlctl.runtime.algorithms.policy_losses.base import TokenLoss


def check_settings(
    config: schema.Config, estimator: Estimator, policy_loss: TokenLoss, correction: Correction
) -> None:
    """Raise ConfigError for settings that contradict each other."""
    algorithm = config.algorithm
    rollout = config.actor_rollout_ref.rollout
    _check_group_size(algorithm, estimator, rollout.n)
    _check_program(rollout, estimator)
    _check_bypass(algorithm, estimator, correction)
    _check_aggregation(config.actor_rollout_ref.actor, policy_loss, correction)
    _check_anchor(config.async_training, algorithm.rollout_correction)
    if correction.interpolate:
        _check_interpolation(config.async_training, correction)


def _check_aggregation(actor: schema.Actor, policy_loss: TokenLoss, correction: Correction) -> None:
    """Warn of an aggregation that the loss was not published with.

    Raises ConfigError if the update would need the number of tokens that it will reject itself.
    """
    name = actor.policy_loss.loss_mode
    mode = actor.loss_agg_mode
    where = f"actor_rollout_ref.actor.loss_agg_mode={mode}"
    if policy_loss.advised not in (None, mode):
        warn_once(
            f"loss_mode={name} was published with loss_agg_mode={policy_loss.advised}, and {where} "
            "trains another loss, as in verl"
        )
    if correction.bypass and correction.rejects and policy_loss.aggregates_apart(actor):
        raise ConfigError(
            f"loss_mode={name} has a special aggregation, and the other terms of the loss "
            "cannot have another one if tokens are rejected in bypass mode",
            where=where,
            hint=f"actor_rollout_ref.actor.loss_agg_mode={policy_loss.aggregation}",
        )


def _check_bypass(
    algorithm: schema.Algorithm, estimator: Estimator, correction: Correction
) -> None:
    """Raise ConfigError if bypass mode skips log-probs that the estimator needs."""
    if correction.bypass and Needs.SUM_PI_SQUARED in estimator.needs:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs the probabilities of the "
            "trainer, which bypass_mode does not compute",
            where="algorithm.rollout_correction",
            hint="algorithm.rollout_correction.bypass_mode=false",
        )


def _check_anchor(asynchronous: schema.AsyncTraining, correction: schema.RolloutCorrection) -> None:
    """Raise ConfigError if stale rollouts have no policy that the update is compared with."""
    bypass = correction.bypass_mode is True or None
    chosen = (correction.rollout_is, correction.rollout_rs, bypass)
    if asynchronous.max_staleness and not any(chosen):
        raise ConfigError(
            "an older policy generates the rollouts, and no correction for it is chosen",
            where=f"async_training.max_staleness={asynchronous.max_staleness}",
            hint="algorithm.rollout_correction.rollout_is=token weighs each token by the ratio of "
            "the policies before the update (decoupled PPO), "
            "algorithm.rollout_correction.bypass_mode=loglinear beside it approximates that ratio "
            "without another pass, or algorithm.rollout_correction.bypass_mode=true clips "
            "against the older policy",
        )


def _check_interpolation(asynchronous: schema.AsyncTraining, correction: Correction) -> None:
    """Raise ConfigError if the interpolated policy contradicts another setting."""
    where = "algorithm.rollout_correction.bypass_mode=loglinear"
    if not asynchronous.max_staleness:
        raise ConfigError(
            "bypass_mode=loglinear interpolates from older weights to the newest, and "
            "async_training.max_staleness=0 generates all rollouts under the newest",
            where=where,
            hint="algorithm.rollout_correction.bypass_mode=true",
        )
    if correction.reinforce:
        raise ConfigError(
            "loss_type=reinforce has no proximal policy to interpolate",
            where=where,
            hint="algorithm.rollout_correction.loss_type=ppo_clip",
        )
    if correction.level is not None and correction.batch_normalize:
        raise ConfigError(
            "rollout_is_batch_normalize needs the weights of all rows before the update, which "
            "bypass_mode=loglinear does not compute",
            where=where,
            hint="algorithm.rollout_correction.rollout_is_batch_normalize=false",
        )


def _check_group_size(algorithm: schema.Algorithm, estimator: Estimator, n: int) -> None:
    """Raise ConfigError if dynamic sampling is on and `rollout.n` is 1.

    An estimator that compares responses takes the score of a single one as its advantage, as in
    verl; this is only reported.
    """
    hint = "actor_rollout_ref.rollout.n=8"
    if n > 1:
        return
    if algorithm.filter_groups.enable:
        raise ConfigError(
            "algorithm.filter_groups.enable=true compares the responses to one prompt, but "
            f"rollout.n is {n}",
            hint=hint,
        )
    if Needs.COMPARISON in estimator.needs:
        warn_once(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one "
            f"prompt, but rollout.n is {n}: advantages are the scores; {hint} gives groups",
        )


def _check_program(rollout: schema.Rollout, estimator: Estimator) -> None:
    """Raise ConfigError if an agent program, with any number of rows, needs a row per response."""
    if rollout.agent.program is not None and Needs.GREEDY_BASELINE in estimator.needs:
        raise ConfigError(
            "an advantage estimator with a greedy baseline needs one row for each response, but an "
            "episode of an agent program may have several",
            where=f"actor_rollout_ref.rollout.agent.program={rollout.agent.program}",
            hint="algorithm.adv_estimator=rloo",
        )
