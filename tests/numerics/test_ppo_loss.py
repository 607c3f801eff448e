"""The loss of PPO with all its terms, against plain Python, whole and in micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.log import warn_once
from rlctl.runtime.algorithms.aggregate import MODES, with_sizes
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.algorithms.old_log_probs import OwnPass, PassBefore
from rlctl.runtime.algorithms.policy_losses.base import PolicyTokens
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.base.batch import Experience
from rlctl.runtime.base.ops import PolicyOutputs
from tests.configs import configured
from tests.numerics.loss_formulas import CLIP, FORMULAS, Plain
from tests.plugin_folders import of_plugins
from tests.settings import given
from tests.workers import experience

ACTOR = "actor_rollout_ref.actor"
KL, ENTROPY, WIDTH = 0.3, 0.05, 16
SMALL = [
    *given(n=2, response=WIDTH, train="[t]", model="m", batch=4, mini_batch=4),
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.clip_ratio_low={CLIP.low}",
    f"{ACTOR}.clip_ratio_high={CLIP.high}",
    f"{ACTOR}.clip_ratio_c={CLIP.c}",
]
TERMS = [
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef={KL}",
    f"{ACTOR}.kl_loss_type=k2",
    f"{ACTOR}.entropy_coeff={ENTROPY}",
]
FIXED = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
LOSSES = ("vanilla", "gspo", *FIXED)


def ppo(*settings: str) -> PPO:
    return PPO.from_config(configured("ppo_trainer", SMALL, settings), num_steps=1)


def batch_and_outputs() -> tuple[Experience, PolicyOutputs]:
    batch = replace(experience(), is_weights=None)
    draw = torch.Generator().manual_seed(5)
    old = batch.old_log_probs
    assert old is not None
    now = old.values + 0.4 * torch.randn(len(old.values), generator=draw)
    return batch, PolicyOutputs(now, torch.rand(len(now), generator=draw))


def rows_of(outputs: PolicyOutputs, batch: Experience, rows: torch.Tensor) -> PolicyOutputs:
    assert outputs.entropy is not None
    like = batch.response_ids.like
    log_probs, entropy = (like(x).select(rows).values for x in (outputs.log_probs, outputs.entropy))
    return PolicyOutputs(log_probs, entropy)


def aggregated(values: dict[int, float], row: list[int], num_rows: int, mode: str) -> float:
    """Return the loss of the unmasked tokens by the definition of the mode."""
    rows = [[x for t, x in values.items() if row[t] == number] for number in range(num_rows)]
    match mode:
        case "token-mean":
            return sum(values.values()) / len(values)
        case "token-sum":
            return sum(values.values())
        case "seq-mean-token-mean":
            return sum(sum(each) / len(each) for each in rows if each) / num_rows
        case "seq-mean-token-sum":
            return sum(map(sum, rows)) / num_rows
        case _:
            return sum(map(sum, rows)) / num_rows / WIDTH


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", of_plugins("policy_losses", LOSSES))
def test_other_terms_have_the_configured_aggregation(loss: str, mode: str) -> None:
    algorithm = ppo(
        *TERMS, f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.loss_agg_mode={mode}"
    )
    batch, outputs = batch_and_outputs()
    assert batch.old_log_probs is not None
    assert batch.ref_log_probs is not None
    assert outputs.entropy is not None
    mask, rows = batch.response_mask.values, batch.response_ids.row_of_token
    tokens = PolicyTokens(
        outputs.log_probs, batch.old_log_probs.values, batch.advantages.values, mask, rows, 8
    )
    plain = Plain(tokens)
    d = outputs.log_probs - batch.ref_log_probs.values
    row = rows.tolist()
    policy = {t: value for t, (value, _) in FORMULAS[loss](plain).items()}
    kl = aggregated({t: float(d[t]) ** 2 / 2 for t in plain.kept}, row, 8, mode)
    entropy = aggregated({t: float(outputs.entropy[t]) for t in plain.kept}, row, 8, mode)
    own = aggregated(policy, row, 8, FIXED.get(loss, mode))
    found = algorithm.loss(outputs, with_sizes(batch, lambda sums: sums))
    assert float(found.total) / (found.count or 1.0) == pytest.approx(
        own + KL * kl - ENTROPY * entropy, rel=2e-5, abs=1e-6
    )
    metrics = {name: metric.value for name, metric in found.metrics.items()}
    assert metrics["actor/pg_loss"] == pytest.approx(own, rel=2e-5, abs=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=2e-5)
    assert metrics["actor/entropy_loss"] == pytest.approx(entropy, rel=2e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", of_plugins("policy_losses", LOSSES))
def test_all_terms_are_those_of_the_mini_batch(loss: str, mode: str) -> None:
    """Join three micro-batches of two ranks; one has fewer tokens than rows."""
    algorithm = ppo(
        *TERMS, f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.loss_agg_mode={mode}"
    )
    assert (Needs.SIZES in algorithm.needs) == (FIXED.get(loss, mode) != mode)
    batch, outputs = batch_and_outputs()
    sums = torch.tensor([8.0, float(batch.response_mask.values.sum())], dtype=torch.float64)
    whole = algorithm.loss(outputs, batch)
    total, count = 0.0, 0.0
    for rows in map(torch.tensor, ([0, 6], [1, 2, 3], [4, 5, 7])):
        part = with_sizes(batch.select(rows), lambda _: sums)
        loss_of_part = algorithm.loss(rows_of(outputs, batch, rows), part)
        total += float(loss_of_part.total)
        count += loss_of_part.count or 0.0
    expected = float(whole.total) / (whole.count or 1.0)
    assert total / (count or 1.0) == pytest.approx(expected, rel=1e-5)
    assert math.isfinite(expected)


REJECTS = (
    "algorithm.rollout_correction.rollout_rs=token_k1",
    'algorithm.rollout_correction.rollout_rs_threshold="0.5_2.0"',
)
GEO_MEAN = f"{ACTOR}.policy_loss.loss_mode=geo_mean"


@pytest.mark.plugin("objectives")
def test_tokens_are_rejected_before_an_update_that_needs_their_number() -> None:
    assert type(ppo(*REJECTS, GEO_MEAN).update) is OwnPass
    assert type(ppo(*TERMS, *REJECTS).update) is OwnPass
    assert type(ppo(*TERMS, *REJECTS, GEO_MEAN).update) is PassBefore
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    with pytest.raises(ConfigError, match="tokens are rejected in bypass mode") as error:
        ppo(*TERMS, *REJECTS, GEO_MEAN, bypass)
    assert "loss_agg_mode=seq-mean-token-mean" in str(error.value)
    ppo(*TERMS, *REJECTS, GEO_MEAN, bypass, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")


@pytest.mark.plugin("objectives")
def test_gspo_with_another_aggregation_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    gspo = f"{ACTOR}.policy_loss.loss_mode=gspo"
    warn_once.cache_clear()
    ppo(gspo, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
    assert not caplog.records
    ppo(gspo, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum")
    assert "published with loss_agg_mode=seq-mean-token-mean" in caplog.text
