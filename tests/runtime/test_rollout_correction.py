"""Rollout correction in a step: weights and mask of the update, and the resulting loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.runtime.algorithms.base import Loss
from rlctl.runtime.algorithms.old_log_probs import PassBefore
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.base.batch import Experience, LogProbs, Ragged, Scored
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.ops import PolicyOutputs
from rlctl.runtime.base.roles import Roles
from tests.configs import configured
from tests.numerics.batches import scored_batch
from tests.plugin_folders import of_settings
from tests.settings import given

OLD = [[-1.0, -0.5, -2.0], [-0.1, -3.0], [-1.2], [-0.7, -0.2, -0.9, -1.1]]
ENGINE = [[-1.1, -0.2, -3.5], [-0.1, -2.9], [-0.4], [-0.8, -0.9, -0.7, -1.1]]
CORRECTION = "algorithm.rollout_correction"
SMALL = [
    *given(n=2, response=4, train="[t]", model="m", batch=2, mini_batch=2),
    "algorithm.adv_estimator=grpo",
]


class Recorder:
    """Actor with fixed log-probs that records its updates."""

    def __init__(self, log_probs: list[list[float]] | None = None) -> None:
        self.log_probs = OLD if log_probs is None else log_probs
        self.learned: list[Experience] = []
        self.num_passes = 0

    def compute_log_probs(self, batch: Scored) -> LogProbs:
        self.num_passes += 1
        return LogProbs(Ragged.from_rows(self.log_probs), None)

    def update(
        self, batch: Experience, lr: float, max_probs_diff: float | None = None
    ) -> dict[str, Any]:
        assert lr >= 0
        assert max_probs_diff is None
        self.learned.append(batch)
        return {}

    def update_with_log_probs(
        self, batch: Experience, lr: float, max_probs_diff: float | None = None
    ) -> tuple[LogProbs, dict[str, Any]]:
        return LogProbs(Ragged.from_rows(OLD[: len(batch)]), None), self.update(
            batch, lr, max_probs_diff
        )


def ppo(*overrides: str, pass_before: bool = False) -> PPO:
    algorithm = PPO.from_config(configured("ppo_trainer", SMALL, overrides), num_steps=1)
    if pass_before and not algorithm.correction.bypass:  # as with a KL in the reward
        algorithm = replace(algorithm, update=PassBefore(algorithm.correction))
    return algorithm


def learned(
    *overrides: str, actor: Recorder | None = None
) -> tuple[PPO, Experience, dict[str, float]]:
    """Run one step with two groups of two responses; return the update batch and metrics."""
    algorithm = ppo(*overrides, pass_before=True)
    actor = actor or Recorder()
    scored = scored_batch(ENGINE)
    metrics = algorithm.learn(scored, Roles(cast(Any, actor), cast(Any, None)), 1)
    batch, *_ = actor.learned
    return algorithm, batch, {name: metric.value for name, metric in metrics.items()}


def updates_of(algorithm: PPO, actor: Recorder) -> list[Experience]:
    """Learn from responses with the log-probs ENGINE; return the batches of the updates."""
    algorithm.learn(scored_batch(ENGINE), Roles(cast(Any, actor), cast(Any, None)), 1)
    return actor.learned


def clipped(ratio: float, advantage: float) -> float:
    """Return PPO's loss of a token, whose bound is 3 for negative advantages."""
    pessimistic = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
    return min(pessimistic, -advantage * 3.0) if advantage < 0 else pessimistic


def ratios() -> list[list[float]]:
    return [
        [math.exp(a - b) for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(OLD, ENGINE, strict=True)
    ]


def rows_of(field: Ragged | None) -> list[list[float]]:
    return [row.tolist() for row in field.rows()]


def test_no_weights_or_mask_without_correction() -> None:
    _, batch, metrics = learned()
    assert batch.is_weights is None
    assert rows_of(batch.response_mask) == [[1.0] * len(row) for row in OLD]
    assert "rollout_corr/rollout_is_mean" not in metrics
    largest = float((flat(OLD).exp() - flat(ENGINE).exp()).abs().max())
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", "1.3", [[min(x, 1.3) for x in row] for row in ratios()]),
        ("token", "0.6_1.5", [[x if 0.6 <= x <= 1.5 else 0.0 for x in row] for row in ratios()]),
        ("sequence", "1.2", [[min(math.prod(row), 1.2)] * len(row) for row in ratios()]),
    ],
)
def test_importance_weights_reach_the_loss(
    level: str, threshold: str, expected: list[list[float]]
) -> None:
    algorithm, batch, metrics = learned(
        f"{CORRECTION}.rollout_is={level}", f"{CORRECTION}.rollout_is_threshold={threshold}"
    )
    assert [x for row in rows_of(batch.is_weights) for x in row] == pytest.approx(
        [x for row in expected for x in row], rel=1e-5
    )
    num_tokens = sum(map(len, expected))
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(
        sum(map(sum, expected)) / num_tokens, rel=1e-5
    )

    now = [[-0.9 - 0.1 * t for t in range(len(row))] for row in OLD]
    loss = algorithm.loss(PolicyOutputs(Ragged.from_rows(now).values, None), batch)
    by_hand = 0.0
    for row, advantages in enumerate(rows_of(batch.advantages)):
        for new, old, advantage, weight in zip(
            now[row], OLD[row], advantages, expected[row], strict=True
        ):
            by_hand += weight * clipped(math.exp(new - old), advantage)
    assert loss.total.item() == pytest.approx(by_hand, rel=1e-4)
    assert loss.count == num_tokens


