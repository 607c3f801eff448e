"""Layers with states: kernels that read packed rows, and what is refused.

Log-probs, gradients and responses of each family are in test_model_types.py.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

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
from tests.miniatures import miniature, miniature_config


def rows(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(0)
    return Ragged.from_rows(
        [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
    )


def gradients(hf: PreTrainedModel, *packed: Sequences) -> dict[str, Tensor]:
    hf.zero_grad()
    for sequences in packed:
        PolicyModel(hf, 1.0)(sequences).log_probs.sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in hf.named_parameters()
        if parameter.grad is not None
    }


def delta_kernel(chunk: Any) -> Any:
    """Return `chunk` of transformers as flash-linear-attention has it: with `cu_seqlens`."""

    def kernel(*qkv: Tensor, cu_seqlens: Tensor | None, **arguments: Any) -> tuple[Tensor, None]:
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
    works: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hf = miniature("qwen3_5_text", tmp_path)
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
    miniature_config("qwen3_5_text").save_pretrained(tmp_path)
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
    miniature_config("bloom").save_pretrained(tmp_path)
    config = compose("grpo", [*overrides, "actor_rollout_ref.model.init=random"]).config
    messages = [problem.message for problem in check_model(config)]
    assert any("models of type bloom compute padded rows" in message for message in messages)


def test_the_engine_refuses_states_that_it_cannot_keep(tmp_path: Path) -> None:
    model = miniature("minimax", tmp_path)
    use_rlctl_attention(model)
    check_packing(PolicyModel(model, 1.0))
    sampling = SamplingParams(1.0, 1.0, -1, (), torch.tensor([4]), 7, 1)
    with pytest.raises(ConfigError, match="engine hf cannot decode models of type minimax"):
        HFEngine(model, 3).generate(rows(5), sampling)
