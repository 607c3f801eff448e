"""Losses of distillation against formulas in plain Python, and the log-probs that they need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.plugins.objectives.distill import Distill, DistillParams, Graded
from rlctl.runtime.algorithms.references import RoutedReference
from rlctl.runtime.base.batch import LogProbs, Ragged, Rollouts, Scored
from rlctl.runtime.base.budget import OomRetry
from rlctl.runtime.base.ops import PolicyOutputs
from rlctl.runtime.base.roles import Reference
from rlctl.runtime.model import causal_lm
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.sequences import Sequences
from tests.configs import configured
from tests.models import tiny_model
from tests.numerics.batches import scored_batch

MASK = [1, 1, 0, 1, 1, 1, 1, 0, 1]
K = 3


def algorithm(**settings: Any) -> Distill:
    config = configured("distill", ["actor_rollout_ref.ref.model.path=teacher"], ())
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


@pytest.mark.parametrize("mode", ["reverse_kl", "forward_kl_topk"])
def test_bounds_on_tokens_equal_a_loop(mode: str) -> None:
    """Bound the divergence of each token, and the log-probs of forward KL from below."""
    rng = torch.Generator().manual_seed(3)
    teacher, now = (4 * torch.randn(len(MASK), 8, generator=rng) for _ in range(2))
    teacher, now = teacher.log_softmax(-1)[:, :K], now.log_softmax(-1)[:, :K]
    settings = {"loss_max_clamp": 0.4, "log_prob_min_clamp": -3.0}
    if mode == "reverse_kl":
        outputs, given = PolicyOutputs(now[:, 0], None), teacher[:, 0]
        pairs = zip(now[:, 0].tolist(), given.tolist(), strict=True)
        found = [p - t for p, t in pairs]
    else:
        outputs, given = PolicyOutputs(now[:, 0], None, None, None, now), teacher
        found = [
            sum(
                math.exp(max(t, -3.0)) * (max(t, -3.0) - max(p, -3.0))
                for p, t in zip(p_row, t_row, strict=True)
            )
            for p_row, t_row in zip(now.tolist(), given.tolist(), strict=True)
        ]
    expected = [min(max(each, -0.4), 0.4) for each in found]
    assert expected != found
    metrics = algorithm(loss_mode=mode, **settings).loss(outputs, graded(given)).metrics
    mean = sum(m * each for m, each in zip(MASK, expected, strict=True)) / sum(MASK)
    assert metrics[f"distill/{mode}"].value == pytest.approx(mean, abs=1e-6)


TEACHERS = {
    "numbers": {"key": "arithmetic", "model_path": "a"},
    "words": {"key": "poems", "model_path": "b"},
    "others": {"model_path": "c"},
}


def rows_of(*sources: str) -> Scored:
    scored = scored_batch()
    made = [PromptRow(source, [], "", extra_info={"domain": "poems"}) for source in sources]
    return replace(scored.select(torch.arange(len(made))), rows=made)


@dataclass
class LengthReference(Reference):
    """Reference whose log-probs are its number plus those of the engine."""

    number: float
    asked: list[int]

    def compute_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        self.asked.append(len(batch))
        given = batch.rollout_log_probs
        best = given.like((given.values[:, None] - torch.arange(top_k)) if top_k else given.values)
        return LogProbs(given.like(given.values + self.number), None, None, best, best)

    def pop_oom_retries(self) -> list[OomRetry]:
        return []


@pytest.mark.parametrize("top_k", [0, K])
def test_each_row_has_its_own_teacher(top_k: int) -> None:
    """Compare with a loop over the rows, one call each."""
    chosen = algorithm(teacher_models=TEACHERS)
    assert {name: model.path for name, model in chosen.references.items()} == {
        "numbers": "a",
        "words": "b",
        "others": "c",
    }
    members = {name: LengthReference(i + 1.0, []) for i, name in enumerate(TEACHERS)}
    batch = rows_of("poems", "arithmetic", "poems")
    found = RoutedReference(members, chosen.reference_of).compute_log_probs(batch, top_k)
    assert [members[name].asked for name in TEACHERS] == [[1], [2], []]
    for i, name in enumerate(["words", "numbers", "words"]):
        alone = members[name].compute_log_probs(batch.select(torch.tensor([i])), top_k)
        own = found.select(torch.tensor([i]))
        assert torch.equal(own.log_probs.values, alone.log_probs.values)
        assert own.candidates is not None
        assert alone.candidates is not None
        assert torch.equal(own.candidates.values, alone.candidates.values)


def test_a_row_is_sent_to_a_teacher_by_its_key() -> None:
    (row,) = rows_of("jokes").rows
    assert algorithm(teacher_models=TEACHERS).reference_of(row) == "others"
    by_domain = algorithm(teacher_models=TEACHERS, teacher_key="extra_info.domain")
    assert by_domain.reference_of(row) == "words"
    two = {name: TEACHERS[name] for name in ("numbers", "words")}
    with pytest.raises(ConfigError, match="no teacher for rows whose data_source is 'jokes'"):
        algorithm(teacher_models=two).reference_of(row)
    with pytest.raises(ConfigError, match="two teachers have the key 'poems'"):
        algorithm(teacher_models=two | {"more": two["words"]})