@pytest.mark.parametrize(
    "correction",
    [
        [],
        [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=1.2"],
        [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=1.2"],
    ],
)
def test_old_log_probs_of_the_updates_own_pass(correction: list[str]) -> None:
    """Without a pass of their own: the same loss, gradient and metrics."""
    _, before, metrics = learned(*correction)
    algorithm, actor = ppo(*correction), Recorder()
    [batch] = updates_of(algorithm, actor)
    assert (actor.num_passes, batch.old_log_probs) == (0, None)
    now, same = flat(OLD).requires_grad_(), flat(OLD).requires_grad_()
    entropy = torch.linspace(0, 1, len(now))
    loss = algorithm.loss(PolicyOutputs(now, entropy), batch)
    expected = algorithm.loss(PolicyOutputs(same, entropy), before)
    loss.total.backward()
    expected.total.backward()
    assert now.grad is not None
    assert same.grad is not None
    assert torch.equal(now.grad, same.grad)
    assert (loss.total.item(), loss.count) == (expected.total.item(), expected.count)
    found = {name: metric.value for name, metric in loss.metrics.items()}
    assert found.pop("actor/entropy") == pytest.approx(0.5)
    corrected = {name: metrics[name] for name in found if name in metrics}
    assert corrected
    of_loss = {name: metric.value for name, metric in expected.metrics.items()}
    assert found == pytest.approx(of_loss | corrected)


def test_only_later_mini_batches_need_a_pass_before() -> None:
    algorithm, actor = ppo("actor_rollout_ref.actor.ppo_mini_batch_size=1"), Recorder(OLD[2:])
    first, second = updates_of(algorithm, actor)
    assert first.old_log_probs is None
    assert rows_of(second.old_log_probs) == rows_of(Ragged.from_rows(OLD[2:]))
    assert actor.num_passes == 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_later_epochs_use_the_log_probs_of_the_first_update(shuffle: bool) -> None:
    """Each mini-batch has the rows, log-probs, weights and masks that a pass before gives."""
    settings = [
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=1.2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_epochs=3",
        f"actor_rollout_ref.actor.shuffle={shuffle}",
    ]
    by_ids = dict(zip(map(str, rows_of(scored_batch(ENGINE).rollout_log_probs)), OLD, strict=True))

    class Knowing(Recorder):
        def compute_log_probs(self, batch: Scored) -> LogProbs:
            self.num_passes += len(batch)
            found = [by_ids[str(row)] for row in rows_of(batch.rollout_log_probs)]
            return LogProbs(Ragged.from_rows(found), None)

        def update_with_log_probs(
            self, batch: Experience, lr: float, max_probs_diff: float | None = None
        ) -> tuple[LogProbs, dict[str, Any]]:
            metrics = self.update(batch, lr, max_probs_diff)
            self.num_passes = self.num_passes - len(batch)
            return self.compute_log_probs(batch), metrics

    updates: list[list[Experience]] = []
    for pass_before, num_passes in ((False, 2), (True, 4)):
        actor = Knowing()
        updates.append(updates_of(ppo(*settings, pass_before=pass_before), actor))
        assert (len(actor.learned), actor.num_passes) == (6, num_passes)
    first, *_ = updates[0]
    assert (first.old_log_probs, first.is_weights) == (None, None)
    for own, before in list(zip(*updates, strict=True))[1:]:
        for name in ("old_log_probs", "is_weights", "response_mask", "advantages", "response_ids"):
            assert rows_of(getattr(own, name)) == rows_of(getattr(before, name))


def test_rejected_tokens_are_masked_but_keep_their_reward() -> None:
    """Two criteria at once; a masked response still contributes its score to its group."""
    chain = [
        f'{CORRECTION}.rollout_rs="token_k1,seq_mean_k2"',
        f'{CORRECTION}.rollout_rs_threshold="0.5_2,0.2"',
    ]
    algorithm, batch, metrics = learned(*chain)
    expected = []
    for row in ratios():
        mean_k2 = sum(math.log(x) ** 2 / 2 for x in row) / len(row)
        expected.append([float(0.5 <= 1 / x <= 2 and mean_k2 <= 0.2) for x in row])
    assert rows_of(batch.response_mask) == expected
    assert 0 < sum(map(sum, expected)) < sum(map(len, expected))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        1 - sum(map(sum, expected)) / sum(map(len, expected))
    )
    _, plain, _ = learned()
    assert torch.equal(batch.advantages.values, plain.advantages.values)
    assert algorithm.loss(PolicyOutputs(flat(OLD), None), batch).count == sum(map(sum, expected))


BYPASS = [f"{CORRECTION}.bypass_mode=true"]
REINFORCE = [*BYPASS, f"{CORRECTION}.loss_type=reinforce"]


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row])


