"""Config of `modeling_own`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class OwnConfig(PreTrainedConfig):
    """Sizes of a decoder that transformers does not have."""

    model_type = "own_lm"

    def __init__(
        self, vocab_size: int = 64, hidden_size: int = 32, context: int = 512, **others: Any
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = 2
        self.num_attention_heads = 4
        self.max_position_embeddings = context
        super().__init__(**others)
