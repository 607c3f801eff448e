"""Tests of the FLOPs formula against golden numbers of verl, and of the table of devices."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, Qwen2Config

from rlctl.runtime.workers.flops import DecoderShape, peak_flops

LLAMA_2_7B = AutoConfig.for_model(
    "llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
)
QWEN_2_5_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)


@pytest.mark.parametrize(
    ("config", "lengths", "tera"),
    [
        (LLAMA_2_7B, [512, 1024, 2048], 149.226491215872),
        (LLAMA_2_7B, [4096] * 3, 536.372695793664),
        (QWEN_2_5_7B, [512, 1024, 2048], 167.073690943488),
        (QWEN_2_5_7B, [4096] * 3, 591.764889010176),
    ],
)
def test_golden(config: object, lengths: list[int], tera: float) -> None:
    shape = DecoderShape.from_config(config)
    assert shape is not None
    assert shape.training_flops(lengths) / 1e12 == pytest.approx(tera, rel=1e-14)


@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "qwen3_5", "mamba2"]
)
def test_unsupported_architectures_have_no_shape(model_type: str) -> None:
    assert DecoderShape.from_config(AutoConfig.for_model(model_type)) is None


def test_head_size_of_the_config_is_used() -> None:
    shape = DecoderShape.from_config(AutoConfig.for_model("qwen3", head_dim=32))
    assert shape is not None
    assert shape.head_dim == 32


def test_peak_of_a_device_by_its_name() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("some accelerator") is None