def bypass_loss(*overrides: str) -> tuple[Loss, torch.Tensor, Experience, Recorder]:
    """Return loss and gradient of a policy with the log-probs OLD, the batch and the actor."""
    actor = Recorder()
    algorithm, batch, _ = learned(*overrides, actor=actor)
    now = flat(OLD).requires_grad_()
    loss = algorithm.loss(PolicyOutputs(now, None), batch)
    loss.total.backward()
    assert now.grad is not None
    return loss, now.grad, batch, actor


def test_bypass_takes_the_engines_log_probs_as_the_old_ones() -> None:
    """The ratio of PPO's clipped loss is π/π_rollout; weights are reported, not applied."""
    loss, gradient, batch, actor = bypass_loss(*BYPASS, f"{CORRECTION}.rollout_is=token")
    assert actor.num_passes == 0
    assert rows_of(batch.old_log_probs) == rows_of(Ragged.from_rows(ENGINE))
    now = flat(OLD).requires_grad_()
    ratio, advantages = (now - flat(ENGINE)).exp(), batch.advantages.values
    held = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    by_hand = torch.where(advantages < 0, held.minimum(-advantages * 3.0), held).sum()
    by_hand.backward()
    assert now.grad is not None
    assert loss.total.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert torch.allclose(gradient, now.grad)
    metrics = to_floats(loss.metrics)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(
        float((flat(OLD) - flat(ENGINE)).exp().clamp(max=2.0).mean()), rel=1e-5
    )
    assert metrics["rollout_corr/kl"] == pytest.approx(float((flat(ENGINE) - flat(OLD)).mean()))


