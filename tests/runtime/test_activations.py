"""Recomputed layers and offloaded activations change no bit of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model import activation_offload
from rlctl.runtime.model.activation_offload import Lane
from rlctl.runtime.model.activations import save_activation_memory
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.workers.passes import enter_training
from tests.configs import configured
from tests.models import tiny_model
from tests.second_device import NAME, SecondDevice

MODEL = "actor_rollout_ref.model"
LAYERS = 4


def test_updates_recompute_layers_without_dropout() -> None:
    hf = tiny_model(num_hidden_layers=LAYERS, attention_dropout=0.5)
    hf.model.layers.append(torch.nn.Dropout(0.5))
    hf.gradient_checkpointing_enable()
    enter_training(hf)
    training = {name for name, module in hf.named_modules() if module.training}
    assert training >= {f"model.layers.{number}" for number in range(LAYERS)}
    assert all(name == "model" or name.count(".") == 2 for name in training)
    assert not hf.model.layers[-1].training


def gradients(*overrides: str) -> tuple[list[Tensor], int, int]:
    """Return gradients, number of layers that ran, and number of tensors copied to the host."""
    settings = [f"{MODEL}.{each}" for each in ("enable_gradient_checkpointing=false", *overrides)]
    hf = tiny_model(num_hidden_layers=LAYERS)
    use_rlctl_attention(hf)
    save_activation_memory(hf, configured("grpo", (), settings).actor_rollout_ref.model)
    calls: list[int] = []
    for number in range(LAYERS):
        layer = hf.get_submodule(f"model.layers.{number}.mlp.up_proj")
        layer.register_forward_hook(lambda *_: calls.append(1))
    with SecondDevice() as device:
        torch.nn.Module.to(hf, NAME)
        prompts = Ragged.from_rows([[5, 6, 7], [8, 9]], torch.int64).to(NAME)
        responses = Ragged.from_rows([[3, 4, 5, 6], [7, 8]], torch.int64).to(NAME)
        outputs = PolicyModel(hf, 1.0)(Sequences.from_ragged(prompts, responses))
        outputs.log_probs.sum().backward()
        copies = sum(n for place, n in device.syncs.items() if "activation_offload.py" in place)
        return (
            [each.grad.cpu() for each in hf.parameters() if each.grad is not None],
            len(calls),
            copies,
        )


def test_gradient_is_exact() -> None:
    checkpointing = "enable_gradient_checkpointing=true"
    offload = "enable_activation_offload=true"
    other = "gradient_checkpointing_every_n_layers=2"
    expected, calls, copies = gradients()
    assert (calls, copies) == (LAYERS, 0)
    num_inputs = gradients(checkpointing, offload)[2]
    for overrides, num_calls in (
        ([checkpointing], 2 * LAYERS),
        ([checkpointing, other], 3 * LAYERS // 2),
        ([offload], LAYERS),
        ([checkpointing, offload], 2 * LAYERS),
    ):
        found, calls, copies = gradients(*overrides)
        assert calls == num_calls
        assert all(torch.equal(*each) for each in zip(expected, found, strict=True))
        assert copies == 0 if offload not in overrides else copies >= num_inputs >= LAYERS
    assert copies == num_inputs < gradients(offload)[2] / 4


class LateLane(Lane):
    """Copies that are made when something waits for them, and not before."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self.device = device
        self.copies: list[Callable[[], object]] = []
        lanes.append(self)

    def block(self) -> AbstractContextManager[Any]:
        return _Late(self.copies)

    def mark(self) -> Any:
        return len(self.copies)

    def wait(self, mark: Any = None) -> None:
        for number, copy in enumerate(self.copies[:mark]):
            copy()
            self.copies[number] = lambda: None


lanes: list[LateLane] = []


class _Late(TorchDispatchMode):
    def __init__(self, copies: list[Callable[[], object]]) -> None:
        super().__init__()
        self.copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies.append(partial(func, *args, **(kwargs or {})))
        return args[0]


@pytest.mark.parametrize("ahead", [0, 2**20])
def test_copies_end_before_they_are_needed(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA they are made by streams beside that of the computation."""
    expected, *_ = gradients()
    monkeypatch.setattr(activation_offload, "Lane", LateLane)
    monkeypatch.setattr(activation_offload, "_ARRIVING", ahead)
    monkeypatch.setattr(activation_offload, "_LEAVING", 2**12)
    found, _, copies = gradients("enable_activation_offload=true")
    assert all(torch.equal(*each) for each in zip(expected, found, strict=True))
    out, back = lanes[-2:]
    assert copies == len(out.copies) >= len(back.copies) > LAYERS  # each at most once
