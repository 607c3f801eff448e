"""Model as repositories of the hub have it: its own attention, and transformers' cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_own import OwnConfig


class OwnLayer(nn.Module):
    """Attention of each token to the tokens up to itself."""

    def __init__(self, config: OwnConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, cache: Cache | None) -> Tensor:
        """Map (B, L, H) to (B, L, H)."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, -1)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.number)
        length, keys = query.shape[2], key.shape[2]
        mask = torch.ones(length, keys, dtype=torch.bool, device=hidden.device)
        mixed = scaled_dot_product_attention(query, key, value, mask.tril(keys - length))
        return hidden + self.out(mixed.transpose(1, 2).flatten(2))


class OwnPreTrainedModel(PreTrainedModel):
    """Config and names that both models have."""

    config_class = OwnConfig
    base_model_prefix = "model"
    _no_split_modules = ("OwnLayer",)


class OwnModel(OwnPreTrainedModel):
    """Decoder with learned positions, which it counts itself."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.place = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            OwnLayer(config, number) for number in range(config.num_hidden_layers)
        )
        self.post_init()

    def forward(
        self, input_ids: Tensor, past_key_values: Cache | None = None, **_: Any
    ) -> BaseModelOutputWithPast:
        """Map ids (B, L) to hidden states (B, L, H)."""
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        place = torch.arange(before, before + input_ids.shape[1], device=input_ids.device)
        hidden = self.embed(input_ids) + self.place(place)
        for layer in self.layers:
            hidden = layer(hidden, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


class OwnForCausalLM(OwnPreTrainedModel, GenerationMixin):
    """The decoder with a head."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **others: Any) -> CausalLMOutputWithPast:
        """Map ids (B, L) to logits (B, L, V)."""
        output = self.model(input_ids, **others)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state))
