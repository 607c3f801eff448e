"""The two trained models: a policy (log-probs of response tokens) and a value function.

Both wrap a transformers backbone, take packed `Sequences` and return flat per-token results, so no
layer processes padding, and the vocabulary projection only processes predicting positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.ops import log_probs_and_entropy, sum_of_squared_probs

# Maximum elements of logits in memory (1 GiB in fp32); larger ones are processed in chunks that are
# recomputed in the backward pass.
MAX_LOGITS = 2**28


@dataclass(frozen=True, eq=False)
class PolicyOutputs:
    """Outputs for T response tokens; None if not requested."""

    log_probs: Tensor  # (T,)
    entropy: Tensor | None  # (T,), nats
    sum_pi_squared: Tensor | None = None  # (T,): Σ_v π(v)², without a gradient


def _hidden_states(backbone: nn.Module, sequences: Sequences) -> Tensor:
    """Return the last hidden states at predicting positions: (T_response, H)."""
    packing = sequences.packing
    out = backbone(
        input_ids=sequences.ids[None],
        position_ids=packing.position_ids[None],
        packing=packing,
        use_cache=False,
    )
    return out.last_hidden_state[0][sequences.predictors]


class PolicyModel(nn.Module):
    """Policy: log π(token | preceding tokens) at `temperature`."""

    def __init__(self, hf: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.hf = hf
        self.temperature = temperature

    def forward(
        self, sequences: Sequences, with_entropy: bool, with_squares: bool = False
    ) -> PolicyOutputs:
        """Return log-probs, and optionally entropies and Σ_v π(v)², (T_response,) each."""
        hidden = _hidden_states(self.hf.get_decoder(), sequences)  # (T, H)
        head = self.hf.get_output_embeddings()
        assert head is not None, "a causal language model has a vocabulary projection"
        chunk = max(1, MAX_LOGITS // self.hf.config.get_text_config().vocab_size)
        if len(hidden) <= chunk:
            return PolicyOutputs(
                *self._score(head, hidden, sequences.targets, with_entropy, with_squares)
            )
        parts = [
            checkpoint(
                self._score, head, part, targets, with_entropy, with_squares, use_reentrant=False
            )
            for part, targets in zip(
                hidden.split(chunk), sequences.targets.split(chunk), strict=True
            )
        ]
        log_probs, entropies, squares = zip(*parts, strict=True)
        return PolicyOutputs(
            torch.cat(log_probs),
            torch.cat(entropies) if with_entropy else None,
            torch.cat(squares) if with_squares else None,
        )

    def _score(
        self,
        head: nn.Module,
        hidden: Tensor,
        targets: Tensor,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Score a chunk: hidden (T, H), targets (T,) int64 -> three tensors (T,) or None."""
        logits = head(hidden)
        scores = log_probs_and_entropy(logits, targets, self.temperature, with_entropy)
        return *scores, sum_of_squared_probs(logits, self.temperature) if with_squares else None


class ValueModel(nn.Module):
    """Value function V(preceding tokens): a linear head on the backbone, initialized to V = 0."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.head = nn.Linear(hf.config.get_text_config().hidden_size, 1, dtype=hf.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, sequences: Sequences) -> Tensor:
        """Return one value per response token: (T_response,) float32."""
        return self.head(_hidden_states(self.hf, sequences))[:, 0].float()
