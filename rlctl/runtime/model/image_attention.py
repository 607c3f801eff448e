"""Attention of Gemma 3 among packed tokens: those of an image attend to later ones of it, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlctl.runtime.base.image_processor import image_token
from rlctl.runtime.model.attention import TokenAttention
from rlctl.runtime.model.kernels import Reach, attend_dense

if TYPE_CHECKING:
    from rlctl.runtime.model.mixers import Mixer

LOOKS_AHEAD = ("gemma3",)  # types of models


@dataclass(frozen=True, eq=False)
class ImageAttention:
    """Attention `inner` of T tokens in which those of each image see all of it."""

    inner: TokenAttention
    spans: list[tuple[int, int, int]]  # of images: start of the sequence, first token, end

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Attend, and again for images: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        causal = self.inner.attend(layer, query, key, value, reach)
        parts: list[Tensor] = []
        done = 0
        for start, first, end in self.spans:
            visible = query.new_ones(end - first, end - start, dtype=torch.bool)
            if reach.window is not None:  # which limits only how far back a token sees
                visible = visible.triu(first - start - reach.window + 1)
            states = (query[first:end], key[start:end], value[start:end])
            q, k, v = (part.transpose(0, 1)[None] for part in states)
            found = attend_dense(q, k, v, reach, visible[None, None])[0].transpose(0, 1)
            parts += [causal[done:first], found]
            done = end
        return torch.cat([*parts, causal[done:]])

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """See `TokenAttention`: (T, ...) -> (T, C)."""
        return self.inner.mix(hidden, mixer)


def with_images_ahead(
    config: Any, attention: TokenAttention, ids: Tensor, positions: Tensor
) -> TokenAttention:
    """Return the attention of tokens (T,) with images, for a model of `config`.

    `positions` (T,) are those in their sequences, which are complete up to the last image.
    """
    if config.model_type not in LOOKS_AHEAD:
        return attention
    places = (ids == image_token(config)).cpu()
    values, lengths = torch.unique_consecutive(places, return_counts=True)
    ends = lengths.cumsum(0).tolist()
    spans = list[tuple[int, int, int]]()
    for is_image, length, end in zip(values.tolist(), lengths.tolist(), ends, strict=True):
        if is_image:
            first = end - length
            spans.append((first - int(positions[first]), first, end))
    return ImageAttention(attention, spans)
