"""Checks of settings of the PPO family that depend on the advantage estimator."""

from __future__ import annotations

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.algorithms.advantages.base import Estimator
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.algorithms.correction import Correction


def check_bypass(algorithm: schema.Algorithm, estimator: Estimator, correction: Correction) -> None:
    """Raise ConfigError if bypass mode skips log-probs that the estimator needs."""
    if correction.bypass and Needs.SUM_PI_SQUARED in estimator.needs:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs the probabilities of the "
            "trainer, which bypass_mode does not compute",
            where="algorithm.rollout_correction",
            hint="algorithm.rollout_correction.bypass_mode=false",
        )


def check_group_size(algorithm: schema.Algorithm, estimator: Estimator, n: int) -> None:
    """Raise ConfigError if responses to one prompt are compared and `rollout.n` is 1."""
    compares = {
        "algorithm.filter_groups.enable=true": algorithm.filter_groups.enable,
        f"algorithm.adv_estimator={algorithm.adv_estimator}": Needs.COMPARISON in estimator.needs,
    }
    raise_problems(
        [
            Problem(
                f"{setting} compares the responses to one prompt, but rollout.n is {n}",
                hint="actor_rollout_ref.rollout.n=8",
            )
            for setting, does in compares.items()
            if does and n < 2
        ]
    )
