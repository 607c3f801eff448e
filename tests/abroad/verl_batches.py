"""Random ragged batches as verl's rectangles and as rlctl's tokens, and the loss of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import verl.trainer.ppo.core_algos as core
from torch import Tensor
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

from rlctl.recipes.schema import Config
from rlctl.runtime.algorithms.correction import Correction
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens
from rlctl.runtime.base.batch import Experience, Ragged
from rlctl.runtime.base.ops import PolicyOutputs
from tests.configs import configured
from tests.settings import given

LOW, HIGH, DUAL, WIDTH = 0.2, 0.28, 3.0, 13
KL, ENTROPY = 0.1, 0.01
ACTOR = "actor_rollout_ref.actor"
BASE = (
    *given(n=2, response=WIDTH, train="[t]", model="m", batch=4, mini_batch=4),
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.clip_ratio_low={LOW}",
    f"{ACTOR}.clip_ratio_high={HIGH}",
    f"{ACTOR}.clip_ratio_c={DUAL}",
)


@contextmanager
def float64() -> Iterator[None]:
    """Create tensors in float64, so that differences of formulas are not those of rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Rectangle:
    """B rows of up to WIDTH tokens, in groups of two to four: verl's layout."""

    mask: Tensor  # (B, WIDTH), as all of these: 1 = the policy's
    old: Tensor
    now: Tensor
    rollout: Tensor
    ref: Tensor
    entropy: Tensor
    advantages: Tensor  # one number per row
    rewards: Tensor  # 0 but on the last token of a row
    values: Tensor
    squares: Tensor  # Σ π²
    group: Tensor  # (B,)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, also a tool's: (B,)."""
        return (torch.arange(1, self.mask.shape[1] + 1) * (self.mask > 0)).amax(1).long()

    @property
    def inside(self) -> Tensor:
        """True where a row has a token: (B, WIDTH)."""
        return torch.arange(self.mask.shape[1]) < self.lengths[:, None]

    def ragged(self, x: Tensor) -> Ragged:
        """Return (B, WIDTH) as the tokens of the rows."""
        return Ragged.from_padded(x, self.lengths)

    def rectangle(self, tokens: Tensor) -> Tensor:
        """Return the values (T,) of the rows' tokens as (B, WIDTH)."""
        out = torch.zeros_like(self.mask)
        out[self.inside] = tokens
        return out

    def sampled(self) -> SampledTokens:
        """Return the tokens that rollout correction compares."""
        mask = self.ragged(self.mask)
        old, engine = self.ragged(self.old).values, self.ragged(self.rollout).values
        return SampledTokens(old, engine, mask.values, mask.row_of_token, len(self.mask))


