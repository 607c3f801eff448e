"""`rlctl explain` of TRL's and OpenRLHF's options: the keys that it names have their formulas.

Each formula is a loop over the tokens of ragged rows, from the documentation of the two projects
(TRL: GRPO trainer; OpenRLHF: PPO and REINFORCE++). A case also checks that its keys and values are
in the row of the table, so that a row cannot change without its test.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.cli.explain.metric_entries import read_table
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    load_estimator,
)
from rlctl.runtime.algorithms.bounds import Bounds
from rlctl.runtime.algorithms.importance_weights import importance_weights
from rlctl.runtime.algorithms.kl import load_kl_estimator, make_kl_controller
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens
from rlctl.runtime.algorithms.token_rewards import overlong_penalty
from rlctl.runtime.algorithms.value_loss import value_loss
from rlctl.runtime.base.batch import Experience
from rlctl.runtime.base.ops import PolicyOutputs
from tests.configs import configured
from tests.plugin_folders import folder_of, is_there, marks_of
from tests.settings import given
from tests.workers import experience

WIDTH, LOW, HIGH = 20, 0.2, 0.28
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
SMALL = [
    *given(n=2, response=WIDTH, train="[t]", model="m", batch=4, mini_batch=4),
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.loss_agg_mode=token-mean",
]
OFF = f"{ACTOR}.clip_ratio_c=1000000000"  # 1e9: off; neither project has a dual clip by default
BOUNDS = (f"{ACTOR}.clip_ratio_low={LOW}", f"{ACTOR}.clip_ratio_high={HIGH}", OFF)


def row_of(library: str, option: str) -> str:
    """Return the row of an option in the table: its keys and the note."""
    (row,) = [rows[option] for rows in read_table(library).values() if option in rows]
    return " ".join(row)


def check_advice(library: str, options: str, settings: tuple[str, ...]) -> None:
    """Check that rows of `options` name the key and the value of each setting."""
    text = " ".join(row_of(library, option) for option in options.split())
    for setting in settings:
        key, _, value = setting.partition("=")
        assert key.rpartition(".")[2] in text, setting
        assert value in text or value.replace(".", "").isdigit(), setting


def rows() -> tuple[Experience, PolicyOutputs]:
    """Return far off-policy rows with one advantage each, as both projects have."""
    draw = torch.Generator().manual_seed(7)
    batch = replace(experience(), is_weights=None)
    old = batch.old_log_probs
    assert old is not None
    of_row = torch.randn(len(batch), generator=draw)
    advantages = old.like(of_row[batch.response_ids.row_of_token])
    now = old.values + 0.9 * torch.randn(len(old.values), generator=draw)
    ref = old.like(now + 0.3 * torch.randn(len(now), generator=draw))
    engine = old.like(old.values + 0.3 * torch.randn(len(now), generator=draw))
    batch = replace(batch, advantages=advantages, ref_log_probs=ref, rollout_log_probs=engine)
    return batch, PolicyOutputs(now, torch.rand(len(now), generator=draw))


BATCH, OUTPUTS = rows()


@dataclass(frozen=True)
class Token:
    """One token that the policy wrote, as numbers with a graph."""

    now: Tensor
    old: Tensor
    ref: Tensor
    engine: Tensor
    entropy: Tensor
    advantage: float


def tokens_of(now: Tensor) -> list[list[Token]]:
    """Return the tokens of each row, without those of tools."""
    table: list[list[Token]] = [[] for _ in range(len(BATCH))]
    assert BATCH.old_log_probs is not None
    assert BATCH.ref_log_probs is not None
    assert OUTPUTS.entropy is not None
    columns = (
        now,
        BATCH.old_log_probs.values,
        BATCH.ref_log_probs.values,
        BATCH.rollout_log_probs.values,
        OUTPUTS.entropy,
    )
    for t, row in enumerate(BATCH.response_ids.row_of_token.tolist()):
        if BATCH.response_mask.values[t]:
            values = [column[t] for column in columns]
            table[row].append(Token(*values, float(BATCH.advantages.values[t])))
    return table


Loss = Callable[[Token, list[Token]], Tensor]


def clipped(token: Token, ratio: Tensor, low: float, high: float, most: float) -> Tensor:
    free = torch.clamp(ratio, max=most) * token.advantage
    return -torch.minimum(free, ratio.clamp(1 - low, 1 + high) * token.advantage)


def of_token(low: float = LOW, high: float = HIGH, most: float = 1e9) -> Loss:
    return lambda token, _: clipped(token, (token.now - token.old).exp(), low, high, most)


def of_sequence(token: Token, row: list[Token]) -> Tensor:
    mean = torch.stack([each.now - each.old for each in row]).mean()
    return clipped(token, mean.exp(), LOW, HIGH, 1e9)


def cispo(token: Token, _: list[Token]) -> Tensor:
    return -(token.now - token.old).exp().clamp(max=5.0).detach() * token.advantage * token.now


def sapo(token: Token, _: list[Token]) -> Tensor:
    tau = 1.0 if token.advantage > 0 else 1.05
    ratio = (token.now - token.old).exp()
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * token.advantage


def with_kl(token: Token, row: list[Token]) -> Tensor:
    d = token.ref - token.now
    return of_token()(token, row) + 0.1 * (d.exp() - d - 1)


def with_entropy(token: Token, row: list[Token]) -> Tensor:
    return of_token()(token, row) - 0.05 * token.entropy


def with_dual_clip(token: Token, row: list[Token]) -> Tensor:
    loss = of_token()(token, row)
    if token.advantage >= 0:
        return loss
    return torch.minimum(loss, torch.tensor(-3.0 * token.advantage))


def weighted(mode: str, low: float = 0.0, cap: float = 1.2) -> Loss:
    """Return the loss with TRL's or OpenRLHF's weights of tokens or rows."""

    def loss(token: Token, row: list[Token]) -> Tensor:
        of = [token] if "token" in mode else row
        ratio = float(sum(each.old - each.engine for each in of).exp())
        weight = min(max(ratio, low), cap)
        if "mask" in mode:
            weight = ratio if ratio <= cap else 0.0
        return weight * of_token()(token, row)

    return loss


def grpo(losses: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(row).mean() for row in losses if row]).sum() / len(losses)


def dapo(losses: list[list[Tensor]]) -> Tensor:
    return torch.stack([x for row in losses for x in row]).mean()


def dr_grpo(losses: list[list[Tensor]]) -> Tensor:
    return torch.stack([x for row in losses for x in row]).sum() / len(losses) / WIDTH


LOSS_TYPES = {
    grpo: f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    dapo: f"{ACTOR}.loss_agg_mode=token-mean",
    dr_grpo: f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
}
MODE = f"{ACTOR}.policy_loss.loss_mode"
WEIGHTS = f"{CORRECTION}.rollout_is"
TRL = [
    *(("loss_type epsilon epsilon_high delta", of_token(), join, (key, *BOUNDS))
      for join, key in LOSS_TYPES.items()),
    ("epsilon delta", of_token(0.1, 0.1), dapo, (f"{ACTOR}.clip_ratio=0.1", OFF)),
    ("epsilon epsilon_high delta", of_token(most=3.0), dapo,
     (*BOUNDS[:2], f"{ACTOR}.clip_ratio_c=3")),
    *(("loss_type importance_sampling_level epsilon epsilon_high delta", of_sequence, join,
       (f"{MODE}=gspo", key, *BOUNDS[:2])) for join, key in LOSS_TYPES.items()),
    ("loss_type epsilon epsilon_high", cispo, dapo,
     (f"{MODE}=cispo", f"{ACTOR}.clip_ratio_high=4", f"{ACTOR}.clip_ratio_low=1")),
    ("loss_type", sapo, grpo, (f"{MODE}=sapo",)),
    ("beta epsilon epsilon_high delta", with_kl, dapo,
     (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=low_var_kl",
      f"{ACTOR}.kl_loss_coef=0.1", *BOUNDS)),
]  # fmt: skip
OPENRLHF = [
    ("policy_loss_type eps_clip_low_high dual_clip", of_token(), dapo,
     (f"{MODE}=vanilla", *BOUNDS)),
    ("policy_loss_type eps_clip dual_clip", of_token(0.1, 0.1), dapo,
     (f"{MODE}=vanilla", f"{ACTOR}.clip_ratio=0.1", OFF)),
    ("eps_clip_low_high dual_clip", with_dual_clip, dapo,
     (*BOUNDS[:2], f"{ACTOR}.clip_ratio_c=3")),
    ("policy_loss_type eps_clip_low_high", of_sequence, dapo, (f"{MODE}=gspo", *BOUNDS[:2])),
    ("entropy_loss_coef eps_clip_low_high dual_clip", with_entropy, dapo,
     (f"{ACTOR}.entropy_coeff=0.05", *BOUNDS)),
]  # fmt: skip
CASES = [("trl", *case) for case in TRL] + [("openrlhf", *case) for case in OPENRLHF]


def marked(case: tuple[Any, ...]) -> Any:
    """Return a case as parameters, marked with the folder of its policy loss."""
    losses = [each.partition("=")[2] for each in case[-1] if each.startswith(MODE)]
    return pytest.param(*case, marks=marks_of(*(folder_of("policy_losses", x) for x in losses)))


def ours(settings: tuple[str, ...], weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the loss and gradient (T,) of rlctl with `settings`."""
    algorithm = PPO.from_config(configured("ppo_trainer", SMALL, settings), num_steps=1)
    batch = BATCH
    if weights is not None:
        batch = replace(batch, is_weights=batch.response_ids.like(weights))
    now = OUTPUTS.log_probs.clone().requires_grad_()
    loss = algorithm.loss(PolicyOutputs(now, OUTPUTS.entropy), batch)
    total = loss.total / (loss.count or 1.0)
    (gradient,) = torch.autograd.grad(total, now)
    return total.detach(), gradient