def test_bypass_rejects_by_the_policy_in_training() -> None:
    criteria = [f"{CORRECTION}.rollout_rs=token_k1", f'{CORRECTION}.rollout_rs_threshold="0.5_2"']
    loss, gradient, _, _ = bypass_loss(*BYPASS, *criteria)
    rejected = ((flat(OLD) - flat(ENGINE)).abs() > math.log(2)).tolist()
    assert any(rejected)
    assert not any(g for g, hit in zip(gradient.tolist(), rejected, strict=True) if hit)
    assert loss.count == loss.num_tokens == rejected.count(False)
    everything = [*criteria[:1], f'{CORRECTION}.rollout_rs_threshold="0.999999_1.000001"']
    algorithm, batch, _ = learned(*BYPASS, *everything)
    assert algorithm.loss(PolicyOutputs(flat(ENGINE) + 1, None), batch).num_tokens == 0


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ([], lambda ratio: torch.ones_like(ratio)),
        (["rollout_is=token"], lambda ratio: ratio.clamp(max=2.0)),
        (
            ["rollout_is=sequence", "rollout_is_threshold=1.5"],
            lambda ratio: torch.cat(
                [x.prod().clamp(max=1.5).expand(len(x)) for x in ratio.split([3, 2, 1, 4])]
            ),
        ),
        (
            ["rollout_is=token", "rollout_is_batch_normalize=true"],
            lambda ratio: ratio.clamp(max=2.0) / ratio.clamp(max=2.0).mean(),
        ),
    ],
)
def test_reinforce_in_bypass_mode(
    settings: list[str], weight: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The loss is −w·A·log π with w = π/π_rollout without a gradient."""
    loss, gradient, batch, actor = bypass_loss(*REINFORCE, *[f"{CORRECTION}.{x}" for x in settings])
    expected = -batch.advantages.values * weight((flat(OLD) - flat(ENGINE)).exp())
    assert torch.allclose(gradient, expected, rtol=1e-5)
    assert loss.total.item() == pytest.approx(float((expected * flat(OLD)).sum()), rel=1e-5)
    # Only the mean over a mini-batch needs a pass before its update.
    assert actor.num_passes == ("rollout_is_batch_normalize=true" in settings)


STALENESS = [[0, 0, 0], [1, 1], [3], [0, 1, 1, 3]]
LOGLINEAR = [
    f"{CORRECTION}.bypass_mode=loglinear",
    f"{CORRECTION}.rollout_is=token",
    "async_training.max_staleness=1",
]


def interpolated(*overrides: str) -> tuple[PPO, Experience, Recorder]:
    actor = Recorder()
    algorithm, batch, _ = learned(*LOGLINEAR, *overrides, actor=actor)
    ages = [float(x) for row in STALENESS for x in row]
    stale = batch.response_ids.like(torch.tensor(ages).long())
    return algorithm, replace(batch, staleness=stale), actor


@pytest.mark.parametrize(("level", "bound"), [("token", 2.0), ("sequence", 1.5)])
def test_proximal_policy_is_interpolated_by_staleness(level: str, bound: float) -> None:
    """Compare with a loop: π_prox = π_rollout^(1/(s + 1)) · π^(s/(s + 1)), without a gradient."""
    algorithm, batch, actor = interpolated(
        f"{CORRECTION}.rollout_is={level}", f"{CORRECTION}.rollout_is_threshold={bound}"
    )
    assert actor.num_passes == 0
    now = flat(OLD).requires_grad_()
    loss = algorithm.loss(PolicyOutputs(now, None), batch)
    loss.total.backward()
    total, gradient = 0.0, list[float]()
    for row, advantages in enumerate(rows_of(batch.advantages)):
        triples = list(zip(OLD[row], ENGINE[row], STALENESS[row], strict=True))
        to_prox = [math.exp((new - engine) * s / (s + 1)) for new, engine, s in triples]
        product = math.prod(to_prox)
        for (new, engine, s), weight, a in zip(triples, to_prox, advantages, strict=True):
            ratio = math.exp((new - engine) / (s + 1))
            value = clipped(ratio, a)
            weight = min(product if level == "sequence" else weight, bound)
            total += weight * value
            gradient.append(weight * value if value == -a * ratio else 0.0)
    assert loss.total.item() == pytest.approx(total, rel=1e-5)
    assert now.grad.tolist() == pytest.approx(gradient, rel=1e-4)


def test_interpolation_does_not_depend_on_micro_batches() -> None:
    """Weights and rejection by rows, over the batch and over parts of it."""
    algorithm, batch, _ = interpolated(
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_rs=seq_mean_k2",
        f"{CORRECTION}.rollout_rs_threshold=0.1",
    )
    now = batch.response_ids.like(flat(OLD))

    def gradient(parts: list[list[int]]) -> tuple[torch.Tensor, float, float]:
        given, count, tokens = now.values.clone().requires_grad_(), 0.0, 0.0
        for part in parts:
            index = torch.tensor(part)
            log_probs = now.like(given).select(index).values
            loss = algorithm.loss(PolicyOutputs(log_probs, None), batch.select(index))
            loss.total.backward()
            assert loss.count is not None
            assert loss.num_tokens is not None
            count, tokens = count + loss.count, tokens + loss.num_tokens
        assert given.grad is not None
        return given.grad, count, tokens

    whole, *counts = gradient([[0, 1, 2, 3]])
    assert 0 < counts[0] < len(flat(OLD)), "some rows are rejected"
    for parts in ([[2], [0, 3], [1]], [[3], [2], [1], [0]]):
        grad, *others = gradient(parts)
        assert torch.allclose(grad, whole)
        assert others == counts


WEIGHTS = [f"{CORRECTION}.rollout_is=token"]
OPTIMAL = "algorithm.adv_estimator=optimal_token_baseline"


@pytest.mark.parametrize(
    ("overrides", "message"),
    of_settings(
        [
            ([*LOGLINEAR, "async_training.max_staleness=0"], "generates all rollouts under"),
            ([*LOGLINEAR, f"{CORRECTION}.loss_type=reinforce"], "has no proximal policy"),
            ([*LOGLINEAR, f"{CORRECTION}.rollout_is_batch_normalize=true"], "weights of all rows"),
            ([*LOGLINEAR, f"{CORRECTION}.rollout_is=null"], "no correction for it is chosen"),
            ([*BYPASS, OPTIMAL], "bypass_mode does not compute"),
            ([f"{CORRECTION}.rollout_rs=token_k1"], "has no threshold"),
            (
                [f"{CORRECTION}.rollout_rs=token_k9", f"{CORRECTION}.rollout_rs_threshold=2"],
                "token_k9",
            ),
            ([*WEIGHTS, f"{CORRECTION}.rollout_is_threshold=3.0_1.0"], "is no bound"),
            (
                [*WEIGHTS, f"{CORRECTION}.rollout_is_threshold=0.5_2"],
                r"0\.52 leaves out a ratio of 1",
            ),
            (
                [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=1.5_2.0"],
                r"1\.5_2 leaves out a ratio of 1",
            ),
        ]
    ),
)
def test_inconsistent_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo(*overrides)
