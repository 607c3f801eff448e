"""Fused passes of the engine `hf`: equal to the model's modules, and only where they are known."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from rlctl.recipes.compose import compose
from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.rollout.decoding import next_logits
from rlctl.runtime.rollout.fused import FusedModel, Passes
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.requests import Completion, Decoding, Request
from tests.models import ARCHS, limited_model, mixture_model, tiny_model
from tests.tolerance import assert_as_exact, in_float64

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
KNOWN: dict[str, Any] = {
    **{arch: partial(tiny_model, arch) for arch in ARCHS},
    "biases": lambda: tiny_model("llama", attention_bias=True, mlp_bias=True),
    "untied": lambda: tiny_model("qwen3", tie_word_embeddings=False),
    "window": lambda: limited_model("qwen2"),
    "yarn": lambda: tiny_model("llama", rope_parameters=_YARN),
}


def passes_of(model: PreTrainedModel) -> Passes:
    use_rlctl_attention(model)
    passes = Passes(model)
    passes.refresh()
    return passes


@torch.no_grad()
@pytest.mark.parametrize("name", KNOWN)
def test_logits_equal_those_of_the_modules(name: str) -> None:
    model = KNOWN[name]().eval()
    passes, exact_model = passes_of(model), in_float64(model)
    assert passes.is_fused
    ids = torch.randint(3, 64, (43,), generator=torch.Generator().manual_seed(1))
    packing = Packing.from_lengths(torch.tensor([20, 1, 22]), "cpu")
    keep = torch.tensor([19, 20, 42])
    for kept in (0, keep):
        found = passes.logits(ids, packing.position_ids, packing, kept)
        expected = next_logits(model, ids, packing.position_ids, packing, kept)
        assert not torch.equal(found, expected)  # two ways to compute them
        exact = next_logits(exact_model, ids, packing.position_ids, packing, kept)
        assert_as_exact(*(each.log_softmax(-1) for each in (found, expected, exact)))


def test_new_weights_are_used_while_responses_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(dtype: torch.dtype = torch.float32) -> list[Completion]:
        engine = HFEngine(tiny_model().to(dtype), None, owned=True)
        greedy = Decoding(temperature=0.0, top_p=1.0, top_k=-1, stop_token_ids=())
        engine.submit([Request(0, torch.arange(3, 9), greedy, (20, 20), (1, 2))])
        for _ in range(5):
            engine.step()
        engine.load_weights(tiny_model(seed=1).to(dtype).named_parameters())
        return [each for _ in range(15) for each in engine.step()]

    fused = generate()
    monkeypatch.setattr(FusedModel, "is_exact_for", lambda _: False)
    for one, other, exact in zip(fused, generate(), generate(torch.float64), strict=True):
        assert torch.equal(one.response_ids, other.response_ids)
        assert_as_exact(one.log_probs, other.log_probs, exact.log_probs.double())


def with_adapters() -> PreTrainedModel:
    model = tiny_model()
    settings = ["actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.model.path=none"]
    add_adapters(model, compose("ppo", settings).config.actor_rollout_ref.model, 0)
    return model


def with_hook() -> PreTrainedModel:
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model


def with_own_forward() -> PreTrainedModel:
    model = tiny_model()
    layer: nn.Module = model.model.layers[0]
    layer.forward = layer.forward
    return model


@pytest.mark.parametrize(
    "build",
    [
        with_adapters,
        with_hook,
        with_own_forward,
        lambda: limited_model("mistral"),
        lambda: mixture_model("qwen3_moe"),
        lambda: tiny_model(hidden_act="gelu"),
        lambda: tiny_model().bfloat16(),
    ],
)
def test_other_models_use_their_modules(build: Any) -> None:
    assert not passes_of(build()).is_fused