def theirs(loss: Loss, join: Callable[[list[list[Tensor]]], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss and gradient (T,) of a formula per token, aggregated by `join`."""
    now = OUTPUTS.log_probs.clone().requires_grad_()
    total = join([[loss(token, row) for token in row] for row in tokens_of(now)])
    (gradient,) = torch.autograd.grad(total, now)
    return total.detach(), gradient


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("library", "options", "loss", "join", "settings"), map(marked, CASES), ids=range(len(CASES))
)
def test_losses(
    library: str,
    options: str,
    loss: Loss,
    join: Callable[[list[list[Tensor]]], Tensor],
    settings: tuple[str, ...],
) -> None:
    check_advice(library, options, settings)
    check(ours(settings), theirs(loss, join))


@pytest.mark.parametrize(
    ("library", "mode", "level", "threshold"),
    [
        ("trl", "token_truncate", "token", "1.2"),
        ("trl", "sequence_truncate", "sequence", "1.2"),
        ("trl", "token_mask", "token", "0.0000001_1.2"),
        ("trl", "sequence_mask", "sequence", "0.0000001_1.2"),
        ("openrlhf", "token", "token", "1.2"),
    ],
)
def test_weights_of_rollouts(library: str, mode: str, level: str, threshold: str) -> None:
    if library == "trl":
        check_advice("trl", "vllm_importance_sampling_correction", (f"{WEIGHTS}={level}",))
        note = row_of("trl", "vllm_importance_sampling_mode")
        assert f"`{mode}`" in note
        assert ("mask" in mode) == ("_" in threshold)
        assert "0.0000001_3.0" in note
    else:
        check_advice("openrlhf", "enable_vllm_is_correction", (f"{WEIGHTS}={level}",))
        assert "lower one of 0" in row_of("openrlhf", "vllm_is_truncated_threshold")
    assert BATCH.old_log_probs is not None
    sampled = SampledTokens.from_rollouts(BATCH, BATCH.old_log_probs.values)
    weights, _ = importance_weights(sampled, level, Bounds.parse(threshold, "t"))
    check(ours(BOUNDS, weights), theirs(weighted(mode), dapo))


def test_two_bounds_are_not_openrlhfs_clamp() -> None:
    """OpenRLHF raises small weights to the lower bound; rlctl's two bounds set them to 0."""
    assert "is not supported" in row_of("openrlhf", "vllm_is_truncated_threshold")
    assert BATCH.old_log_probs is not None
    sampled = SampledTokens.from_rollouts(BATCH, BATCH.old_log_probs.values)
    weights, _ = importance_weights(sampled, "token", Bounds(0.8, 1.2))
    expected, _ = theirs(weighted("token", low=0.8), dapo)
    assert not torch.allclose(ours(BOUNDS, weights)[0], expected, rtol=1e-3)


SCORES = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.5, 0.1, 0.9, 0.0]]
LENGTHS = [3, 1, 7, 5, 2, 6, 4, 4, 7, 1, 3, 5, 2, 2, 6, 7]


