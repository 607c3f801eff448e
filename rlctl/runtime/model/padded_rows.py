"""Models that compute padded rows in place of a packed one: the slow path.

Any causal model gives the same for a row with padding on its right. So a model that cannot compute
a packed row, because its attention or its states cannot be replaced, gets complete rows of similar
lengths, with the attention that transformers gives it. It costs the padding, a prompt is computed
once per response, and the engine `hf` decodes rows together only if their lengths are equal.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel

from rlctl.errors import ConfigError

_LOG = logging.getLogger(__name__)
_PADDED = "_rlctl_padded"  # attribute of a model


class PaddedDecoder:
    """Model without head that mixes token ids; implements `Mixer`."""

    packed = None

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        self.output: Any = None  # of the last call

    @property
    def is_sharded(self) -> bool:
        """See `Mixer`."""
        return any(isinstance(each, DTensor) for each in self.decoder.parameters())

    def __call__(self, tokens: Tensor, states: DynamicCache | None = None) -> Tensor:
        """See `Mixer`: ids (B, L) -> hidden states (B, L, H)."""
        cached = {} if states is None else {"past_key_values": states}
        self.output = self.decoder(input_ids=tokens, use_cache=states is not None, **cached)
        return self.output.last_hidden_state

    def new_states(self) -> DynamicCache:
        """See `Mixer`."""
        return DynamicCache(config=self.decoder.config)  # pyright: ignore[reportArgumentType]


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without head; transformers' answer may be the model, or its head."""
    decoder: nn.Module = model.get_decoder()
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        inner = (part for part in model.children() if isinstance(part, PreTrainedModel))
        decoder = next(inner, model)
    if decoder is not model and decoder.get_output_embeddings() is not None:
        return decoder_of(decoder)  # Llama 4 with images holds a model with a head
    return decoder


def use_padded_rows(model: PreTrainedModel) -> None:
    """Let `model` compute padded rows, in place."""
    for part in (model, model.base_model, decoder_of(model)):
        setattr(part, _PADDED, True)
    use_own_attention(model)


def warn_of_padding(model: PreTrainedModel, reason: str) -> None:
    """Log once per process that `model` takes the slow path, and why."""
    _warn(model.config.model_type, reason)


def use_own_attention(model: PreTrainedModel, name: str | None = None) -> None:
    """Switch `model` to an attention of transformers, if its class can: by default the fastest."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name or ("sdpa" if model._supports_sdpa else "eager"))


def has_padded_rows(model: nn.Module) -> bool:
    """Return True if `model`, with or without head, computes padded rows."""
    return getattr(model, _PADDED, False)


def check_undivided(model: PreTrainedModel, ranks_per_row: int) -> None:
    """Raise ConfigError if several ranks are to share rows that `model` pads."""
    if ranks_per_row > 1 and has_padded_rows(model):
        raise ConfigError(
            f"models of type {model.config.model_type} compute padded rows, whose tokens and "
            "layers ranks cannot divide",
            hint="set tensor_model_parallel_size, ulysses_sequence_parallel_size and "
            "pipeline_model_parallel_size to 1; FSDP2 shards such models over all ranks",
        )


@cache
def _warn(kind: str, reason: str) -> None:
    _LOG.warning(
        f"models of type {kind} take the slow path, because {reason}: rows are computed with "
        "padding to similar lengths, prompts once per response, and the engine hf decodes rows "
        "together only if they are equally long (vLLM, where it knows the model, does not)"
    )
