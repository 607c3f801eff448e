"""Engine `hf` uses the training model and computes no token twice; corner cases of sampling."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from rlctl.runtime.rollout import running
from rlctl.runtime.rollout.decode_check import check_decoding
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.sampling import sample
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


LARGEST = 1 - 2**-24  # of the numbers that torch.rand gives


def params(top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, max_tokens=1, stop_token_ids=(), seed=0, n=1)


def test_tokens_of_probability_zero_are_never_sampled() -> None:
    for size in (5, 1000, 50_000, 100_001):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
        logits[:, 0] = logits[:, size // 2 :] = -torch.inf
        for uniform in (0.0, 0.5, LARGEST, 1.0):
            for top in (params(), params(top_k=size - 1), params(top_p=0.999)):
                token, log_prob = sample(logits, torch.tensor([uniform]), top)
                assert 0 < int(token) < size // 2
                assert log_prob.isfinite().all()


def test_blocks_are_sampled_as_all_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 2001, generator=draw)  # not a multiple of a block
    uniforms = torch.rand(40, generator=draw)
    blocked, _ = sample(logits, uniforms, params())
    alone = [
        int(sample(row[None], each[None], params())[0])
        for row, each in zip(logits, uniforms, strict=True)
    ]
    assert blocked.tolist() == alone
    assert blocked.unique().numel() > 30


def test_worked_samples() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.09, 0.11, 0.29, 0.59, 0.61])
    assert sample(logits, uniforms, params())[0].tolist() == [0, 0, 1, 1, 2, 3]
    # likeliest first: 0.4, 0.3 are left of 1, so token 3 is drawn below 4 / 7
    assert sample(logits, uniforms, params(top_k=2))[0].tolist() == [3, 3, 3, 3, 2, 2]
    assert sample(logits, uniforms, params(top_p=0.69))[0].tolist() == [3, 3, 3, 3, 2, 2]
    # 0.3 of the two that are left is within the first
    assert sample(logits, uniforms, params(top_k=2, top_p=0.3))[0].tolist() == [3] * 6
    torch.testing.assert_close(
        sample(logits, uniforms, params(top_k=2))[1],
        torch.tensor([0.4, 0.4, 0.4, 0.4, 0.3, 0.3]).log(),
    )


def test_half_precision_is_sampled_in_float32() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for temperature in (1.0, 0.7):  # bfloat16 would round a quotient by up to 0.4 %
        token, log_prob = sample(
            logits, torch.tensor([0.1, 0.4, 0.7, 0.999]), params(temperature=temperature)
        )
        assert log_prob.dtype == torch.float32
        torch.testing.assert_close(
            log_prob,
            (logits.float() / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0],
        )