def advantages(name: str, norm: bool = True, gamma: float = 1.0) -> list[float]:
    """Return rlctl's advantage of each row's first token."""
    lengths = torch.tensor(LENGTHS)
    mask = (torch.arange(7) < lengths[:, None]).double()
    rewards = torch.zeros(16, 7, dtype=torch.float64)
    rewards[torch.arange(16), lengths - 1] = torch.tensor(SCORES, dtype=torch.float64).flatten()
    group = torch.arange(4).repeat_interleave(4)
    inputs = AdvantageInputs(rewards=rewards, mask=mask, group=group)
    return load_estimator(name, {})(inputs, AdvantageConfig(gamma, 1.0, norm))[0][:, 0].tolist()


def over_tokens(values: list[float]) -> list[float]:
    """Return values of rows, less their mean and over their deviation, weighted by tokens."""
    flat = [x for x, n in zip(values, LENGTHS, strict=True) for _ in range(n)]
    mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
    return [(x - mean) / deviation for x in values]


def test_advantages() -> None:
    """Compare at a KL of 0; OpenRLHF divides by the biased deviation, TRL adds 1e-4 to σ."""
    centred = [x - statistics.fmean(group) for group in SCORES for x in group]
    by_group = [
        (x - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4)
        for group in SCORES
        for x in group
    ]
    others = [x - (sum(group) - x) / 3 for group in SCORES for x in group]
    flat = [x for group in SCORES for x in group]
    row = row_of("openrlhf", "advantage_estimator")
    for option, name, norm, expected in (
        ("rloo", "rloo", True, others),
        ("reinforce", "reinforce_plus_plus", True, over_tokens(flat)),
        ("reinforce_baseline", "reinforce_plus_plus_baseline", True, over_tokens(centred)),
        ("group_norm", "grpo", True, by_group),
        ("dr_grpo", "grpo", False, centred),
    ):
        assert f"`{option}`" in row
        assert name in row
        if name != "grpo" and not is_there("objectives"):
            continue
        assert advantages(name, norm) == pytest.approx(expected, abs=0.02), option
    scale = row_of("trl", "scale_rewards")
    assert "`group`: true; `none`: false" in scale
    assert advantages("grpo", True) == pytest.approx(by_group, abs=1e-3)
    assert advantages("grpo", False) == pytest.approx(centred)


