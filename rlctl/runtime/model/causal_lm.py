"""The two trained models: a policy (log-probs of response tokens) and a value function.

Both wrap a transformers backbone, take packed `Sequences` and return flat per-token results, so no
layer processes padding, and the vocabulary projection only processes predicting positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from rlctl.runtime.base.ops import (
    PolicyOutputs,
    log_probs_and_entropy,
    log_probs_of,
    sum_of_squared_probs,
)
from rlctl.runtime.model.attention import TokenAttention
from rlctl.runtime.model.kernels import missing_for_compiler
from rlctl.runtime.model.padded_rows import PaddedDecoder, decoder_of, has_padded_rows
from rlctl.runtime.model.sequences import Sequences

if TYPE_CHECKING:
    from rlctl.runtime.model.sequence_parallel import SequenceGroup
    from rlctl.runtime.model.vocabulary import Vocabulary

# Maximum elements of logits in memory (1 GiB in fp32); larger ones are processed in chunks that are
# recomputed in the backward pass.
MAX_LOGITS = 2**28


@cache
def _builds_kernels() -> bool:
    return missing_for_compiler("cuda") is None


def has_score_kernel(logits: Tensor) -> bool:
    """Return True if a kernel can read `logits` (T, V), and Triton can build it."""
    readable = logits.is_cuda and logits.element_size() <= 4 and logits.is_contiguous()
    return readable and _builds_kernels()


def run_backbone(backbone: Any, sequences: Sequences) -> BaseModelOutput:
    """Return the outputs of a model without head, for all tokens.

    It includes the vision tower if the sequences have images.
    """
    packing = sequences.packing
    routing = sequences.routing
    vision = sequences.vision
    if has_padded_rows(backbone) and vision is None:
        return run_padded(backbone, sequences.ids, packing)
    positions = packing.position_ids[None]
    images: dict[str, Tensor] = {}
    unused = None
    attention: TokenAttention = packing
    if vision is not None and vision.positions is not None:
        from rlctl.runtime.model.image_attention import with_images_ahead

        positions = vision.positions
        images = vision.inputs
        where = sequences.ids, packing.position_ids
        attention = with_images_ahead(backbone.config, packing, *where)
    elif vision is not None:  # before the decoder, as on ranks with images
        unused = backbone.get_image_features(**vision.inputs, return_dict=True).pooler_output
    if routing is not None:
        from rlctl.runtime.model.routing import RoutedTokens

        attention = RoutedTokens(attention, routing)
    output = backbone(
        input_ids=sequences.ids[None],
        position_ids=positions,
        packing=attention,
        use_cache=False,
        **images,
    )
    if unused is None:
        return output
    total = sum(part.sum() for part in unused)
    return _with_hidden_states(output, output.last_hidden_state + 0.0 * total)


def run_padded(decoder: nn.Module, ids: Tensor, packing: TokenAttention) -> BaseModelOutput:
    """Return the outputs of a model without head, on padded rows, for all tokens (T,)."""
    padded = PaddedDecoder(decoder)
    hidden = packing.mix(ids, padded)
    return _with_hidden_states(padded.output, hidden[None])


def logits_of(hf: Any, output: BaseModelOutput, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the logits (T, V) of last hidden states (T, H) of `output`.

    The model's `forward` computes them, because many classes scale or cap logits. Its decoder
    does not run again: it returns `output` with `hidden`. `ids` (T,) are any tokens.
    """
    given = _with_hidden_states(output, hidden[None])
    with _returning(decoder_of(hf), given):
        return hf(input_ids=ids[None], use_cache=False).logits.squeeze(0)


def predicting(output: BaseModelOutput, sequences: Sequences) -> Tensor:
    """Return the last hidden states at predicting positions: (T_response, H)."""
    assert output.last_hidden_state is not None, "every model without head returns them"
    return output.last_hidden_state.squeeze(0).index_select(0, sequences.predictors)


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


