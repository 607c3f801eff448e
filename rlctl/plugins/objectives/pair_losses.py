"""Losses of preference pairs, and their exact gradient by one coefficient per row.

A pair loss f(h_w, h_l) needs both responses of a pair, which ranks and micro-batches may separate.
Its derivatives by h_w and h_l are numbers. They are computed on the controller with the h of the
weights that the update starts from; the worker's loss Σ_i ∂L/∂h_i · h_i then has the gradient of L.
Log-probs of both passes agree, because dropout is off.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlctl.plugins import Params
from rlctl.runtime.algorithms.base import (
    AGGREGATION_KEYS,
    PPO_KEYS,
    Loss,
    Needs,
    PolicyAlgorithm,
    rows_of_groups,
)
from rlctl.runtime.algorithms.mismatch import sampled_log_probs
from rlctl.runtime.base.batch import Ragged, Rollouts, Scored
from rlctl.runtime.base.metrics import Mean, Metrics, Sum, merge
from rlctl.runtime.base.ops import PolicyOutputs, group_sum, masked_sum
from rlctl.runtime.base.roles import Roles


class PairParams(Params):
    """Settings of the pair loss."""

    loss: Literal["sigmoid", "ipo", "simpo"] = Field(
        default="sigmoid", description="sigmoid (DPO), ipo, or simpo (mean log-probs, no reference)"
    )
    beta: float = Field(default=0.1, gt=0, description="β; IPO's τ; 2 to 2.5 is usual for simpo")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="assumed share of wrong preferences: cDPO"
    )
    margin: float = Field(default=0.0, ge=0, description="γ of simpo; its paper takes 0.3 to 1.6")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError("label_smoothing is not defined for loss=ipo; use loss=sigmoid")
        if self.margin and self.loss != "simpo":
            raise ValueError(f"margin is a setting of loss=simpo, not of loss={self.loss}")
        return self

    @property
    def uses_reference(self) -> bool:
        """Return whether h is relative to a reference policy."""
        return self.loss != "simpo"

    def losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of P pairs from h of their chosen and rejected responses, (P,) each.

        With d = h_w − h_l: DPO −log σ(β·d) (arXiv 2305.18290, eq. 7); with label smoothing ε, cDPO
        −(1−ε)·log σ(β·d) − ε·log σ(−β·d) (Mitchell, "A note on DPO with noisy preferences", 2023);
        IPO (d − 1/(2β))² (arXiv 2310.12036, eq. 17); SimPO −log σ(β·d − γ) (arXiv 2405.14734,
        eq. 6).
        """
        difference = chosen - rejected
        if self.loss == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        logits = self.beta * difference - self.margin
        smoothing = self.label_smoothing
        return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


@dataclass(frozen=True, eq=False)
class PairRows(Scored):
    """Rows of pairs with their parts of the loss, which depends on a value x of each row."""

    coefficients: Tensor  # (B,) float32: ∂L/∂x
    constants: Tensor  # (B,) float32: added, so that the rows' losses sum to L
    counts: Tensor  # (B,) float32: half the number of the row's pairs

    @classmethod
    def derive(cls, scored: Scored, x: Tensor, losses: Tensor, pairs: Tensor) -> Self:
        """Return rows with the derivatives of Σ `losses`, (P,) with a graph, by the leaf `x` (B,).

        `pairs` (P, 2) int64 are the rows of each loss.
        """
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        losses = losses.detach()
        rows = pairs.flatten()
        shares = torch.zeros_like(gradient).index_add_(0, rows, losses.repeat_interleave(2) / 2)
        return scored.grow(
            cls,
            coefficients=gradient.float(),
            constants=(shares - gradient * x.detach()).float(),
            counts=torch.bincount(rows, minlength=len(scored)).float() / 2,
        )

    def loss(self, weighted: Tensor) -> Loss:
        """Return the loss from `weighted`, the scalar Σ coefficients·x with a graph.

        Its value is that of the pair losses, and its count the number of pairs.
        """
        total = weighted + self.constants.sum()
        count = float(self.counts.sum())
        return Loss(total, count, {"train/loss": Mean(float(total.detach()), count)})


P = TypeVar("P", bound=PairParams)