@pytest.mark.plugin("objectives")
def test_what_is_said_to_have_no_equivalent_has_none() -> None:
    """TRL's `batch` and OpenRLHF's lack of whitening are not the estimators nearest to them."""
    deviation = statistics.stdev(x for group in SCORES for x in group)
    batch = [(x - statistics.fmean(group)) / deviation for group in SCORES for x in group]
    assert "not supported" in row_of("trl", "scale_rewards")
    whitened = advantages("reinforce_plus_plus_baseline")
    assert whitened != pytest.approx(batch, abs=0.02)
    assert row_of("openrlhf", "no_advantage_std_norm").startswith("Not supported")
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert advantages(name, norm=True) == advantages(name, norm=False)


def test_kl_and_penalties_of_openrlhf() -> None:
    d = torch.linspace(-2, 2, 9)
    note = row_of("openrlhf", "kl_estimator")
    formulas = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}
    for name, expected in formulas.items():
        assert f"`{name}`" in note
        torch.testing.assert_close(load_kl_estimator(name)(d), expected)
    config = configured("ppo_trainer", SMALL, ())
    section = config.algorithm.kl_ctrl.model_copy(
        update={"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.05, "horizon": 100}
    )
    for option, field in (("kl_target", "target_kl"), ("kl_horizon", "horizon")):
        assert row_of("openrlhf", option).split()[0] == f"algorithm.kl_ctrl.{field}"
    controller, coef = make_kl_controller(section), 0.1
    for kl in (0.2, 0.01, 0.055):
        coef *= 1 + min(max(kl / 0.05 - 1, -0.2), 0.2) * 8 / 100
        controller.update(kl, 8)
        assert controller.coef == pytest.approx(coef)
    buffer = config.algorithm.overlong_buffer.model_copy(
        update={"enable": True, "len": 5, "penalty_factor": 0.7}
    )
    penalty = [-max(0, n - (WIDTH - 5)) / 5 * 0.7 for n in range(WIDTH + 1)]
    found = overlong_penalty(torch.arange(WIDTH + 1), WIDTH, buffer).tolist()
    assert found == pytest.approx(penalty)


def test_value_clip_of_openrlhf() -> None:
    assert row_of("openrlhf", "value_clip").split()[0] == "critic.cliprange_value"
    values, old, returns = (torch.linspace(-1, 1, 7).roll(k) for k in range(3))
    losses, _ = value_loss(values, old, returns, torch.ones(7), 0.2)
    for v, o, r, loss in zip(*(x.tolist() for x in (values, old, returns, losses)), strict=True):
        held = o + min(max(v - o, -0.2), 0.2)
        assert loss == pytest.approx(0.5 * max((v - r) ** 2, (held - r) ** 2), abs=1e-6)
