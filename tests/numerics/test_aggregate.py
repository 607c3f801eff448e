"""Tests of aggregation: loss and gradient do not depend on the split of a mini-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.errors import ConfigError
from rlctl.plugins import names
from rlctl.runtime.algorithms.aggregate import MODES, aggregate, count
from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    load_policy_loss,
)
from tests.numerics.batches import golden_tokens, random_tokens
from tests.plugin_folders import is_there

GOLDEN = {  # aggregates of the advantages of `golden_tokens`, computed with verl 0.9.1
    "token-mean": 0.3,
    "token-sum": 1.5,
    "seq-mean-token-sum": 0.75,
    "seq-mean-token-mean": 0.208333,
    "seq-mean-token-sum-norm": 0.1875,
}


@pytest.mark.parametrize("mode", MODES)
def test_golden(mode: str) -> None:
    tokens = golden_tokens()
    total = aggregate(tokens.advantages, tokens.mask, tokens.row, 2, mode, width=4)
    divisor = count(tokens.mask, tokens.row, 2, mode, width=4)
    assert float(total) / (1.0 if divisor is None else divisor) == pytest.approx(
        GOLDEN[mode], abs=1e-6
    )
    assert (divisor is None) == (mode == "token-sum")


def select(tokens: PolicyTokens, rows: list[int]) -> PolicyTokens:
    """Return the tokens of `rows`, which are renumbered as in a micro-batch."""
    keep = torch.cat([(tokens.row == row).nonzero().squeeze(-1) for row in rows])
    number = {row: i for i, row in enumerate(rows)}
    fields = ("log_probs", "old_log_probs", "advantages", "mask")
    return replace(
        tokens,
        **{name: getattr(tokens, name)[keep] for name in fields},
        row=torch.tensor([number[row] for row in tokens.row[keep].tolist()]),
        num_rows=len(rows),
    )


def in_float64(tokens: PolicyTokens) -> PolicyTokens:
    """Return the tokens in float64, where sums in another order differ by 1e-15."""
    fields = ("log_probs", "old_log_probs", "advantages", "mask")
    return replace(tokens, **{name: getattr(tokens, name).double() for name in fields})


def loss_and_gradient(
    tokens: PolicyTokens, parts: list[list[int]], name: str, mode: str
) -> tuple[float, torch.Tensor]:
    leaf = tokens.log_probs.clone().requires_grad_()
    total, divisor = torch.zeros((), dtype=leaf.dtype), 0.0
    for rows in parts:
        part = select(replace(tokens, log_probs=leaf), rows)
        losses, _ = load_policy_loss(name, {})(part, ClipRange(low=0.2, high=0.3, c=3.0))
        total = total + aggregate(losses, part.mask, part.row, part.num_rows, mode, width=16)
        divisor += count(part.mask, part.row, part.num_rows, mode, width=16) or 0.0
    loss = total if mode == "token-sum" else total / divisor
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


LOSSES = ["vanilla", *(["gspo", "sapo", "geo_mean", "cispo"] if is_there("objectives") else [])]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    parts=st.integers(1, 5),
    mode=st.sampled_from(MODES),
    name=st.sampled_from(LOSSES),
    seed=st.integers(0, 2**16),
)
def test_loss_does_not_depend_on_the_split(
    lengths: list[int], parts: int, mode: str, name: str, seed: int
) -> None:
    tokens = in_float64(random_tokens(seed, tuple(lengths)))
    tokens.mask[0] = 1.0  # at least one unmasked token
    owner = torch.randint(
        parts, (len(lengths),), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    pieces = [[row for row, part in enumerate(owner) if part == i] for i in range(parts)]
    whole_loss, whole = loss_and_gradient(tokens, [list(range(len(lengths)))], name, mode)
    loss, gradient = loss_and_gradient(tokens, [rows for rows in pieces if rows], name, mode)
    assert loss == pytest.approx(whole_loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", sorted(set(names("policy_losses")) - {"clip_cov", "kl_cov"}))
@pytest.mark.parametrize("mode", MODES)
def test_no_loss_depends_on_the_split_in_any_mode(name: str, mode: str) -> None:
    """Compare two splits. Clip-Cov and KL-Cov depend on the split by definition."""
    tokens = random_tokens(11)
    _, whole = loss_and_gradient(tokens, [[0, 1, 2, 3, 4]], name, mode)
    _, halves = loss_and_gradient(tokens, [[4, 1], [0], [2, 3]], name, mode)
    torch.testing.assert_close(halves, whole, rtol=1e-6, atol=1e-9)


def test_wrong_mode_or_missing_width_raises() -> None:
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        count(torch.ones(1), torch.zeros(1, dtype=torch.int64), 1, "token_mean")
    with pytest.raises(ValueError, match="width"):
        count(torch.ones(1), torch.zeros(1, dtype=torch.int64), 1, "seq-mean-token-sum-norm")
