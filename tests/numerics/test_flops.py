"""Tests of costs of decoders: golden numbers of verl, exact counts, and the table of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.costs import Costs
from rlctl.runtime.model.padded_rows import use_own_attention
from rlctl.runtime.rollout.decoding import Prefill
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.kv_cache import KVCache, Saved
from rlctl.runtime.workers.device_usage import peak_flops
from tests.miniatures import PADDED, REFUSED, TYPES, miniature

# A mixture, latent attention, and layers with states; the others are tested by `make soak`.
SAMPLE = {"mixtral", "deepseek_v3", "qwen3_5_moe_text", "nemotron_h"}
# Types whose code needs data: their costs are unknown.
UNKNOWN = {
    *("dbrx", "emu3", "gemma3n_text", "gpt-sw3", "gpt2", "jetmoe", "longcat_flash", "minimax"),
    "mllama",
}
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
def test_golden(config: PretrainedConfig, lengths: list[int], tera: float) -> None:
    costs = Costs.from_config(config)
    assert costs is not None
    # Angles of positions are a product of matrices, which counts, before transformers 5.19.
    assert costs.training_flops(lengths) / 1e12 == pytest.approx(tera, rel=1e-8)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.soak)
        for kind in TYPES
        if kind not in PADDED and kind not in REFUSED
    ],
)
def test_costs_are_those_of_a_pass(kind: str, tmp_path: Path) -> None:
    """Experts of a token, latent attention and states count as a pass with data does."""
    # torch.compile turns these checks off, and without them gemma3n_text needs no data.
    torch.distributions.Distribution.set_default_validate_args(True)
    model, length = miniature(kind, tmp_path), 64
    costs = Costs.from_config(model.config)
    if kind in UNKNOWN:
        assert costs is None
        return
    assert costs is not None
    ids = torch.arange(length) % 100
    if kind in SAMPLE:
        saved, states = cached(model, ids)
        assert sum(part.numel() for pair in saved.values() for part in pair) == (
            length * costs.cached
        )
        assert sum(state.numel() for state in states) == costs.states
    use_own_attention(model, "eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    pairs = sum(layer.num_heads * layer.head_sizes for layer in costs.attention) * length**2
    assert counter.get_total_flops() == costs.operations * length + 2 * pairs


def cached(model: PreTrainedModel, ids: Tensor) -> tuple[Saved, list[Tensor]]:
    """Return the keys and values that the engine keeps of a prompt (N,), and its states."""
    cache, length = KVCache(), torch.tensor([len(ids)])
    cache.join(length, torch.tensor([1]), 1)
    packing = Packing.from_lengths(length, "cpu")
    with torch.no_grad():
        prefill = Prefill(cache, packing, 0)
        Passes(model).logits(ids, packing.position_ids, prefill)
    saved, states = cache.save(0) if cache.layers else {}, list[Tensor]()
    held = cache.states._cache  # pyright: ignore[reportPrivateUsage]
    for layer in held.layers if held else ():
        for name in ("conv_states", "recurrent_states"):
            parts = (getattr(layer, name, None) or {}).values()
            states += [part for part in parts if part is not None]
    return saved, states


def test_costs_of_padded_rows_are_unknown() -> None:
    assert Costs.from_config(AutoConfig.for_model("bloom", n_layer=2, hidden_size=64)) is None


def test_peak_of_a_device_by_its_name() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("some accelerator") is None
