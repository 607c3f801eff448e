"""Tests of the value loss and of its metrics."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.runtime.algorithms.aggregate import aggregate, count
from rlctl.runtime.algorithms.value_loss import value_loss
from rlctl.tracking.metrics import Std, merge
from tests.numerics.batches import golden_rows


def test_golden() -> None:
    rows = golden_rows()
    old, mask = rows.given("values").flatten(), rows.mask.flatten()
    losses, metrics = value_loss(3 * old, old, rows.rewards.flatten(), mask, cliprange=0.5)
    row = torch.arange(3).repeat_interleave(4)
    divisor = count(mask, row, 3, "token-mean")
    assert divisor is not None
    assert float(aggregate(losses, mask, row, 3, "token-mean")) / divisor == pytest.approx(0.314375)
    assert metrics["critic/vf_clipfrac"].value == pytest.approx(0.25)


def test_value_and_gradient_of_each_token() -> None:
    rng = torch.Generator().manual_seed(0)
    old, new, returns = (torch.randn(40, generator=rng) for _ in range(3))
    leaf = new.clone().requires_grad_()
    losses, metrics = value_loss(leaf, old, returns, torch.ones(40), cliprange=0.5)
    losses.sum().backward()
    assert leaf.grad is not None
    clips = 0
    for t in range(40):
        v, o, r = float(new[t]), float(old[t]), float(returns[t])
        held = min(max(v, o - 0.5), o + 0.5)
        clipped = (held - r) ** 2 > (v - r) ** 2
        clips += clipped
        assert float(losses[t].detach()) == pytest.approx(
            0.5 * max((v - r) ** 2, (held - r) ** 2), rel=1e-5
        )
        assert float(leaf.grad[t]) == pytest.approx(0.0 if clipped else v - r, rel=1e-5)
    assert metrics["critic/vf_clipfrac"].value == clips / 40
    assert metrics["critic/vpred_mean"].value == pytest.approx(float(new.mean()), rel=1e-6)


def test_explained_variance_joins_exactly() -> None:
    """Join uneven parts with an offset that needs float64; masked tokens do not count."""
    rng = torch.Generator().manual_seed(1)
    returns = 1000 + torch.randn(50, generator=rng)
    old = returns + 0.5 * torch.randn(50, generator=rng)
    mask = (torch.rand(50, generator=rng) < 0.7).float()
    cuts = [slice(0, 3), slice(3, 4), slice(4, 50)]
    joined = merge(value_loss(old[c], old[c], returns[c], mask[c], 0.5)[1] for c in cuts)
    kept_returns, kept_error = returns[mask > 0].double(), (returns - old)[mask > 0].double()
    expected = 1 - float(kept_error.var()) / (float(kept_returns.var()) + 1e-5)
    assert joined["critic/vf_explained_var"].value == pytest.approx(expected, rel=1e-6)


def test_explained_variance_of_one_token_is_nan() -> None:
    one = torch.ones(1)
    assert math.isnan(value_loss(one, one, one, one, 0.5)[1]["critic/vf_explained_var"].value)


def test_std_joins_exactly() -> None:
    values = [0.1, 0.4, 0.35, 0.8]
    parts = [Std(len(p), sum(p), sum(x * x for x in p)) for p in (values[:1], values[1:])]
    assert parts[0].join(parts[1]).value == pytest.approx(
        float(torch.tensor(values).double().std())
    )
    assert math.isnan(parts[0].value)
