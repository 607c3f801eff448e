"""Layers with states or capped scores, on packed rows and in the engine `hf`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.batch import Ragged
from rlctl.runtime.model import probe
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.probe import check_model as check_rows
from rlctl.runtime.model.probe import check_packing
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.planning.mesh import check_meshes
from rlctl.runtime.planning.preflight import check_model
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.hf import HFEngine

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": DELTA,
    "gemma2": {
        "head_dim": 8,
        "attn_logit_softcapping": 0.5,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA
    | {
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "attention"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "mamba": {"state_size": 8},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
    },
}


def miniature(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**COMMON | {**FAMILIES, "minimax": MINIMAX}[family])
    return AutoModelForCausalLM.from_config(config).float().eval()


MINIMAX = DELTA | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return miniature(request.param)


def rows(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(0)
    return Ragged.from_rows(
        [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
    )


def test_packed_rows_are_computed_as_rows_alone(model: PreTrainedModel) -> None:
    use_rlctl_attention(model)
    check_packing(PolicyModel(model, 1.0))


def gradients(hf: PreTrainedModel, *packed: Sequences) -> dict[str, Tensor]:
    hf.zero_grad()
    for sequences in packed:
        PolicyModel(hf, 1.0)(sequences).log_probs.sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in hf.named_parameters()
        if parameter.grad is not None
    }


def test_gradients_are_those_of_rows_alone_also_with_shared_prompts(
    model: PreTrainedModel,
) -> None:
    use_rlctl_attention(model)
    prompt = rows(5).values
    prompts = Ragged.from_rows([prompt, rows(9).values, prompt])
    responses = rows(7, 3, 12)
    alone = [
        Sequences.from_ragged(prompts.select(number), responses.select(number))
        for number in torch.arange(3)[:, None]
    ]
    expected = gradients(model, *alone)
    numbers = torch.tensor([0, 1, 0])
    # The backward pass computes the layers again, with the packing of the last pass.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for packed in (
        Sequences.from_ragged(prompts, responses),
        Sequences.from_ragged(prompts, responses, prompt_of_row=numbers),
    ):
        found = gradients(model, packed)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-3)


def delta_kernel(chunk: Any) -> Any:
    """Return `chunk` of transformers as flash-linear-attention has it: with `cu_seqlens`."""

    def kernel(*qkv: Tensor, cu_seqlens: Tensor | None, **arguments: Any) -> tuple[Tensor, None]:
        assert cu_seqlens is not None
        sizes = cu_seqlens.diff().tolist()
        parts = zip(*(each.split(sizes, dim=1) for each in qkv), strict=True)
        gates = zip(
            *(arguments.pop(name).split(sizes, dim=1) for name in ("g", "beta")), strict=True
        )
        mixed = [
            chunk(*part, g=g, beta=beta, **arguments)[0]
            for part, (g, beta) in zip(parts, gates, strict=True)
        ]
        return torch.cat(mixed, dim=1), None

    return kernel


def convolution_kernel(convolve: Any) -> Any:
    """Return `convolve` of transformers as causal-conv1d has it: with `seq_idx`."""

    def kernel(hidden: Tensor, *others: Any, seq_idx: Tensor, **arguments: Any) -> Tensor:
        assert seq_idx.dtype == torch.int32
        sizes = seq_idx[0].bincount().tolist()
        parts = [convolve(part, *others, **arguments) for part in hidden.split(sizes, dim=2)]
        return torch.cat(parts, dim=2)

    return kernel


@pytest.mark.parametrize("works", [True, False])
def test_kernels_read_packed_rows_if_they_keep_sequences_apart(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = miniature("qwen3_5_text")
    use_rlctl_attention(hf)
    monkeypatch.setattr(probe, "may_have_kernels", lambda: True)
    module = import_module(type(hf).__module__)
    chunk, convolve = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn
    calls: list[int] = []

    def counting(*qkv: Tensor, **arguments: Any) -> Any:
        calls.append(len(qkv[0]))
        kernel = delta_kernel(chunk) if works and arguments["cu_seqlens"] is not None else chunk
        return kernel(*qkv, **arguments)

    def convolving(*others: Any, **arguments: Any) -> Any:
        return (convolution_kernel(convolve) if "seq_idx" in arguments else convolve)(
            *others, **arguments
        )

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", counting)
    monkeypatch.setattr(module, "causal_conv1d_fn", convolving)
    packed = Sequences.from_ragged(rows(5, 9, 2), rows(7, 3, 30))
    expected = gradients(hf, packed)
    num_rectangles = len(calls)
    check_rows(PolicyModel(hf, 1.0), None)
    calls.clear()
    found = gradients(hf, packed)
    layers = hf.config.layer_types.count("linear_attention")
    assert len(calls) == (layers if works else num_rectangles)
    assert num_rectangles > layers
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-3)


def test_sizes_that_divide_tokens_or_layers_are_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["qwen3_5_text"](**COMMON | DELTA).save_pretrained(tmp_path)
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
    ]
    config = compose("grpo", overrides).config
    problems = check_meshes(config, {"main": 2}, Needs(0))
    assert [problem.message for problem in problems] == [
        "layers of qwen3_5_text carry a state from token to token, which "
        "ulysses_sequence_parallel_size cannot divide"
    ]
    bloom = CONFIG_MAPPING["bloom"](hidden_size=32, n_head=4, n_layer=2, vocab_size=64)
    bloom.save_pretrained(tmp_path)
    config = compose("grpo", [*overrides, "actor_rollout_ref.model.init=random"]).config
    messages = [problem.message for problem in check_model(config)]
    assert any("models of type bloom compute padded rows" in message for message in messages)


def test_the_engine_refuses_states_that_it_cannot_keep() -> None:
    model = miniature("minimax")
    use_rlctl_attention(model)
    check_packing(PolicyModel(model, 1.0))
    sampling = SamplingParams(1.0, 1.0, -1, (), torch.tensor([4]), 7, 1)
    with pytest.raises(ConfigError, match="engine hf cannot decode models of type minimax"):
        HFEngine(model, 3).generate(rows(5), sampling)


def test_the_engine_samples_from_the_model(model: PreTrainedModel) -> None:
    """Rows of several lengths join and leave; log-probs are those of a pass of each row."""
    prompts = rows(5, 9, 5, 3, 5)
    limits = torch.tensor([4, 9, 1, 7, 12, 3, 5, 8, 2, 6])
    sampling = SamplingParams(1.0, 1.0, -1, (), limits, 7, 2)
    responses = HFEngine(model, 3).generate(prompts, sampling)
    assert responses.response_ids.lengths.tolist() == limits.tolist()
    found = zip(responses.response_ids.rows(), responses.log_probs.rows(), strict=True)
    for number, (ids, log_probs) in enumerate(found):
        prompt = prompts.rows()[number // 2]
        model.set_attn_implementation("eager")
        logits = model(torch.cat([prompt, ids])[None], use_cache=False).logits[0]
        own = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(log_probs, own, atol=1e-4, rtol=0)