def draw(seed: int, holes: bool = True, scale: float = 0.5) -> Rectangle:
    """Return a random batch; `holes`: tokens of tools within some rows. `scale`: log-ratios."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, int(rng.integers(1, 4)))
    rows = int(sizes.sum())
    shape = rows, WIDTH
    mask = np.zeros(shape)
    for row in range(rows):
        length = WIDTH if row == 0 else int(rng.integers(1, WIDTH + 1))
        mask[row, :length] = 1
        if holes and length > 2 and rng.random() < 0.6:
            mask[row, : length - 1] = rng.random(length - 1) < 0.7
    last = (np.arange(WIDTH) * mask).max(1).astype(int)
    rewards = np.zeros(shape)
    rewards[np.arange(rows), last] = rng.choice([0.0, 1.0, rng.normal()], rows)
    old = -rng.exponential(1, shape)
    group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Rectangle(
        mask=torch.tensor(mask),
        old=torch.tensor(old),
        now=torch.tensor(-abs(old + rng.normal(0, scale, shape))),
        rollout=torch.tensor(-abs(old + rng.normal(0, 0.3, shape))),
        ref=torch.tensor(-rng.exponential(1, shape)),
        entropy=torch.tensor(rng.exponential(1, shape)),
        advantages=torch.tensor(np.repeat(rng.normal(0, 1, (rows, 1)), WIDTH, 1)),
        rewards=torch.tensor(rewards),
        values=torch.tensor(rng.normal(0, 1, shape)),
        squares=torch.tensor(rng.uniform(0.05, 0.9, shape)),
        group=torch.tensor(group),
    )


def experience(batch: Rectangle, weights: Tensor | None = None) -> Experience:
    """Return the batch as the input of an update; `weights` of a correction are (B, WIDTH)."""
    mask, rows = batch.ragged(batch.mask), len(batch.mask)
    nothing = mask.like(torch.zeros_like(mask.values))
    return Experience(
        prompt_ids=Ragged.from_rows([[1]] * rows, dtype=torch.int64),
        group=batch.group,
        rows=[],
        response_ids=mask.like(torch.zeros(len(mask.values), dtype=torch.int64)),
        response_mask=mask,
        rollout_log_probs=batch.ragged(batch.rollout),
        finish=["stop"] * rows,
        scores=torch.zeros(rows),
        components={},
        failed=torch.zeros(rows, dtype=torch.bool),
        rewards=nothing,
        old_log_probs=batch.ragged(batch.old),
        advantages=batch.ragged(batch.advantages),
        ref_log_probs=batch.ragged(batch.ref),
        is_weights=None if weights is None else batch.ragged(weights),
    )


@cache
def config_of(*settings: str) -> Config:
    """Return the configuration of rlctl with these settings."""
    return configured("ppo_trainer", BASE, settings)


def our_loss(
    batch: Rectangle, *settings: str, weights: Tensor | None = None, old: Tensor | None = None
) -> tuple[float, Tensor, dict[str, float]]:
    """Return rlctl's loss, its gradient (B, WIDTH) and its metrics."""
    algorithm = PPO.from_config(config_of(*settings), num_steps=1)
    rows = experience(batch, weights)
    rows = rows if old is None else replace(rows, old_log_probs=batch.ragged(old))
    now = batch.ragged(batch.now).values.clone().requires_grad_()
    torch.manual_seed(0)  # of Clip-Cov's draws
    found = algorithm.loss(PolicyOutputs(now, batch.ragged(batch.entropy).values), rows)
    loss = found.total / (found.count or 1.0)
    loss.backward()
    assert now.grad is not None
    metrics = {name: metric.value for name, metric in found.metrics.items()}
    return float(loss.detach()), batch.rectangle(now.grad), metrics


def verl_config(name: str, mode: str, batch: Rectangle, **policy: Any) -> ActorConfig:
    """Return verl's configuration of an actor, with the sizes that its workers set."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=len(batch.mask),
        clip_ratio=LOW,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        loss_agg_mode=mode,
        loss_scale_factor=WIDTH,
        policy_loss=PolicyLossConfig(loss_mode=name, **policy),
    )
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=float(batch.mask.sum()),
        global_batch_size=len(batch.mask),
        loss_scale_factor=WIDTH,
    )
    return config


def verl_loss(
    batch: Rectangle, config: ActorConfig, terms: bool, weights: Tensor | None = None
) -> tuple[float, Tensor, dict[str, float]]:
    """Return verl's loss as its `ppo_loss` joins the terms, its gradient and its metrics."""
    now, mode, sizes = batch.now.clone().requires_grad_(), config.loss_agg_mode, {}
    sizes = config.global_batch_info
    torch.manual_seed(0)
    function = core.get_policy_loss_fn(config.policy_loss.loss_mode)
    args = batch.old, now, batch.advantages, batch.mask, mode, config, weights
    loss, metrics = function(*args)
    if terms:
        entropy = core.agg_loss(batch.entropy, batch.mask, mode, **sizes)
        kl = core.kl_penalty(now, batch.ref, "low_var_kl")
        kl = core.agg_loss(kl, batch.mask, mode, **sizes)
        metrics |= {"actor/entropy_loss": float(entropy), "actor/kl_loss": float(kl.detach())}
        metrics["actor/pg_loss"] = float(loss.detach())
        loss = loss - ENTROPY * entropy + KL * kl
    loss.backward()
    assert now.grad is not None
    return float(loss.detach()), now.grad * batch.mask, metrics


def correction_of(**settings: Any) -> Correction:
    """Return the correction with these settings of `algorithm.rollout_correction`."""
    section = config_of().algorithm.rollout_correction.model_copy(update=settings)
    return Correction.from_config(section)
