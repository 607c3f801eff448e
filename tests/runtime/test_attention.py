"""Packed attention compared with single sequences: values, gradients, checkpointing, FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model import gpu_kernels, kernels, shared_prompts
from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.kernels import Reach, choose_kernel
from rlctl.runtime.model.sequences import Packed, Sequences, prompt_numbers
from tests.models import ARCHS, LIMITED, WINDOW, Arch, limited_model, tiny_model
from tests.tolerance import assert_as_exact

LENGTHS = torch.tensor([5, 1, 20, 17, 3, 40, 6])


def token_ids(lengths: Tensor = LENGTHS) -> Tensor:
    return torch.randint(0, 64, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))


def one_by_one(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return log-probs (T, V) of each sequence alone, with transformers' attention."""
    return torch.cat(
        [model(part[None]).logits[0].log_softmax(-1) for part in ids.split(LENGTHS.tolist())]
    )


def packed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    packing = Packing.from_lengths(LENGTHS, "cpu")
    output = model(
        input_ids=ids[None],
        position_ids=packing.position_ids[None],
        packing=packing,
        use_cache=False,
    )
    return output.logits[0].log_softmax(-1)


def gradient(model: PreTrainedModel, log_probs: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs)
    return torch.cat(
        [
            grad.flatten()
            for grad in torch.autograd.grad((log_probs * weights).sum(), list(model.parameters()))
        ]
    )


def relative(value: Tensor, reference: Tensor) -> float:
    return float(((value - reference).norm() / reference.norm()).detach())


def with_heads(arch: Arch, heads: int, groups: int) -> Callable[[], PreTrainedModel]:
    return partial(tiny_model, arch, num_attention_heads=heads, num_key_value_heads=groups)


# Architectures, numbers of heads, and models with windows and sinks.
MODELS = {
    **{arch: with_heads(arch, 4, 2) for arch in ARCHS},
    "one head of keys": with_heads("llama", 4, 1),
    "equal heads": with_heads("llama", 2, 2),
    **{f"limited {kind}": partial(limited_model, kind) for kind in LIMITED},
}


def in_float64(kind: str) -> PreTrainedModel:
    model = MODELS[kind]().double()
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_match_single_sequences(kind: str) -> None:
    model = MODELS[kind]()
    plain = model, in_float64(kind)
    expected = [one_by_one(each, token_ids()) for each in plain]
    gradients = [gradient(*each) for each in zip(plain, expected, strict=True)]
    use_rlctl_attention(model)
    log_probs = packed(model, token_ids())
    assert_as_exact(log_probs, *expected)
    assert_as_exact(gradient(model, log_probs), *gradients)


PROMPTS = [[7, 8, 9, 10, 11], [12], [7, 8, 9, 13]]
ROWS = [(0, 4), (1, 2), (0, 30), (2, 0), (1, 7), (0, 1), (2, 5)]  # prompt, response tokens


def shared_rows() -> tuple[Ragged, Ragged]:
    draw = torch.Generator().manual_seed(2)
    responses = [torch.randint(0, 64, (length,), generator=draw) for _, length in ROWS]
    prompts = Ragged.from_rows([PROMPTS[prompt] for prompt, _ in ROWS], torch.int64)
    return prompts, Ragged.from_rows(responses, torch.int64)