class PackedModel(nn.Module):
    """A transformers model on packed sequences, which a group of ranks may compute together."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.sequence_group: SequenceGroup | None = None  # None: this rank has all tokens
        self.ranks_per_row = 1  # ranks with the same rows; their numbers are adjacent


class PolicyModel(PackedModel):
    """Policy: log π(token | preceding tokens) at `temperature`."""

    def __init__(self, hf: PreTrainedModel, temperature: float) -> None:
        super().__init__(hf)
        self.temperature = temperature
        self.vocabulary: Vocabulary | None = None  # None: this rank has all logits

    def forward(
        self,
        sequences: Sequences,
        with_entropy: bool = False,
        with_squares: bool = False,
        top_k: int = 0,
    ) -> PolicyOutputs:
        """Return log-probs, and optionally entropies and Σ_v π(v)², (T_response,) each.

        Also the log-probs of the sequences' candidates, or those of the `top_k` most probable
        tokens, (T_response, K).
        """
        wanted = (with_entropy, with_squares, top_k)
        if self.sequence_group is None:
            return self._outputs(sequences, wanted)
        part = self.sequence_group.slice(sequences)
        log_probs, *others = self._outputs(part.sequences, wanted)
        if sequences.routing is not None:
            part.join_routing(sequences.routing)
        joined = (part.join_tokens(each) if each is not None else None for each in others)
        return PolicyOutputs(part.join_tokens(log_probs), *joined)

    def _outputs(self, sequences: Sequences, wanted: tuple[bool, bool, int]) -> PolicyOutputs:
        """Return the outputs for the tokens of this rank: see `forward`."""
        backbone = decoder_of(self.hf)
        if sequences.vision is not None:
            backbone = self.hf.base_model
        output = run_backbone(backbone, sequences)
        hidden = predicting(output, sequences)
        output = _with_hidden_states(output, None)  # those of other positions are not kept
        vocabulary = self.hf.config.get_text_config().vocab_size
        chunk = max(1, MAX_LOGITS // vocabulary)
        wanted = (*wanted[:2], min(wanted[2], vocabulary))
        if len(hidden) <= chunk:
            parts = [self._score(output, hidden, sequences.targets, sequences.candidates, wanted)]
        else:
            targets = sequences.targets.split(chunk)
            given = sequences.candidates
            candidates = given.split(chunk) if given is not None else [None] * len(targets)
            parts = [
                checkpoint(self._score, output, *part, wanted, use_reentrant=False)
                for part in zip(hidden.split(chunk), targets, candidates, strict=True)
            ]
        log_probs, *others = zip(*parts, strict=True)
        joined = (torch.cat(each) if each[0] is not None else None for each in others)
        return PolicyOutputs(torch.cat(log_probs), *joined)

    def _score(
        self,
        output: BaseModelOutput,
        hidden: Tensor,
        targets: Tensor,
        candidates: Tensor | None,
        wanted: tuple[bool, bool, int],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Score a chunk: hidden (T, H), targets (T,) int64 -> the fields of `PolicyOutputs`.

        `wanted` are `with_entropy`, `with_squares` and `top_k` of `forward`.
        """
        logits = logits_of(self.hf, output, hidden, targets)
        if self.vocabulary is not None:
            return self._divided(self.vocabulary, logits, targets, candidates, wanted)
        with_entropy, with_squares, top_k = wanted
        ids = logits.topk(top_k).indices if top_k else candidates
        if has_score_kernel(logits):
            from rlctl.runtime.model.score_kernels import FusedScore, may_overwrite

            overwrite = ids is None and may_overwrite(logits)
            scores: Any = FusedScore.apply(logits, targets, self.temperature, overwrite)
            log_probs, entropy, squares = scores
        else:
            log_probs, entropy = log_probs_and_entropy(
                logits, targets, self.temperature, with_entropy
            )
            squares = sum_of_squared_probs(logits, self.temperature) if with_squares else None
        others = log_probs_of(logits, ids, self.temperature) if ids is not None else None
        if not with_entropy:
            entropy = None
        if not with_squares:
            squares = None
        return log_probs, entropy, squares, ids, others

    def _divided(
        self,
        vocabulary: Vocabulary,
        logits: Tensor,
        targets: Tensor,
        candidates: Tensor | None,
        wanted: tuple[bool, bool, int],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Score logits (T, V / N) of this rank's tokens: see `_score`."""
        with_entropy, with_squares, top_k = wanted
        others = vocabulary.top_k(logits, top_k) if top_k else candidates
        ids = targets[:, None]
        if others is not None:
            ids = torch.cat([ids, others], -1)
        found, entropy = vocabulary.log_probs_and_entropy(
            logits, ids, self.temperature, with_entropy
        )
        squares = None
        if with_squares:
            squares = vocabulary.sum_of_squared_probs(logits, self.temperature)
        log_probs_of_others = None if others is None else found[:, 1:]
        return found[:, 0], entropy, squares, others, log_probs_of_others


class ValueModel(PackedModel):
    """Value function V(preceding tokens): a linear head on the backbone, initialized to V = 0."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        self.head = nn.Linear(hf.config.get_text_config().hidden_size, 1, dtype=hf.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, sequences: Sequences) -> Tensor:
        """Return one value per response token: (T_response,) float32."""
        if self.sequence_group is None:
            return self._values(sequences)
        part = self.sequence_group.slice(sequences)
        return part.join_tokens(self._values(part.sequences))

    def _values(self, sequences: Sequences) -> Tensor:
        """Return the values (T_response,) for the tokens of this rank."""
        return self.head(predicting(run_backbone(self.hf, sequences), sequences))[:, 0].float()
