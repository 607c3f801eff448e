"""Tests of the tensor operations: masked moments, groups, log-probs and entropy."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.runtime.base import ops
from tests.tolerance import assert_as_exact


def test_masked_moments_by_hand() -> None:
    x, mask = torch.tensor([[1.0, 2.0], [6.0, 99.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert float(ops.masked_mean(x, mask)) == pytest.approx(3.0)
    assert float(ops.masked_var(x, mask)) == pytest.approx((4 + 1 + 9) / 2)
    whitened = ops.masked_whiten(x, mask)
    assert whitened.flatten().tolist() == pytest.approx(
        [(v - 3) / math.sqrt(7) for v in (1, 2, 6, 99)]
    )


def test_masked_values_do_not_count_even_if_not_finite() -> None:
    x, mask = (
        torch.tensor([1.0, float("nan"), 3.0, float("inf")]),
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
    )
    assert float(ops.masked_mean(x, mask)) == pytest.approx(2.0)
    assert float(ops.masked_mean(x, torch.zeros(4))) == 0.0


@pytest.mark.parametrize("n", [0, 1])
def test_variance_of_fewer_than_two_tokens_raises(n: int) -> None:
    mask = torch.zeros(3)
    mask[:n] = 1
    with pytest.raises(ValueError, match=f"got {n}"):
        ops.masked_var(torch.ones(3), mask)


def test_group_stats_against_a_loop() -> None:
    scores, group = torch.tensor([1.0, 4.0, 2.0, 9.0, 0.5]), torch.tensor([70, -3, 70, 5, 70])
    stats = ops.group_stats(scores, group)
    for i in range(5):
        members = scores[group == group[i]]
        single = len(members) == 1
        assert float(stats.mean[i]) == pytest.approx(0.0 if single else float(members.mean()))
        assert float(stats.std[i]) == pytest.approx(1.0 if single else float(members.std()))
        assert int(stats.size[i]) == len(members)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 3 * 11, 2**20])
def test_log_probs_and_entropy_equal_log_softmax(
    temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_CHUNK_CPU", chunk)
    logits = torch.randn(8, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (8,))
    weight_l, weight_h = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    log_probs, entropy = ops.log_probs_and_entropy(logits, targets, temperature, with_entropy=True)
    assert entropy is not None
    (grad,) = torch.autograd.grad((log_probs * weight_l + entropy * weight_h).sum(), logits)

    full = (logits / temperature).log_softmax(-1)
    expected_l, expected_h = full[torch.arange(8), targets], -(full.exp() * full).sum(-1)
    (expected,) = torch.autograd.grad((expected_l * weight_l + expected_h * weight_h).sum(), logits)
    torch.testing.assert_close(log_probs, expected_l)
    torch.testing.assert_close(entropy, expected_h)
    torch.testing.assert_close(grad, expected)

    alone = ops.log_probs_from_logits(logits, targets, temperature)
    torch.testing.assert_close(alone, expected_l)
    (grad,) = torch.autograd.grad((alone * weight_l).sum(), logits)
    (expected,) = torch.autograd.grad(
        ((logits / temperature).log_softmax(-1)[torch.arange(8), targets] * weight_l).sum(), logits
    )
    torch.testing.assert_close(grad, expected)
    none, entropy = ops.log_probs_and_entropy(logits[:0], targets[:0], temperature, True)
    assert entropy is not None
    (none.sum() + entropy.sum()).backward()
    assert none.shape == entropy.shape == (0,)


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = (8 * torch.randn(6, 300)).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(300, (6,))
    log_probs, entropy = ops.log_probs_and_entropy(logits, targets, 1.0, with_entropy=True)
    full = logits.detach().double().log_softmax(-1)
    assert entropy is not None
    assert log_probs.dtype == entropy.dtype == torch.float32
    second = logits.detach().float().log_softmax(-1)
    (scores, entropies), (exact_scores, exact_entropies) = (
        (each[torch.arange(6), targets], -(each.exp() * each).sum(-1)) for each in (second, full)
    )
    assert_as_exact(log_probs, scores, exact_scores)
    assert_as_exact(entropy, entropies, exact_entropies)
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_forbidden_and_extreme_logits_give_no_nan() -> None:
    logits = torch.tensor(
        [[0.0, -math.inf, 0.0], [1e4, 0.0, -1e4], [-math.inf, 3.0, -math.inf]], requires_grad=True
    )
    targets = torch.tensor([0, 0, 1])
    log_probs, entropy = ops.log_probs_and_entropy(logits, targets, 1.0, with_entropy=True)
    assert entropy is not None
    assert log_probs.tolist() == pytest.approx([-math.log(2), 0.0, 0.0])
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0, 0.0])
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([0.5, 0, -0.5, 0, 0, 0, 0, 0, 0])


def test_log_probs_need_no_second_vocabulary_matrix() -> None:
    """Measure the peak memory in addition to the logits: their gradient and little more."""
    logits = torch.randn(2048, 4096, requires_grad=True)  # 32 MiB
    targets = torch.zeros(2048, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profile:
        log_probs, entropy = ops.log_probs_and_entropy(logits, targets, 0.7, with_entropy=True)
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    peak = live = 0
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, live)
    assert logits.nbytes <= peak < 1.6 * logits.nbytes


def test_sum_of_squared_probs() -> None:
    logits = 3 * torch.randn(5, 13)
    torch.testing.assert_close(
        ops.sum_of_squared_probs(logits, 0.8), (logits / 0.8).softmax(-1).square().sum(-1)
    )
