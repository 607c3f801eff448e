"""Memory of the activations that the backward pass needs: recomputed, or kept in host memory.

Neither changes a bit of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from rlctl.recipes import schema
from rlctl.runtime.model.sharding import decoder_layers


def save_activation_memory(hf: PreTrainedModel, model: schema.Model) -> None:
    """Recompute decoder layers of `hf` in the backward pass, and offload, as `model` asks for."""
    if model.enable_gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        for number, layer in enumerate(decoder_layers(hf)):
            recomputed = number % model.gradient_checkpointing_every_n_layers == 0
            setattr(layer, "gradient_checkpointing", recomputed)  # noqa: B010
    if model.enable_activation_offload:
        decoder, hooks = hf.get_decoder(), saved_tensors_hooks(_to_host, _to_device)
        decoder.register_forward_pre_hook(lambda *_: hooks.__enter__())
        decoder.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True)


def _to_host(saved: Tensor) -> tuple[torch.device, Tensor]:
    """Copy a tensor (N, ...) for the backward pass; weights, and those on a CPU, stay in place.

    The copies wait for the device's earlier operations, and later ones for them; the host does not
    wait. Strides are kept, so that the backward pass runs the same kernels.
    """
    is_weight = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
    if is_weight or saved.device.type == "cpu":
        return saved.device, saved
    host = torch.empty_like(saved, device="cpu", pin_memory=saved.device.type == "cuda")
    return saved.device, host.copy_(saved, non_blocking=True)


def _to_device(packed: tuple[torch.device, Tensor]) -> Any:
    device, saved = packed
    return saved.to(device, non_blocking=True)
