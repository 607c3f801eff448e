"""Memory of the activations that the backward pass needs: recomputed, or kept in host memory.

Neither changes a bit of the gradient.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.model.sharding import decoder_layers


def save_activation_memory(hf: PreTrainedModel, model: schema.Model) -> None:
    """Recompute decoder layers of `hf` in the backward pass, and offload, as `model` asks for."""
    if model.enable_gradient_checkpointing:
        if not hf.supports_gradient_checkpointing:
            raise ConfigError(
                f"models of type {hf.config.model_type} cannot compute their layers again",
                where="enable_gradient_checkpointing",
                hint="enable_gradient_checkpointing=false",
            )
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        for number, layer in enumerate(decoder_layers(hf)):
            recomputed = number % model.gradient_checkpointing_every_n_layers == 0
            setattr(layer, "gradient_checkpointing", recomputed)  # noqa: B010
    if model.enable_activation_offload:
        from rlctl.runtime.model.activation_offload import offload_activations

        offload_activations(hf)
