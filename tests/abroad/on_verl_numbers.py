"""rlctl's numbers against the functions of verl's release, on random ragged batches in float64.

`DEVIATIONS` names what is known to differ, with the reason; each is shown by a test, so that a
reason that no longer holds is noticed. A last test counts the batches.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import verl.trainer.ppo.core_algos as core
import verl.trainer.ppo.rollout_corr_helper as helper
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.ray_trainer import apply_kl_penalty

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    load_estimator,
)
from rlctl.runtime.algorithms.aggregate import MODES
from rlctl.runtime.algorithms.bounds import Bounds
from rlctl.runtime.algorithms.importance_weights import importance_weights
from rlctl.runtime.algorithms.kl import load_kl_estimator, make_kl_controller
from rlctl.runtime.algorithms.rejection import CRITERIA, parse_criteria, rejection_mask
from rlctl.runtime.algorithms.sampled_tokens import mismatch
from rlctl.runtime.algorithms.token_rewards import penalise_kl
from rlctl.runtime.algorithms.value_loss import value_loss
from rlctl.runtime.training.repeated import draws
from rlctl.runtime.training.validation import validation_metrics
from rlctl.tracking.tracker import Sample
from tests.abroad.verl_batches import (
    ACTOR,
    ENTROPY,
    KL,
    Rectangle,
    config_of,
    correction_of,
    draw,
    float64,
    our_loss,
    verl_config,
    verl_loss,
)

DEVIATIONS = {
    "optimal_token_baseline with tokens of tools": "verl cuts the tail of the longest row by a "
    "number of its tokens, which is a column only without tools; rlctl by columns",
    "bypass mode with rejection, token-mean": "verl divides by all tokens; in rlctl rejected ones "
    "leave the divisor",
    "grpo_vectorized": "verl sums in float32: equal scores may have advantages of 0.01, not of 0",
    "actor/ppo_kl of kl_cov": "verl's is the mean of |d|, that of all other losses the mean of -d",
    "*_std of weights and criteria": "verl subtracts the square of the mean, whose divisor has "
    "1e-8 added: up to 1e-4 where the deviation is 0",
    "best@k and maj@k": "verl draws with NumPy, rlctl with torch; equal with the same draws",
}
COUNTED: Counter[str] = Counter()
NUM_BATCHES = 1000  # at least
TERMS = (
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef={KL}",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.entropy_coeff={ENTROPY}",
)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with float64():
        yield


class Keys(dict[str, Any]):
    """A section of verl's configuration."""

    __getattr__ = dict.get


def batches(kind: str, number: int, **how: Any) -> Iterator[Rectangle]:
    """Yield `number` batches, the same in each run, and count them."""
    COUNTED[kind] += number
    start = sum(map(ord, kind)) * 1000
    for seed in range(start, start + number):
        yield draw(seed, **how)


def close(ours: Any, verls: Any, what: object = "") -> None:
    """Compare numbers or tensors; verl adds 1e-8 to the number of tokens of a mean."""
    ours, verls = torch.as_tensor(ours).double(), torch.as_tensor(verls).double()
    torch.testing.assert_close(ours, verls, rtol=1e-6, atol=1e-7, msg=lambda m: f"{what}: {m}")


ESTIMATORS = [each.value for each in core.AdvantageEstimator]


