"""Engine `hf`: it uses the training model and computes no token twice."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from rlctl.runtime.rollout import running
from rlctl.runtime.rollout.decode_check import check_decoding
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.hf import HFEngine
from tests.generation import prompts, sampling
from tests.models import tiny_model


def test_waves_match_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written has no effect."""
    lengths = torch.linspace(3, 40, 15).long()[torch.randperm(15, generator=torch.Generator())]
    prompt_ids = prompts(9, 1, 40, 17, 3)
    params = sampling(max_tokens=lengths, stop_token_ids=())
    whole = HFEngine(tiny_model(), None).generate(prompt_ids, params)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda like, *size: empty(like, *size).fill_(
            torch.nan if like.is_floating_point() else 2**40
        ),
    )
    waves = HFEngine(tiny_model(), 6).generate(prompt_ids, params)
    assert torch.equal(whole.response_ids.values, waves.response_ids.values)
    torch.testing.assert_close(whole.log_probs.values, waves.log_probs.values, atol=1e-5, rtol=0)


@pytest.fixture
def tokens_seen() -> Callable[[PreTrainedModel], list[int]]:
    def watch(model: PreTrainedModel) -> list[int]:
        seen: list[int] = []
        use_rlctl_attention(model)
        check_decoding(Passes(model))  # a model is checked once
        model.get_input_embeddings().register_forward_hook(
            lambda _, inputs, __: seen.append(inputs[0].numel())
        )
        return seen

    return watch


def test_prompts_are_prefilled_once_and_finished_rows_are_skipped(
    tokens_seen: Callable[[PreTrainedModel], list[int]],
) -> None:
    model, limits = tiny_model(), torch.tensor([3, 9, 1, 5, 5, 2])
    seen = tokens_seen(model)
    HFEngine(model, None).generate(prompts(4, 7), sampling(max_tokens=limits, stop_token_ids=()))
    assert seen[0] == 4 + 7
    assert seen[1:] == [int((limits > step).sum()) for step in range(1, 9)]


def test_long_prefills_are_split_between_prompts(
    monkeypatch: pytest.MonkeyPatch, tokens_seen: Callable[[PreTrainedModel], list[int]]
) -> None:
    prompt_ids, params = prompts(9, 1, 40, 17, 3), sampling()
    whole = HFEngine(tiny_model(), None).generate(prompt_ids, params)
    monkeypatch.setattr(running, "_PREFILL_TOKENS", 16)
    model = tiny_model()
    seen = tokens_seen(model)
    cut = HFEngine(model, None).generate(prompt_ids, params)
    assert seen[:3] == [40, 17, 9 + 3 + 1]
    assert torch.equal(whole.response_ids.values, cut.response_ids.values)


def test_model_mode_is_restored_and_gradients_flow() -> None:
    model = tiny_model()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    engine = HFEngine(model, None)
    before = engine.generate(prompts(4, 7), sampling(temperature=0.0))
    assert [module.training for module in model.modules()] == modes
    weight = next(model.parameters())
    assert weight.requires_grad
    packing = Packing.from_lengths(torch.tensor([6]), "cpu")
    ids = torch.arange(6)[None]
    loss = (
        model(
            input_ids=ids, position_ids=packing.position_ids[None], packing=packing, use_cache=False
        )
        .logits.logsumexp(-1)
        .sum()
    )
    loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    after = engine.generate(prompts(4, 7), sampling(temperature=0.0))  # of the current policy
    fresh = HFEngine(copy.deepcopy(model), None).generate(prompts(4, 7), sampling(temperature=0.0))
    assert after.response_ids.values.tolist() != before.response_ids.values.tolist()
    assert torch.equal(after.response_ids.values, fresh.response_ids.values)