@dataclass(frozen=True)
class PairAlgorithm(PolicyAlgorithm[P]):
    """Base of algorithms that update the policy with a pair loss."""

    @property
    def needs(self) -> Needs:
        """The engine, which generates responses in validation, and the loss's reference."""
        return Needs.ENGINE | (Needs.REFERENCE if self.params.uses_reference else Needs.NOTHING)

    unused_keys: ClassVar = (*PPO_KEYS, *AGGREGATION_KEYS)

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Pair the responses and update the actor once per mini-batch; return metrics."""
        groups = scored.group
        pairs = self._pairs(scored, step)  # (P, 2)
        episode = scored.episode_of_row
        kept = torch.isin(episode, episode[pairs]).nonzero().flatten()
        scored = scored.select(kept)
        pairs = torch.searchsorted(kept, pairs)
        reference: Ragged | None = None
        if self.params.uses_reference and len(kept):
            reference = roles.reference.compute_log_probs(scored).log_probs
        updates: list[Metrics] = [{"pairs/count": Sum(0.0)}]
        stored = Needs.GROUPS not in self.needs  # responses of another policy
        for number, rows in enumerate(rows_of_groups(groups, scored.group, self.actor, step)):
            mine = torch.searchsorted(rows, pairs[torch.isin(pairs[:, 0], rows)])
            batch = scored.select(rows)
            ref = reference and reference.select(rows)
            now = sampled_log_probs(roles, batch, has_updated=stored or number > 0)
            batch, metrics = pair_rows(batch, now.log_probs, ref, mine, self.params)
            updates += [metrics, roles.actor.update(batch, self.schedule(step - 1))]
        return merge(updates)

    @abstractmethod
    def _pairs(self, scored: Scored, step: int) -> Tensor:
        """Return the first rows of better and worse episodes of a prompt: (P, 2) int64."""

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return the pair loss of a micro-batch; `outputs` hold (T,)."""
        assert isinstance(batch, PairRows)
        return pair_loss(outputs.log_probs, batch)


def pair_rows(
    scored: Scored, log_probs: Ragged, reference: Ragged | None, pairs: Tensor, params: PairParams
) -> tuple[PairRows, Metrics]:
    """Return rows with the derivatives of the sum of the pairs' losses, and metrics.

    `pairs` (P, 2) int64 are rows of chosen and rejected episodes. h is the sum of log π − log π_ref
    over the unmasked tokens of all rows of an episode; for simpo, the mean of log π.
    """
    episode = scored.episode_of_row

    def over_episode(x: Tensor) -> Tensor:
        return group_sum(x, episode, len(episode))[episode]

    mask = scored.response_mask
    kept = mask.values > 0
    sums = mask.like(torch.where(kept, log_probs.values, 0.0)).sums().double()  # (B,)
    h = over_episode(sums.requires_grad_())
    if reference is not None:
        h = h - over_episode(mask.like(torch.where(kept, reference.values, 0.0)).sums())
    if not params.uses_reference:
        h = h / over_episode(mask.sums()).clamp(min=1)
    chosen = h[pairs[:, 0]]
    rejected = h[pairs[:, 1]]
    losses = params.losses(chosen, rejected)
    rows = PairRows.derive(scored, sums, losses, pairs)
    return rows, _metrics(losses.detach(), chosen.detach(), rejected.detach(), params.beta)


def pair_loss(log_probs: Tensor, batch: PairRows) -> Loss:
    """Return the loss of a micro-batch from the log-probs (T,) of its response tokens."""
    mask = batch.response_mask.values
    weights = batch.coefficients[batch.response_ids.row_of_token]
    return batch.loss(masked_sum(weights * log_probs, mask))


def _metrics(losses: Tensor, chosen: Tensor, rejected: Tensor, beta: float) -> Metrics:
    """Return loss, rewards β·h, their margin and accuracy over pairs; (P,) each."""
    count = len(losses)
    values = {
        "loss": losses,
        "reward_chosen": beta * chosen,
        "reward_rejected": beta * rejected,
        "margin": beta * (chosen - rejected),
        "accuracy": (chosen > rejected).double(),
    }
    means = {f"pairs/{name}": Mean(float(value.sum()), count) for name, value in values.items()}
    return {**(means if count else {}), "pairs/count": Sum(float(count))}