def advantages_of(
    name: str, batch: Rectangle, norm: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return advantages and returns of rlctl and of verl."""
    draws = torch.Generator().manual_seed(int(batch.lengths.sum()))
    rows = len(batch.mask)
    components = {key: torch.randn(rows, generator=draws).float() for key in ("x", "y")}
    greedy = torch.randn(rows, generator=draws)
    gamma, lam = 0.9, 0.8
    attention = torch.cat([torch.ones(rows, 2), batch.inside.double()], 1)
    keys = {"gdpo_reward_keys": ["x", "y"], "gdpo_reward_weights": [1.0, 0.3]}
    known = {
        "token_level_rewards": batch.rewards.clone(),
        "response_mask": batch.mask.float() if name == "gdpo" else batch.mask,
        "index": batch.group.numpy(),
        "values": batch.values,
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm,
        "config": Keys(gamma=gamma, norm_adv_by_std_in_grpo=norm, **keys),
        "reward_baselines": greedy,
        "old_log_probs": batch.old,
        "sum_pi_squared": batch.squares,
        "non_tensor_batch": {key: x.numpy() for key, x in components.items()},
        "batch": {"prompts": torch.zeros(rows, 2), "attention_mask": attention.long()},
    }
    function = core.get_adv_estimator_fn(name)
    accepted = inspect.signature(function).parameters
    theirs = function(**{key: value for key, value in known.items() if key in accepted})
    settings = {"reward_keys": ["x", "y"], "reward_weights": [1.0, 0.3]} if name == "gdpo" else {}
    inputs = AdvantageInputs(
        rewards=batch.rewards,
        mask=batch.mask,
        group=batch.group,
        values=batch.values,
        greedy_scores=greedy,
        components={key: x.double() for key, x in components.items()},
        log_probs=batch.old,
        sum_pi_squared=batch.squares,
    )
    config = AdvantageConfig(gamma=gamma, lam=lam, norm_by_std=norm)
    return load_estimator(name, settings)(inputs, config), theirs


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name: str, norm: bool) -> None:
    for batch in batches(f"estimator {name}", 30, holes=name != "optimal_token_baseline"):
        ours, theirs = advantages_of(name, batch, norm)
        # verl computes some in float32.
        tolerance = {"gdpo": 2e-6, "grpo_vectorized": 0.03}.get(name, 1e-8)
        for one, other in zip(ours, theirs, strict=True):
            keep = batch.mask > 0
            torch.testing.assert_close(
                one[keep], other[keep].double(), rtol=tolerance, atol=tolerance
            )


def test_token_baseline_differs_with_tokens_of_tools() -> None:
    assert "optimal_token_baseline with tokens of tools" in DEVIATIONS
    differing = 0
    for batch in batches("baseline with tools", 60):
        (ours, _), (theirs, _) = advantages_of("optimal_token_baseline", batch, True)
        differing += not torch.allclose(ours, theirs)
    assert differing


POLICY = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3},
    "dro": {"dro_beta": 0.4},
}
LOSSES = [name for name in core.POLICY_LOSS_REGISTRY if name != "bypass_mode"]


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, mode: str, terms: bool) -> None:
    own = POLICY.get(name, {})
    settings = [f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.loss_agg_mode={mode}"]
    params = ", ".join(f"{key.removeprefix('dro_')}: {value}" for key, value in own.items())
    settings += [f"{ACTOR}.policy_loss.params={{{params}}}", *(TERMS if terms else ())]
    for number, batch in enumerate(batches(f"loss {name} {mode} {terms}", 6)):
        weights = None
        if number % 2 and name not in ("clip_cov", "kl_cov"):
            weights = (batch.old - batch.rollout).exp().clamp(max=2.0) * batch.mask
        theirs = verl_loss(batch, verl_config(name, mode, batch, **own), terms, weights)
        loss, gradient, metrics = our_loss(batch, *settings, weights=weights)
        close(loss, theirs[0], (name, mode, number))
        close(gradient * batch.mask, theirs[1], (name, mode, number))
        for key, value in theirs[2].items():
            if (name, key) == ("kl_cov", "actor/ppo_kl"):
                assert "actor/ppo_kl of kl_cov" in DEVIATIONS
                assert metrics[key] <= value
            elif key in metrics:
                close(metrics[key], value, key)
            else:
                assert value == 0, key


KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


@pytest.mark.parametrize("kind", [*KL_KINDS, *(f"{kind}+" for kind in KL_KINDS)])
def test_kl(kind: str) -> None:
    for batch in batches(f"KL {kind}", 10, scale=3.0):
        found = []
        for function in (
            lambda now, ref: load_kl_estimator(kind)(now - ref),
            lambda now, ref: core.kl_penalty(now, ref, kind),
        ):
            now = batch.now.clone().requires_grad_()
            value = function(now, batch.ref)
            value.sum().backward()
            found.append((value.detach(), now.grad))
        for one, other in zip(*found, strict=True):
            close(one, other, kind)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_kl_in_the_reward_with_an_adaptive_coefficient(kind: str) -> None:
    theirs = core.AdaptiveKLController(0.1, 0.02, 1000)
    settings = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.02, "horizon": 1000}
    ours = make_kl_controller(config_of().algorithm.kl_ctrl.model_copy(update=settings))
    for batch in batches(f"KL in the reward {kind}", 8):
        tensors = {
            "response_mask": batch.mask,
            "token_level_scores": batch.rewards,
            "old_log_probs": batch.old,
            "ref_log_prob": batch.ref,
        }
        data, expected = apply_kl_penalty(DataProto.from_dict(tensors), theirs, kind)
        rewards, metrics = penalise_kl(
            batch.ragged(batch.rewards),
            batch.ragged(batch.old),
            batch.ragged(batch.ref),
            batch.ragged(batch.mask),
            load_kl_estimator(kind),
            ours,
        )
        penalised = data.batch["token_level_rewards"] * batch.mask
        close(batch.rectangle(rewards.values) * batch.mask, penalised)
        for key, value in expected.items():
            close(metrics[key].value, value, key)
        close(ours.coef, theirs.value)


@pytest.mark.parametrize("mode", MODES)
def test_value_loss(mode: str) -> None:
    for batch in batches(f"value loss {mode}", 6):
        sizes = verl_config("vanilla", mode, batch).global_batch_info
        expected, clipfrac = core.compute_value_loss(
            batch.now, batch.ref, batch.values, batch.mask, 0.2, mode, **sizes
        )
        args = batch.now, batch.values, batch.ref, batch.mask
        losses, metrics = value_loss(*(x.flatten() for x in args), 0.2)
        aggregated = core.agg_loss(losses.view_as(batch.mask), batch.mask, mode, **sizes)
        close(aggregated, expected)
        close(metrics["critic/vf_clipfrac"].value, float(clipfrac))


def same_metrics(ours: dict[str, Any], theirs: dict[str, float]) -> None:
    """Check that each metric of verl has a counterpart of the same value."""
    for name, value in theirs.items():
        found = ours[f"rollout_corr/{name}"].value
        if name.endswith("std"):  # verl subtracts squares of means
            assert found == pytest.approx(value, abs=1e-4)
        else:
            close(found, value, name)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", [2.0, 1.2, "0.5_5.0", "0.9_1.1"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(level: Any, threshold: float | str, normalize: bool) -> None:
    for batch in batches(f"weights {level} {threshold} {normalize}", 12):
        ratio = batch.old - batch.rollout
        bounds = Bounds.parse(threshold, "t")
        weights, metrics = importance_weights(batch.sampled(), level, bounds, normalize)
        if not weights.any():
            continue  # verl's effective sample size divides by 0
        expected, theirs = helper.compute_rollout_correction_weights(
            ratio, batch.mask, level, threshold, normalize
        )
        close(batch.rectangle(weights) * batch.mask, expected * batch.mask)
        same_metrics(metrics, theirs)


RULES = [(kind, "0.5_2.0" if kind.endswith("k1") else "0.1") for kind in CRITERIA]
RULES += [("token_k1,seq_mean_k3", "0.5_2.0,0.1"), ("token_k2,seq_mean_k3,token_k1", "1.3")]


@pytest.mark.parametrize(("kinds", "threshold"), RULES)
def test_rejection(kinds: str, threshold: str) -> None:
    for batch in batches(f"rejection {kinds}", 12):
        ratio = batch.old - batch.rollout
        expected, theirs = helper.compute_rollout_rejection_mask(
            ratio, batch.mask, kinds, threshold
        )
        kept, metrics = rejection_mask(batch.sampled(), parse_criteria(kinds, threshold))
        close(batch.rectangle(kept) * batch.mask, expected)
        same_metrics(metrics, theirs)


def test_mismatch() -> None:
    for batch in batches("mismatch", 40):
        theirs = helper.compute_offpolicy_metrics(batch.old, batch.rollout, batch.mask)
        same_metrics(mismatch(batch.sampled()), theirs)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("rejection", [(None, None), ("token_k1", "0.5_2.0")])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode(
    loss_type: str, level: str | None, rejection: tuple[str | None, str | None], mode: str
) -> None:
    rule, threshold = rejection
    settings: dict[str, Any] = {
        "rollout_is": level,
        "rollout_is_threshold": 2.0,
        "rollout_rs": rule,
        "rollout_rs_threshold": threshold,
        "bypass_mode": True,
        "loss_type": loss_type,
    }
    assert correction_of(**settings).bypass
    key = "algorithm.rollout_correction"
    given = [f"{key}.{name}={'null' if x is None else x}" for name, x in settings.items()]
    if threshold is not None:
        given[3] = f'{key}.rollout_rs_threshold="{threshold}"'
    given += [f"{key}.bypass_mode=true", f"{ACTOR}.loss_agg_mode={mode}"]
    for batch in batches(f"bypass {loss_type} {level} {rule} {mode}", 6):
        batch = replace(batch, old=batch.rollout)
        config = verl_config(
            "bypass_mode", mode, batch, rollout_correction=RolloutCorrectionConfig(**settings)
        )
        loss, gradient, _ = verl_loss(batch, config, terms=False)
        ours, our_gradient, _ = our_loss(batch, *given)
        if rule is not None and mode == "token-mean":
            assert "bypass mode with rejection, token-mean" in DEVIATIONS
            ratio = batch.now - batch.rollout
            kept, _ = helper.compute_rollout_rejection_mask(ratio, batch.mask, rule, threshold)
            share = float(kept.sum() / batch.mask.sum())
            ours, our_gradient = ours * share, our_gradient * share
        close(ours, loss)
        close(our_gradient * batch.mask, gradient)


@pytest.mark.parametrize("num_responses", [1, 2, 3, 4, 6, 8])
def test_validation(num_responses: int) -> None:
    """Give verl the draws of rlctl: see `DEVIATIONS`."""
    rng = np.random.default_rng(num_responses)
    COUNTED["validation"] += 5
    for scores in ([0.0, 1.0], [0.0, 1.0], [0.0, 0.5, 1.0], [-1.0, 1.0], [0.0, 1.0]):
        values = rng.choice(scores, (6, num_responses))
        preds = rng.integers(0, 3, values.shape)
        samples = [
            sample(value, str(pred))
            for row, names in zip(values.tolist(), preds.tolist(), strict=True)
            for value, pred in zip(row, names, strict=True)
        ]
        ours = validation_metrics(samples, num_responses)
        with patch.object(metric_utils.np.random, "choice", torchs_draws):
            theirs = metric_utils.process_validation_metrics(
                ["d"] * values.size,
                [str(row) for row in range(6) for _ in range(num_responses)],
                {"acc": values.flatten().tolist(), "pred": [x.pred for x in samples]},
            )["d"]["acc"]
        by_name = {"/".join(key.split("/")[3:]): value for key, value in ours.items()}
        for name, value in theirs.items():
            if name.endswith("/std") or (name.startswith("maj") and name not in by_name):
                continue  # not reported
            close(by_name[name] if name in by_name else by_name[name.split("/")[0]], value, name)


def torchs_draws(number: int, size: tuple[int, int], replace: bool) -> np.ndarray:
    assert replace
    assert size[0] == len(draws(number, size[1]))
    return draws(number, size[1]).numpy()


def sample(score: float, pred: str) -> Sample:
    return Sample("p", pred, "t", score, {}, 4, finish="stop", data_source="d", pred=pred)


def test_at_least_a_thousand_batches_were_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\ncompared {sum(COUNTED.values())} batches in {len(COUNTED)} kinds")
        for name, reason in DEVIATIONS.items():
            print(f"differs: {name}: {reason}")
    assert sum(COUNTED.values()) >= NUM_BATCHES