@pytest.mark.parametrize("kind", [*ARCHS, "limited qwen2", "limited gpt_oss"])
@pytest.mark.parametrize("max_mask", [2**22, 1])
def test_prompts_computed_once(kind: str, max_mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with rows that have a copy of the prompt each: values, gradients, last tokens."""
    monkeypatch.setattr(shared_prompts, "_MAX_MASK", max_mask)
    hf = MODELS[kind]()
    use_rlctl_attention(hf)
    model, (prompts, responses) = PolicyModel(hf, 0.7), shared_rows()
    numbers = prompt_numbers(prompts)
    assert numbers.tolist() == [0, 1, 0, 2, 1, 0, 2]
    apart = Sequences.from_ragged(prompts, responses)
    shared = Sequences.from_ragged(prompts, responses, prompt_of_row=numbers)
    assert len(shared.ids) == 5 + 1 + 4 + len(responses.values)
    for of_tokens in (lambda s: s.ids, lambda s: s.packing.position_ids):
        assert torch.equal(of_tokens(shared)[shared.last], of_tokens(apart)[apart.last])
        assert torch.equal(of_tokens(shared)[shared.predictors], of_tokens(apart)[apart.predictors])
    found, second = (model(each).log_probs for each in (shared, apart))
    wide = in_float64(kind)
    use_rlctl_attention(wide)
    exact = PolicyModel(wide, 0.7)(apart).log_probs.double()
    assert_as_exact(found, second, exact)
    assert_as_exact(gradient(hf, found), gradient(hf, second), gradient(wide, exact))


@pytest.mark.parametrize(
    ("window", "with_sinks", "softcap", "share"),
    [
        (None, False, None, True),
        (WINDOW, False, 0.5, False),
        (None, True, None, False),
        (WINDOW, True, 0.5, True),
    ],
)
def test_flex_attention_computes_the_same(
    window: int | None,
    with_sinks: bool,
    softcap: float | None,
    share: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Compiled on a GPU; a CPU computes it as written, for which torch refuses gradients.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    packing: Packed = Packing.from_lengths(LENGTHS, "cpu")
    if share:
        prompts, responses = shared_rows()
        sequences = Sequences.from_ragged(prompts, responses, prompt_of_row=prompt_numbers(prompts))
        packing = sequences.packing
    draw = torch.Generator().manual_seed(0)
    total = len(packing.position_ids)
    leaves = [torch.randn(total, heads, 16, generator=draw) for heads in (4, 2, 2)]
    leaves.append(torch.randn(4, generator=draw))
    results = []
    exact = [each.double() for each in leaves]

    def by_token_map(_: int, *args: Any) -> Tensor:
        return packing.token_map.attend(*args)

    for attend, given in ((packing.attend, leaves), (by_token_map, leaves), (by_token_map, exact)):
        query, key, value, sinks = (each.clone().requires_grad_() for each in given)
        reach = Reach(0.3, window, sinks if with_sinks else None, softcap)
        out = attend(0, query, key, value, reach)
        inputs = [query, key, value, *([sinks] if with_sinks else [])]
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    for each in zip(*results, strict=True):
        assert_as_exact(*each)


def test_kernels_are_chosen_by_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    query, sinks = torch.empty(3, 4, 8), torch.zeros(4)
    limits = (Reach(1.0), Reach(1.0, WINDOW), Reach(1.0, None, sinks), Reach(1.0, WINDOW, sinks))
    assert [choose_kernel(query, each) for each in limits] == ["dense"] * 4
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert [choose_kernel(query, each) for each in limits] == ["dense"] + ["flex"] * 3
    monkeypatch.setattr(kernels, "has_varlen_kernel", lambda _: True)
    assert [choose_kernel(query, each) for each in limits] == ["varlen"] * 2 + ["flex"] * 2


def test_flash_attention_gets_values_as_large_as_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention has smaller ones."""
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(5, 4, 12, generator=draw) for _ in range(2))
    value, ends = torch.randn(5, 4, 8, generator=draw), torch.tensor([0, 5])

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (each.transpose(0, 1)[None] for each in (query, key, value))
        return kernels.attend_dense(*rows, Reach(0.3), None)[0].transpose(0, 1)

    def kernel(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        assert key.shape == value.shape
        return dense(query, key, value)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    found = gpu_kernels.attend_varlen(query, key, value, Reach(0.3), (ends, ends), (5, 5))
    torch.testing.assert_close(found, dense(query, key, value))


def test_float32_on_gpus_has_as_many_heads_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its kernels for CUDA fall back to one that needs scores of all pairs."""
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    expected = kernels.attend_dense(query, key, value, Reach(0.3), None)
    heads: list[int] = []
    attend = kernels.F.scaled_dot_product_attention

    def recorded(*states: Tensor, **options: Any) -> Tensor:
        heads.extend(each.shape[1] for each in states)
        return attend(*states, **options)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    found = kernels.attend_dense(query, key, value, Reach(0.3), None)
    assert heads == [4, 4, 4]
    torch.testing.assert_close(found, expected)


def test_a_window_that_the_config_does_not_have_is_refused() -> None:
    model = limited_model("mistral")
    use_rlctl_attention(model)
    model.config.layer_types = ["full_attention"] * 2
    with pytest.raises(ConfigError, match="window of 8 tokens, and config"):
        packed(model, token_ids())
