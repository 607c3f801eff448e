"""vLLM's sampler for GPUs, whose kernels Triton interprets on a CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.runtime.rollout.engine import random_streams
from rlctl.runtime.rollout.requests import Decoding, Request
from rlctl.runtime.rollout.vllm_engine.log_probs import report_full_log_probs
from rlctl.runtime.rollout.vllm_engine.vllm_requests import vllm_params
from tests.interpreted import interpreted

pytestmark = [pytest.mark.extra("vllm"), pytest.mark.extra("triton"), pytest.mark.soak]

ROWS, VOCABULARY = 32, 12


@dataclass(frozen=True)
class Draws:
    """Tokens (R,) with their log-probs (R,)."""

    tokens: Tensor
    log_probs: Tensor


def build_sampler(decodings: list[Decoding], seeds: list[int], patched: bool) -> Any:
    """Return vLLM's sampler with a request per row; logits need no other processing."""
    import numpy as np
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    sampler: Any = Sampler.__new__(Sampler)
    sampler.sampling_states = SamplingStates(len(seeds), VOCABULARY)
    sampler.logits_processors, sampler.logprobs_mode = [], "processed_logprobs"
    sampler.thinking_budget_state = SimpleNamespace(apply=lambda *_: None)
    sampler.use_flashinfer = sampler.use_xpu_sampler = sampler.use_fp64_gumbel = False
    sampler.needs_logits_processing = np.zeros(len(seeds), dtype=bool)
    for row, (decoding, seed) in enumerate(zip(decodings, seeds, strict=True)):
        request = Request(row, torch.zeros(1, dtype=torch.int64), decoding, (1,), (seed,))
        needs = sampler.sampling_states.add_request(row, vllm_params(request, 0))
        sampler.needs_logits_processing[row] = needs
    sampler.sampling_states.apply_staged_writes()
    if patched:
        report_full_log_probs(SimpleNamespace(sampler=sampler))
    return sampler


def draw(
    logits: Tensor,
    decodings: list[Decoding],
    seeds: list[int],
    position: int = 3,
    patched: bool = True,
) -> Draws:
    """Draw a token for each row of logits (R, V)."""
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    sampler = build_sampler(decodings, seeds, patched)
    rows = torch.arange(len(seeds), dtype=torch.int32)
    positions = torch.full((len(seeds),), position)
    same = rows, rows, rows.numpy(), positions, positions, torch.zeros_like(rows), rows.numpy()
    tokens, processed = sampler.sample(logits.clone(), *same, return_logprobs=True)
    scores = compute_topk_scores(processed, 0, tokens)
    return Draws(tokens, scores.logprobs[:, 0])


def observe() -> dict[str, Any]:
    """Draw with several parameters."""
    importing: Any = ModuleType("vllm.triton_utils.importing")
    importing.HAS_TRITON = True  # vLLM asks for a GPU
    importing.TritonPlaceholder = importing.TritonLanguagePlaceholder = object
    sys.modules[importing.__name__] = importing
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    buffer_utils: Any = import_module("vllm.v1.worker.gpu.buffer_utils")
    sampler: Any = import_module("vllm.v1.worker.gpu.sample.sampler")
    buffer_utils.is_uva_available = lambda: False  # its buffers would be pinned
    # Triton does not interpret the kernel of top-k and top-p. This also changes its input.
    sampler.apply_top_k_top_p = apply_top_k_top_p_pytorch
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)).repeat(ROWS, 1)
    seeds = random_streams(7, torch.arange(ROWS)).tolist()

    def all_rows(*decoding: float, **options: Any) -> Draws:
        temperature, top_p, top_k = decoding
        rows = [Decoding(temperature, top_p, int(top_k), ())] * ROWS
        return draw(logits, rows, options.pop("seeds", seeds), **options)

    plain = all_rows(1.0, 1.0, -1)
    mixed = [Decoding(row % 2, 1.0, -1, ()) for row in range(ROWS)]
    return {
        "logits": logits[0],
        "plain": plain,
        "warm": all_rows(0.7, 1.0, -1),
        "top_p": all_rows(1.0, 0.6, -1),
        "top_p, unpatched": all_rows(1.0, 0.6, -1, patched=False),
        "top_k": all_rows(0.7, 1.0, 3),
        "later": all_rows(1.0, 1.0, -1, position=4),
        "reversed": all_rows(1.0, 1.0, -1, seeds=seeds[::-1]),
        "mixed": draw(logits, mixed, seeds),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return interpreted(observe)


def test_tokens_depend_on_the_seed_and_the_position_of_their_row(found: dict[str, Any]) -> None:
    tokens = found["plain"].tokens
    assert torch.equal(found["reversed"].tokens.flip(0), tokens)
    assert not torch.equal(found["later"].tokens, tokens)


@pytest.mark.parametrize(("name", "temperature"), [("plain", 1.0), ("later", 1.0), ("warm", 0.7)])
def test_frequencies_are_the_probabilities(
    found: dict[str, Any], name: str, temperature: float
) -> None:
    expected = (found["logits"] / temperature).softmax(-1)
    counted = torch.bincount(found[name].tokens, minlength=VOCABULARY) / ROWS
    deviation = (expected * (1 - expected) / ROWS).sqrt()
    assert bool(((counted - expected).abs() <= 4 * deviation).all())


@pytest.mark.parametrize(
    ("name", "temperature", "kept"),
    [
        ("plain", 1.0, VOCABULARY),
        ("warm", 0.7, VOCABULARY),
        ("top_p", 1.0, None),
        ("top_k", 0.7, 3),
    ],
)
def test_log_probs_are_those_of_the_entire_vocabulary(
    found: dict[str, Any], name: str, temperature: float, kept: int | None
) -> None:
    log_probs = (found["logits"] / temperature).log_softmax(-1)
    order = log_probs.argsort(descending=True)
    if kept is None:  # the smallest set with a probability of 0.6
        kept = int((log_probs[order].exp().cumsum(0) < 0.6).sum()) + 1
    assert set(found[name].tokens.tolist()) <= set(order[:kept].tolist())
    torch.testing.assert_close(found[name].log_probs, log_probs[found[name].tokens])


def test_the_patch_changes_log_probs_and_no_token(found: dict[str, Any]) -> None:
    patched, plain = found["top_p"], found["top_p, unpatched"]
    assert torch.equal(patched.tokens, plain.tokens)
    assert bool((plain.log_probs > patched.log_probs + 0.1).all())


def test_rows_of_temperature_0_are_greedy(found: dict[str, Any]) -> None:
    mixed, plain = found["mixed"], found["plain"]
    assert set(mixed.tokens[::2].tolist()) == {int(found["logits"].argmax())}
    assert torch.equal(mixed.tokens[1::2], plain.tokens[1::2])
    expected = found["logits"].log_softmax(-1)[mixed.tokens]
    torch.testing.assert_close(mixed.log_probs, expected)
