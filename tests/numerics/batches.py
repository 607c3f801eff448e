"""Batches for numerical tests: fixed ones for golden numbers of verl, and random ragged ones."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import AdvantageInputs
from rlctl.runtime.algorithms.policy_losses.base import PolicyTokens
from rlctl.runtime.base.batch import Ragged, Scored


def golden_rows() -> AdvantageInputs:
    """Return three rows in groups of two and one; the last has a masked token inside."""
    return AdvantageInputs(
        rewards=torch.tensor([[0, 0, 1, 0], [0, 0.5, 0, 0], [0, 0, 0, 2]]),
        mask=torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1]]),
        group=torch.tensor([0, 0, 1]),
        values=torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 0.2], [0, 0.1, 0.2, 0.3]]),
        greedy_scores=torch.tensor([0.5, 0, 1]),
    )


def golden_tokens(log_probs: Tensor | None = None) -> PolicyTokens:
    """Return two rows of four tokens; one and two tokens at the end are masked."""
    given = torch.tensor([-1, -2, -0.5, -3, -0.2, -1.5, -9, -9]) if log_probs is None else log_probs
    return PolicyTokens(
        log_probs=given,
        old_log_probs=torch.tensor([-1.2, -1.5, -0.6, -3, -1.5, -1.4, -9, -9]),
        advantages=torch.tensor([1, -1, 2, 0, -1, 0.5, 3, 3]),
        mask=torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0]),
        row=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        num_rows=2,
    )


def random_rows(seed: int, rows: int = 9, width: int = 7) -> AdvantageInputs:
    """Return ragged rows with masked tool output, in interleaved groups of one to four rows.

    About half of the scores are 0.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=rng)
    lengths[0] = width
    inside = torch.arange(width) < lengths[:, None]
    mask = (inside & (torch.rand(rows, width, generator=rng) < 0.8)).float()
    mask[torch.arange(rows), lengths - 1] = 1.0  # the policy wrote the last token
    rewards = (
        torch.randn(rows, width, generator=rng) * mask * (torch.rand(rows, 1, generator=rng) < 0.5)
    )
    group = torch.tensor([5, 7, 5, 7, 5, 7, 9, 5, 11])[:rows]
    # A turn begins after a masked token.
    turn = torch.nn.functional.pad((inside & (mask == 0)).cumsum(1), (1, 0))[:, :width] * inside
    return AdvantageInputs(
        rewards=rewards,
        mask=mask,
        group=group,
        turn=turn,
        values=torch.randn(rows, width, generator=rng),
        greedy_scores=torch.randn(rows, generator=rng),
        components={
            "correct": torch.randn(rows, generator=rng),
            "format": 100 * torch.rand(rows, generator=rng),
        },
        log_probs=-torch.rand(rows, width, generator=rng),
        sum_pi_squared=torch.rand(rows, width, generator=rng),
    )


def random_tokens(seed: int, lengths: tuple[int, ...] = (5, 1, 8, 3, 6)) -> PolicyTokens:
    """Return tokens with ratios from 1/20 to 20 and advantages of both signs and exactly 0.

    Some tokens are masked; row 1 has no unmasked token.
    """
    rng = torch.Generator().manual_seed(seed)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    total = len(row)
    mask = (torch.rand(total, generator=rng) < 0.8).float()
    mask[row == 1] = 0.0
    old = -3 * torch.rand(total, generator=rng)
    return PolicyTokens(
        log_probs=old + torch.randn(total, generator=rng),
        old_log_probs=old,
        advantages=torch.randn(total, generator=rng) * (torch.rand(total, generator=rng) < 0.9),
        mask=mask,
        row=row,
        num_rows=len(lengths),
    )


def scored_batch(log_probs: list[list[float]] | None = None) -> Scored:
    """Return four scored responses in two groups, with the engine's `log_probs` of each token."""
    given = [[-1.0, -0.5, -2.0], [-0.1, -3.0], [-1.2], [-0.7, -0.2, -0.9]]
    rollout = Ragged.from_rows(given if log_probs is None else log_probs)
    return Scored(
        prompt_ids=Ragged.from_rows([[1, 2]] * 4, dtype=torch.int64),
        group=torch.tensor([0, 0, 1, 1]),
        rows=[],
        response_ids=rollout.like(torch.full((len(rollout.values),), 5)),
        response_mask=rollout.like(torch.ones(len(rollout.values))),
        rollout_log_probs=rollout,
        finish=["stop"] * 4,
        scores=torch.tensor([1.0, 0.0, 0.5, 1.0]),
        components={},
        failed=torch.zeros(4, dtype=torch.bool),
    )
