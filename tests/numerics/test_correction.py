"""Tests of rollout correction: weights, rejection and mismatch against plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.runtime.algorithms.bounds import Bounds, Level
from rlctl.runtime.algorithms.importance_weights import importance_weights
from rlctl.runtime.algorithms.rejection import (
    CRITERIA,
    Criterion,
    parse_criteria,
    rejection_mask,
    veto_mask,
)
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens, mismatch
from rlctl.runtime.base.metrics import merge, to_floats


def sampled(log_ratio: list[list[float]], mask: list[list[float]] | None = None) -> SampledTokens:
    row = torch.tensor([i for i, each in enumerate(log_ratio) for _ in each])
    flat = torch.tensor([x for each in log_ratio for x in each])
    kept = (
        torch.ones_like(flat) if mask is None else torch.tensor([x for each in mask for x in each])
    )
    rollout = -1.0 - torch.arange(len(flat)) / 10
    return SampledTokens(rollout + flat, rollout, kept, row, len(log_ratio))


TOKENS = sampled([[0.1, -0.5, 1.2], [0.0, 2.0], [-3.0]], [[1, 1, 1], [1, 0], [1]])


def test_truncated_token_weights() -> None:
    weights, metrics = importance_weights(TOKENS, "token", Bounds(None, 2.0))
    expected = [math.exp(0.1), math.exp(-0.5), 2.0, 1.0, 0.0, math.exp(-3)]
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)
    kept = [*expected[:4], expected[5]]
    assert metrics["rollout_corr/rollout_is_mean"].value == pytest.approx(
        statistics.mean(kept), rel=1e-5
    )
    assert metrics["rollout_corr/rollout_is_std"].value == pytest.approx(
        statistics.pstdev(kept), rel=1e-5
    )
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"].value == pytest.approx(1 / 5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"].value == pytest.approx(1 / 5)


@pytest.mark.parametrize("bounds", [Bounds(None, 2.0), Bounds(0.5, 2.0)])
def test_metrics_of_sequence_weights_are_per_row_and_raw(bounds: Bounds) -> None:
    """Take extremes and fractions of raw row weights, mean and deviation over tokens (verl)."""
    raw = [math.exp(0.8), 1.0, math.exp(-3)]
    low = bounds.low or 0.0
    rows = [min(w, 2.0) if bounds.low is None else w * (low <= w <= 2.0) for w in raw]
    tokens = [rows[0]] * 3 + rows[1:]
    _, metrics = importance_weights(TOKENS, "sequence", bounds)
    expected = {
        "max": max(raw),
        "min": min(raw),
        "ratio_fraction_high": 1 / 3,
        "ratio_fraction_low": 1 / 3,
        "mean": statistics.mean(tokens),
        "std": statistics.pstdev(tokens),
        "eff_sample_size": sum(tokens) ** 2 / 5 / sum(w * w for w in tokens),
        "seq_mean": statistics.mean(rows),
        "seq_std": statistics.stdev(rows),
        "seq_max": max(rows),
        "seq_min": min(rows),
        "seq_max_deviation": max(abs(w - 1) for w in rows),
        "seq_fraction_high": 1 / 3,
        "seq_fraction_low": 1 / 3,
    }
    if bounds.low is not None:
        expected["oob_ratio"] = 4 / 5
    got = {name.removeprefix("rollout_corr/rollout_is_"): metrics[name].value for name in metrics}
    assert got == pytest.approx(expected, rel=1e-5)


def test_metrics_of_weights_do_not_depend_on_the_split_of_rows() -> None:
    first = sampled([[0.1, -0.5, 1.2]], [[1, 1, 1]])
    second = sampled([[0.0, 2.0], [-3.0]], [[1, 0], [1]])
    levels: list[Level] = ["token", "sequence"]
    for level in levels:
        parts = [importance_weights(each, level, Bounds(None, 2.0))[1] for each in (first, second)]
        _, whole = importance_weights(TOKENS, level, Bounds(None, 2.0))
        assert to_floats(merge(parts)) == pytest.approx(to_floats(whole), rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalized_weights_have_mean_1(level: Level) -> None:
    plain, _ = importance_weights(TOKENS, level, Bounds(None, 2.0))
    kept = (
        plain.tolist() if level == "token" else [plain[0].item(), plain[3].item(), plain[5].item()]
    )
    mean = sum(kept) / (5 if level == "token" else 3)
    weights, metrics = importance_weights(TOKENS, level, Bounds(None, 2.0), batch_normalize=True)
    assert weights.tolist() == pytest.approx((plain / mean).tolist(), rel=1e-6)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"].value == pytest.approx(mean)


def test_weights_of_0_are_not_normalized() -> None:
    tokens = sampled([[9.0, -9.0]])
    weights, metrics = importance_weights(tokens, "token", Bounds(0.5, 2.0), batch_normalize=True)
    assert weights.tolist() == [0.0, 0.0]
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"].value == 1.0


def test_weights_carry_no_gradient_and_do_not_overflow() -> None:
    tokens = sampled([[900.0, -900.0]])
    tokens.old_log_probs.requires_grad_()
    weights, _ = importance_weights(tokens, "token", Bounds(None, 1e30))
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize("kind", CRITERIA)
def test_each_criterion_against_a_loop(kind: str) -> None:
    rows = [[0.1, -0.5, 1.2], [0.05, 2.0], [-3.0], [0.2, 0.2]]
    mask = [[1.0, 1, 1], [1, 0], [1], [1, 1]]
    bounds = Bounds(0.6, 1.5) if kind.endswith("k1") else Bounds(None, 0.15)
    scope, _, k = kind.rpartition("_")
    expected: list[float] = []
    for d_row, m_row in zip(rows, mask, strict=True):
        stats = {
            "k1": [-d for d in d_row],
            "k2": [d * d / 2 for d in d_row],
            "k3": [math.exp(d) - 1 - d for d in d_row],
        }[k]
        kept = [s for s, m in zip(stats, m_row, strict=True) if m]
        row_stat = {
            "token": None,
            "seq_sum": sum(kept),
            "seq_mean": statistics.mean(kept),
            "seq_max": max(kept),
        }[scope]
        for s, m in zip(stats, m_row, strict=True):
            value = s if row_stat is None else row_stat
            passed = (
                bounds.low <= math.exp(value) <= bounds.high
                if bounds.low is not None
                else value <= bounds.high
            )
            expected.append(m * passed)
    got, metrics = rejection_mask(sampled(rows, mask), [Criterion(kind, bounds)])
    assert got.tolist() == expected
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].value == pytest.approx(
        1 - sum(expected) / 7
    )


def test_all_criteria_must_be_met() -> None:
    tokens = sampled([[0.0, 0.6], [0.3, 0.3]])
    both, metrics = rejection_mask(tokens, parse_criteria("token_k1, seq_sum_k2", "0.6_2,0.1"))
    assert both.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"].value == 0.25
    assert metrics["rollout_corr/rollout_rs_seq_sum_k2_masked_fraction"].value == 0.5
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"].value == 0.5


@pytest.mark.parametrize("kind", ["token_k1", "seq_mean_k1", "seq_sum_k3"])
def test_metrics_of_a_criterion(kind: str) -> None:
    """Compare with sums over lists, by the definitions of verl's compute_rs_metrics."""
    rows, mask = [[0.9, -0.2, 0.4], [-0.8, 0.5], [0.1]], [[1, 1, 0], [1, 1], [1]]
    low, high = (math.log(0.6), math.log(1.5)) if kind.endswith("k1") else (0.0, 0.3)
    bounds = Bounds(0.6, 1.5) if kind.endswith("k1") else Bounds(None, 0.3)
    _, found = rejection_mask(sampled(rows, mask), [Criterion(kind, bounds)])
    each = [
        [-d if kind.endswith("k1") else math.exp(d) - 1 - d for d, m in zip(*row, strict=True) if m]
        for row in zip(rows, mask, strict=True)
    ]
    if kind.startswith("seq"):
        join = statistics.mean if "mean" in kind else sum
        each = [[float(join(row))] * len(row) for row in each]
    tokens, of_rows = [x for row in each for x in row], [statistics.mean(row) for row in each]
    units = tokens if kind.startswith("token") else of_rows
    beyond = [[x < low or x > high for x in row] for row in each]
    clamped = [min(max(x, low), high) for x in tokens]
    expected = {
        "masked_fraction": statistics.mean(hit for row in beyond for hit in row),
        "seq_masked_fraction": statistics.mean(any(row) for row in beyond),
        "mean": statistics.mean(tokens),
        "max": max(units),
        "min": min(units),
        "std": statistics.pstdev(clamped),
        "fraction_high": statistics.mean(x > high for x in units),
        "fraction_low": statistics.mean(x < low for x in units),
        "seq_mean": statistics.mean(of_rows),
        "seq_std": statistics.stdev(of_rows),
        "seq_max": max(of_rows),
        "seq_min": min(of_rows),
        "seq_max_deviation": max(map(abs, of_rows)),
        "seq_fraction_high": statistics.mean(x > high for x in of_rows),
    }
    if kind.endswith("k1"):
        expected["seq_fraction_low"] = statistics.mean(x < low for x in of_rows)
    prefix = f"rollout_corr/rollout_rs_{kind}_"
    got = {name.removeprefix(prefix): x.value for name, x in found.items() if prefix in name}
    assert got == pytest.approx({name: float(x) for name, x in expected.items()}, abs=1e-6)


