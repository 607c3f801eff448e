"""The two trained models: a policy (log-probs of response tokens) and a value function.

Both wrap a transformers backbone, take packed `Sequences` and return flat per-token results, so no
layer processes padding, and the vocabulary projection only processes predicting positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

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


def run_backbone(backbone: nn.Module, sequences: Sequences) -> BaseModelOutput:
    """Return the outputs of a model without head, for all tokens."""
    packing = sequences.packing
    return backbone(
        input_ids=sequences.ids[None],
        position_ids=packing.position_ids[None],
        packing=packing,
        use_cache=False,
    )


def predicting(output: BaseModelOutput, sequences: Sequences) -> Tensor:
    """Return the last hidden states at predicting positions: (T_response, H)."""
    assert output.last_hidden_state is not None, "every model without head returns them"
    return output.last_hidden_state[0][sequences.predictors]


def _with_hidden_states(output: BaseModelOutput, hidden: Tensor | None) -> BaseModelOutput:
    """Return a copy of `output` with the last hidden states (1, T, H), or without."""
    return type(output)(**{**output, "last_hidden_state": hidden})


@contextmanager
def _returning(module: nn.Module, output: BaseModelOutput) -> Iterator[None]:
    """Make calls of `module` return `output` within the block."""
    module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        del module.forward  # the attribute of the instance, which hides the method of the class


class PolicyModel(nn.Module):
    """Policy: log π(token | preceding tokens) at `temperature`."""

    def __init__(self, hf: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.hf = hf
        self.temperature = temperature

    def forward(
        self, sequences: Sequences, with_entropy: bool = False, with_squares: bool = False
    ) -> PolicyOutputs:
        """Return log-probs, and optionally entropies and Σ_v π(v)², (T_response,) each."""
        output = run_backbone(self.hf.get_decoder(), sequences)
        hidden = predicting(output, sequences)
        output = _with_hidden_states(output, None)  # those of other positions are not kept
        chunk = max(1, MAX_LOGITS // self.hf.config.get_text_config().vocab_size)
        if len(hidden) <= chunk:
            return PolicyOutputs(
                *self._score(output, hidden, sequences.targets, with_entropy, with_squares)
            )
        parts = [
            checkpoint(
                self._score, output, part, targets, with_entropy, with_squares, use_reentrant=False
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
        output: BaseModelOutput,
        hidden: Tensor,
        targets: Tensor,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Score a chunk: hidden (T, H), targets (T,) int64 -> three tensors (T,) or None."""
        logits = self._logits(output, hidden, targets)
        scores = log_probs_and_entropy(logits, targets, self.temperature, with_entropy)
        return *scores, sum_of_squared_probs(logits, self.temperature) if with_squares else None

    def _logits(self, output: BaseModelOutput, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the logits (T, V) of last hidden states (T, H).

        The model's own `forward` computes them, because many classes scale or cap logits. Its
        decoder does not run again: it returns `output` with `hidden`. `ids` (T,) are any tokens.
        """
        given = _with_hidden_states(output, hidden[None])
        with _returning(self.hf.get_decoder(), given):
            return self.hf(input_ids=ids[None], use_cache=False).logits[0]


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
        return self.head(predicting(run_backbone(self.hf, sequences), sequences))[:, 0].float()
