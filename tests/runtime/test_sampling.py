"""Corner cases of sampling one token: rounded mass, probability zero, large top-k."""

from __future__ import annotations

import torch

from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.sampling import sample

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