def test_extremes_of_the_perplexity() -> None:
    tokens = sampled([[0.2, -0.4], [0.3], [-0.7]], [[1, 1], [1], [1]])
    found = to_floats(mismatch(tokens))
    assert found["rollout_corr/log_ppl_diff_max"] == pytest.approx(0.7)
    assert found["rollout_corr/log_ppl_diff_min"] == pytest.approx(-0.3)
    difference = found["rollout_corr/training_log_ppl"] - found["rollout_corr/rollout_log_ppl"]
    assert difference == pytest.approx(found["rollout_corr/log_ppl_diff"])


def test_veto_rejects_rows_with_an_unlikely_token() -> None:
    tokens = sampled([[0.1, -9.0], [0.2, -9.0], [-3.0, 0.0]], [[1, 1], [1, 0], [1, 1]])
    kept, metrics = veto_mask(tokens, 1e-3)
    assert kept.tolist() == [0, 0, 1, 1, 1, 1]  # the second row's unlikely token is masked
    assert to_floats(metrics) == {"rollout_corr/rollout_is_veto_fraction": pytest.approx(1 / 3)}


def test_parsing_of_thresholds() -> None:
    assert Bounds.parse(2, "t") == Bounds(None, 2.0)
    assert Bounds.parse("0.5_5", "t") == Bounds(0.5, 5.0)
    assert parse_criteria("token_k1", 2.0) == [Criterion("token_k1", Bounds(0.5, 2.0))]
    shared = parse_criteria("token_k1,seq_mean_k3", 2.0)
    assert shared == [
        Criterion("token_k1", Bounds(0.5, 2.0)),
        Criterion("seq_mean_k3", Bounds(None, 2.0)),
    ]


