"""Keys of the PPO family without effect are reported, and no others: by computing losses.

For each estimator and policy loss, each key is changed in turn. If neither the losses and gradients
of a fixed batch nor any metric changes, the report has to name the key. If a loss or a gradient
changes, it must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import pytest
import torch

from rlctl.plugins import names
from rlctl.recipes.compose import compose
from rlctl.recipes.layers import Origin
from rlctl.recipes.role_table import needed_roles
from rlctl.recipes.schema import Config
from rlctl.recipes.unused_keys import unused_keys
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.base.batch import LogProbs, Ragged, Scored
from rlctl.runtime.base.ops import PolicyOutputs
from tests.plugin_folders import is_there

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ESTIMATORS, LOSSES = names("advantages"), names("policy_losses")
BASE = {
    "data.max_response_length": 12,
    "actor_rollout_ref.rollout.n": 4,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": None,
    f"{ACTOR}.clip_ratio_high": None,
    f"{ACTOR}.clip_ratio_c": 3.0,
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.8,
}
# Keys and other values than those of any variant.
CHANGES: dict[str, Any] = {
    "algorithm.gamma": 0.5,
    "algorithm.lam": 0.3,
    "algorithm.norm_adv_by_std_in_grpo": False,
    "algorithm.kl_penalty": "abs",
    "algorithm.kl_ctrl.kl_coef": 0.7,
    "algorithm.kl_ctrl.target_kl": 1e-4,
    "algorithm.kl_ctrl.horizon": 7,
    "algorithm.overlong_buffer.len": 5,
    "algorithm.overlong_buffer.penalty_factor": 0.3,
    f"{CORRECTION}.rollout_is_threshold": 1.1,
    f"{CORRECTION}.rollout_is_batch_normalize": True,
    f"{CORRECTION}.rollout_rs_threshold": 1.4,
    f"{CORRECTION}.rollout_rs_threshold_lower": 0.9,
    f"{CORRECTION}.loss_type": "reinforce",
    f"{ACTOR}.clip_ratio": 0.05,
    f"{ACTOR}.clip_ratio_low": 0.01,
    f"{ACTOR}.clip_ratio_high": 0.02,
    f"{ACTOR}.clip_ratio_c": 1.2,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum",
    f"{ACTOR}.loss_scale_factor": 7.0,
    f"{ACTOR}.kl_loss_coef": 0.6,
    f"{ACTOR}.kl_loss_type": "abs",
    "critic.cliprange_value": 0.01,
    "critic.loss_agg_mode": "seq-mean-token-sum",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "terms": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.1},
    "scaled": {
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.28,
    },
    "corrected": {
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_rs": "token_k1",
        f"{CORRECTION}.rollout_rs_threshold": 2.0,
    },
    "in the reward": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.overlong_buffer.enable": True,
        "algorithm.overlong_buffer.len": 8,
    },
    "bypass": {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"},
    "reinforce": {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.loss_type": "reinforce",
        f"{CORRECTION}.rollout_is": "token",
    },
}
OWN = [key for key in CHANGES if ".clip_" in key or "loss_" in key or key.count(".") == 1]
OTHER_LOSS = "sapo" if is_there("objectives") else "gpg"
PAIRS = {
    # All pairs where keys of both matter, else each plug-in once.
    "plain": [(one, other) for one in ESTIMATORS for other in LOSSES],
    "terms": [("gae", other) for other in LOSSES] + [(one, OTHER_LOSS) for one in ESTIMATORS],
}
# Bounds that matter for negative advantages, which one estimator has none of.
NEVER_NEGATIVE, OF_NEGATIVE = "grpo_passk", (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_c")
EACH = [("grpo", other) for other in LOSSES] + [(one, "vanilla") for one in ESTIMATORS]


@pytest.fixture(scope="module")
def base() -> Config:
    composed = compose("ppo_trainer", ["data.train_files=[t]", "actor_rollout_ref.model.path=m"])
    return changed(composed.config, BASE)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    for key, value in values.items():
        config = config.replaced(key, value)
    return config


def ragged_rows() -> tuple[Scored, LogProbs, LogProbs, Ragged, PolicyOutputs]:
    """Return 8 rows of two prompts, far off policy, so that each clip and bound is reached."""
    draw = torch.Generator().manual_seed(2)
    lengths = torch.tensor([12, 3, 9, 7, 12, 5, 1, 8])
    total = int(lengths.sum())

    def tokens(scale: float, shift: float = 0.0) -> Ragged:
        return Ragged(torch.randn(total, generator=draw) * scale + shift, lengths)

    mask = Ragged((torch.rand(total, generator=draw) < 0.8).float(), lengths)
    mask.values[lengths.cumsum(0) - 1] = 1.0
    old = tokens(0.5, -2.0)
    now = old.values + 1.2 * torch.randn(total, generator=draw)
    scored = Scored(
        prompt_ids=Ragged.from_rows([[1]] * 8, dtype=torch.int64),
        group=torch.arange(8) // 4,
        rows=[],
        response_ids=old.like(torch.ones(total, dtype=torch.int64)),
        response_mask=mask,
        rollout_log_probs=old.like(old.values + 0.6 * torch.randn(total, generator=draw)),
        finish=["stop"] * 8,
        scores=torch.randn(8, generator=draw).abs(),
        components={"a": torch.randn(8, generator=draw), "b": torch.rand(8, generator=draw)},
        failed=torch.zeros(8, dtype=torch.bool),
        greedy_scores=torch.randn(8, generator=draw),
    )
    entropy = tokens(0.2, 2.0)
    squares = old.like(torch.rand(total, generator=draw) * 0.5)
    ref = LogProbs(old.like(old.values + 0.3 * torch.randn(total, generator=draw)), None)
    return (
        scored,
        LogProbs(old, entropy, squares),
        ref,
        tokens(1.0),
        PolicyOutputs(now, entropy.values),
    )


ROWS = ragged_rows()


def numbers(config: Config) -> Iterator[torch.Tensor]:
    """Yield the losses and gradients of an update, and all metrics at the end."""
    scored, old, ref, values, outputs = ROWS
    algorithm = PPO.from_config(config, num_steps=3)
    if algorithm.correction.bypass:
        old = LogProbs(scored.rollout_log_probs, None, old.sum_pi_squared)
    experience, metrics = algorithm.compute_advantages(scored, old, ref, values)
    now = outputs.log_probs.clone().requires_grad_()
    torch.manual_seed(0)  # of Clip-Cov
    losses = [(now, algorithm.loss(PolicyOutputs(now, outputs.entropy), experience))]
    if Needs.CRITIC in algorithm.needs:
        predicted = (values.values + outputs.log_probs - outputs.log_probs.mean()).requires_grad_()
        losses.append((predicted, algorithm.value_loss(predicted, experience)))
    for leaf, loss in losses:
        total = loss.total / (loss.count or 1.0)
        (gradient,) = torch.autograd.grad(total, leaf)
        yield total.detach()[None]
        yield gradient
        metrics = metrics | loss.metrics
    if config.algorithm.use_kl_in_reward:
        yield torch.tensor(algorithm.kl.coef)[None]  # of the next step
    reported = {name: metric.value for name, metric in metrics.items()}
    yield torch.tensor([reported[name] for name in sorted(reported)])


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(before, after, strict=True)
    )


def other(config: Config, key: str) -> Config:
    """Return the configuration with another value of `key`."""
    value = CHANGES[key]
    if attrgetter(key)(config) == value:
        value = "ppo_clip"
    return config.replaced(key, value)


def reported(config: Config) -> set[str]:
    """Return which keys of CHANGES the report names if the command line sets all of them."""
    needs = PPO.from_config(config, num_steps=3).needs
    roles = {role.name for role in needed_roles(config, needs)}
    origins = {key: [Origin(None, "base", 1), Origin(0, "override", 3)] for key in CHANGES}
    return {found.key for found in unused_keys(config.model_dump(mode="json"), origins, roles)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_exactly_the_keys_without_effect_are_reported(base: Config, variant: str) -> None:
    wrong = []
    for estimator, loss in PAIRS.get(variant, EACH):
        if variant in ("bypass", "reinforce") and "token_baseline" in estimator:
            continue  # refused: it needs the trainer's probabilities
        selected = {"algorithm.adv_estimator": estimator, f"{ACTOR}.policy_loss.loss_mode": loss}
        config = changed(base, selected | VARIANTS[variant])
        before, without_effect = list(numbers(config)), reported(config)
        for key in CHANGES if (estimator, loss) in EACH else OWN:
            after = list(numbers(other(config, key)))
            if key in without_effect and not same(before[:-1], after[:-1]):
                wrong.append(f"{estimator} {loss} {key}: reported, but it changes a loss")
            excused = estimator == NEVER_NEGATIVE and key in OF_NEGATIVE
            if key not in without_effect and same(before, after) and not excused:
                wrong.append(f"{estimator} {loss} {key}: changes nothing, but is not reported")
    assert not wrong, "\n".join(wrong)
