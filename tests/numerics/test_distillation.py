"""Losses of distillation against formulas in plain Python, and the log-probs that they need."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.distill import Distill, DistillParams, Graded
from rlctl.runtime.batch import Ragged
from rlctl.runtime.model import causal_lm
from rlctl.runtime.model.causal_lm import PolicyModel, PolicyOutputs
from rlctl.runtime.model.sequences import Sequences
from tests.models import tiny_model
from tests.numerics.batches import scored_batch

MASK = [1, 1, 0, 1, 1, 1, 1, 0, 1]
K = 3


def algorithm(**settings: Any) -> Distill:
    config = compose("distill", ["actor_rollout_ref.ref.model.path=teacher"]).config
    return Distill.from_config(config, 10, DistillParams.model_validate(settings))


def graded(teacher: Tensor) -> Graded:
    scored = scored_batch()
    mask = scored.response_mask.like(torch.tensor(MASK, dtype=torch.float32))
    fields = {**vars(scored), "response_mask": mask}
    return Graded(**fields, teacher_log_probs=mask.like(teacher))


def test_reverse_kl_equals_a_loop() -> None:
    rng = torch.Generator().manual_seed(1)
    teacher, now = (-3 * torch.rand(len(MASK), generator=rng) for _ in range(2))
    now.requires_grad_()
    batch = graded(teacher)
    loss = algorithm(is_threshold=1.5).loss(PolicyOutputs(now, None), batch)
    (gradient,) = torch.autograd.grad(loss.total, now)
    expected = [
        m * min(math.exp(p - e), 1.5) * (p - t)
        for m, p, e, t in zip(
            MASK,
            now.tolist(),
            batch.rollout_log_probs.values.tolist(),
            teacher.tolist(),
            strict=True,
        )
    ]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6)
    assert loss.count == sum(MASK)
    kl = sum(m * (p - t) for m, p, t in zip(MASK, now.tolist(), teacher.tolist(), strict=True))
    assert loss.metrics["distill/reverse_kl"].value == pytest.approx(kl / sum(MASK), abs=1e-6)


def test_forward_kl_equals_a_loop() -> None:
    rng = torch.Generator().manual_seed(2)
    teacher, now = (torch.randn(len(MASK), 8, generator=rng).log_softmax(-1) for _ in range(2))
    teacher, now = teacher[:, :K], now[:, :K].requires_grad_()
    outputs = PolicyOutputs(now.detach()[:, 0], None, None, None, now)
    loss = algorithm(loss_mode="forward_kl_topk").loss(outputs, graded(teacher))
    (gradient,) = torch.autograd.grad(loss.total, now)
    total = 0.0
    for m, p_row, t_row, slopes in zip(
        MASK, now.tolist(), teacher.tolist(), gradient.tolist(), strict=True
    ):
        total += m * sum(math.exp(t) * (t - p) for p, t in zip(p_row, t_row, strict=True))
        assert slopes == pytest.approx([-m * math.exp(t) for t in t_row], abs=1e-6)
    assert loss.total.item() == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("chunk", [2**28, 1000])
def test_candidates_are_the_most_probable_tokens(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with a softmax of the model's logits, whole and in chunks of the vocabulary."""
    monkeypatch.setattr(causal_lm, "MAX_LOGITS", chunk)
    model = PolicyModel(tiny_model().double(), temperature=0.7)
    prompt = Ragged.from_rows([[5, 6, 7], [8]], torch.int64)
    response = Ragged.from_rows([list(range(10, 30)), [9, 4]], torch.int64)
    best = model(Sequences.from_ragged(prompt, response), top_k=K)
    assert best.candidates is not None
    assert best.candidate_log_probs is not None
    rows = []
    for own, other in zip(prompt.rows(), response.rows(), strict=True):
        logits = model.hf(torch.cat([own, other])[None]).logits[0]
        rows.append((logits[len(own) - 1 : -1] / 0.7).log_softmax(-1))
    expected = torch.cat(rows).topk(K)
    assert torch.equal(best.candidates, expected.indices)
    torch.testing.assert_close(best.candidate_log_probs, expected.values, rtol=0, atol=1e-9)
    given = response.like(torch.randint(0, 60, (len(response.values), 2)))
    again = model(Sequences.from_ragged(prompt, response, given)).candidate_log_probs
    assert again is not None
    torch.testing.assert_close(again, torch.cat(rows).gather(-1, given.values), rtol=0, atol=1e-9)