@pytest.mark.parametrize("given", ["", "a", "2_1", "-1", "0", "1_2_3", "0_2", "nan"])
def test_wrong_thresholds_raise(given: str) -> None:
    with pytest.raises(ConfigError, match="is no bound"):
        Bounds.parse(given, "rollout_is_threshold")


@pytest.mark.parametrize(
    ("kinds", "thresholds", "message"),
    [
        ("token_k4", "1", "unknown rejection criterion"),
        ("seq_max_k1", "1", "unknown rejection criterion"),
        ("token_k1,token_k2,token_k3", "2,1", "3 criteria, rollout_rs_threshold has 2"),
        ("token_k1,token_k2", "0.5_2", "takes one upper bound"),
        ("token_k3", "0.5_2", "takes one upper bound"),
    ],
)
def test_wrong_criteria_raise(kinds: str, thresholds: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_criteria(kinds, thresholds)


def test_mismatch_by_hand() -> None:
    """Compare on two rows and one without unmasked tokens, which must not count."""
    trainer = torch.tensor([-1.0, -2.0, -0.5, -7.0])
    engine = torch.tensor([-1.1, -1.8, -0.5, -1.0])
    tokens = SampledTokens(
        trainer, engine, torch.tensor([1.0, 1, 1, 0]), torch.tensor([0, 0, 2, 1]), 3
    )
    got = {name: metric.value for name, metric in mismatch(tokens).items()}
    d = [0.1, -0.2, 0.0]
    diffs = [
        abs(math.exp(a) - math.exp(b))
        for a, b in zip([-1, -2, -0.5], [-1.1, -1.8, -0.5], strict=True)
    ]
    expected = {
        "training/rollout_probs_diff_mean": statistics.mean(diffs),
        "training/rollout_probs_diff_max": max(diffs),
        "training/rollout_probs_diff_std": statistics.stdev(diffs),
        "rollout_corr/kl": statistics.mean([-x for x in d]),
        "rollout_corr/k3_kl": statistics.mean([math.exp(x) - x - 1 for x in d]),
        "rollout_corr/training_ppl": (math.exp(1.5) + math.exp(0.5)) / 2,
        "rollout_corr/rollout_ppl": (math.exp(1.45) + math.exp(0.5)) / 2,
        "rollout_corr/training_log_ppl": (1.5 + 0.5) / 2,
        "rollout_corr/rollout_log_ppl": (1.45 + 0.5) / 2,
        "rollout_corr/log_ppl_diff": 0.05 / 2,
        "rollout_corr/log_ppl_diff_max": 0.05,
        "rollout_corr/log_ppl_diff_min": 0.0,
        "rollout_corr/log_ppl_abs_diff": 0.05 / 2,
        "rollout_corr/ppl_ratio": (math.exp(0.05) + 1) / 2,
        "rollout_corr/chi2_token": statistics.mean([math.exp(2 * x) - 1 for x in d]),
        "rollout_corr/chi2_seq": (math.exp(-0.2) - 1) / 2,
    }
    assert got == pytest.approx(expected, rel=1e-5)


def test_no_unmasked_tokens_give_no_metrics() -> None:
    tokens = sampled([[0.1], [0.2]], [[0], [0]])
    assert mismatch(tokens) == {}
    assert importance_weights(tokens, "token", Bounds(None, 2.0))[0].tolist() == [0.0, 0.0]
