"""Packed attention compared with single sequences: values, gradients, checkpointing, FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from rlctl.errors import ConfigError, InternalError
from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from tests.models import ARCHS, Arch, tiny_model

LENGTHS = torch.tensor([5, 1, 40, 17, 3, 90, 6])


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


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 2)], ids=["gqa", "mqa", "mha"])
def test_values_and_gradients_match_single_sequences(arch: Arch, heads: tuple[int, int]) -> None:
    model = tiny_model(arch, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    expected = one_by_one(model, token_ids())
    expected_gradient = gradient(model, expected)
    use_rlctl_attention(model)
    log_probs = packed(model, token_ids())
    assert relative(log_probs, expected) < 1e-6
    assert relative(gradient(model, log_probs), expected_gradient) < 1e-6


def test_gradient_checkpointing() -> None:
    model = tiny_model("qwen2")
    use_rlctl_attention(model)
    plain = gradient(model, packed(model, token_ids()))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(gradient(model, packed(model, token_ids())), plain)


def test_fully_shard(tmp_path: Path) -> None:
    model = tiny_model("llama")
    reference = one_by_one(model, token_ids())
    use_rlctl_attention(model)
    plain = gradient(model, packed(model, token_ids()))
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        log_probs = packed(model, token_ids())
        weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
        (log_probs * weights).sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        sharded = torch.cat(
            [grad.full_tensor().flatten() for grad in grads if isinstance(grad, DTensor)]
        )
        assert relative(log_probs, reference) < 1e-6
        assert relative(sharded, plain) < 1e-6
    finally:
        dist.destroy_process_group()


def test_attend_is_causal_softmax_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(LENGTHS.sum())
    query = torch.randn(num_tokens, 4, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, num_tokens, 2, 8, generator=generator, dtype=torch.float64)
    out = Packing.from_lengths(LENGTHS, "cpu").attend(0, query, key, value, 0.3)
    start = 0
    for length in LENGTHS.tolist():
        for token in range(start, start + length):
            for head in range(4):
                weights = torch.softmax(
                    0.3 * key[start : token + 1, head // 2] @ query[token, head], 0
                )
                torch.testing.assert_close(
                    out[token, head], weights @ value[start : token + 1, head // 2]
                )
        start += length


def test_position_ids_with_empty_sequences() -> None:
    packing = Packing.from_lengths(torch.tensor([3, 0, 1, 2]), "cpu")
    assert packing.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    x = torch.randn(6, 2, 4)
    torch.testing.assert_close(
        packing.attend(0, x, x, x, 1.0),
        Packing.from_lengths(torch.tensor([3, 1, 2]), "cpu").attend(0, x, x, x, 1.0),
    )


def test_padding_stays_small() -> None:
    lengths = (
        (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.8 + 5)
        .exp()
        .long()
        .clamp(1, 4000)
    )
    packing = Packing.from_lengths(lengths, "cpu")
    assert len(packing.token_of_slot) <= 1.2 * int(lengths.sum())
    assert sum(rectangle.rows for rectangle in packing.rectangles) == 500


def test_no_mask_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    model = tiny_model("qwen2")
    use_rlctl_attention(model)
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda *_: pytest.fail("a mask was prepared")
    )
    packed(model, token_ids())


def test_sliding_windows_are_refused() -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    with pytest.raises(ConfigError, match="sliding_window is 4096"):
        use_rlctl_attention(MistralForCausalLM(MistralConfig(vocab_size=16, **shape)))
    use_rlctl_attention(
        MistralForCausalLM(MistralConfig(vocab_size=16, sliding_window=None, **shape))
    )
    with pytest.raises(ConfigError, match="sliding_attention"):
        use_rlctl_attention(
            tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
        )


def test_dropout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.1"):
        use_rlctl_attention(tiny_model("llama", attention_dropout=0.1))


def test_call_without_packing_is_an_internal_error() -> None:
    model = tiny_model("llama")
    use_rlctl_attention(model)
    with pytest.raises(InternalError, match="without `packing`"):
        model(input_ids=token_ids()[None], use_cache=False)
