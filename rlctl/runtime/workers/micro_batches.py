"""Micro-batches on the device: their tokens in one packed row, with the images of their rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.runtime.base.balance import TokenCounts
from rlctl.runtime.base.batch import Ragged, Rollouts
from rlctl.runtime.model.causal_lm import PackedModel
from rlctl.runtime.model.sequences import Sequences, prompt_numbers
from rlctl.runtime.model.sharding import is_sharded
from rlctl.runtime.model.tower import image_processor

B = TypeVar("B", bound=Rollouts)


def count_tokens(model: PackedModel, batch: Rollouts) -> TokenCounts:
    """Return the tokens of B rows to process; a patch of an image counts as one more."""
    numbers = prompt_numbers(batch.prompt_ids, batch.routing, batch.images)
    if not any(batch.images):
        return TokenCounts(batch.num_tokens, numbers, batch.prompt_ids.lengths)
    if model.ranks_per_row > 1:
        raise ConfigError(
            "ranks that divide rows or layers take no rows with images",
            hint="set the sizes of parallelism to 1; FSDP2 shards all weights",
        )
    from rlctl.runtime.model.vision import num_patches

    of_prompts = num_patches(model.hf, batch.prompt_ids)
    patches = of_prompts + num_patches(model.hf, batch.response_ids)
    return TokenCounts(batch.num_tokens + patches, numbers, batch.prompt_ids.lengths + of_prompts)


def pack_rows(
    model: PackedModel, batch: B, rows: Tensor, counts: TokenCounts, device: str
) -> tuple[B, Sequences]:
    """Return the `rows` (N,) int64 of a micro-batch on the device, and pack them.

    An empty micro-batch takes part in collectives with one token, and one without images with one
    image.
    """
    here = batch if len(batch) == len(rows) == 1 else batch.select(rows)
    part = here.to(device)
    if len(part):
        columns = part.prompt_ids, part.response_ids, part.candidates, counts.prompt[rows]
        sequences = Sequences.from_ragged(*columns, part.routing)
        texts = here.prompt_ids, here.response_ids
        sequences = sequences.with_images(model.hf, *texts, here.images)
    else:
        token = Ragged.from_rows([[0]], torch.int64).to(device)
        sequences = Sequences.from_ragged(token, token)
    reads_images = image_processor(model.hf) is not None
    if reads_images and sequences.vision is None and is_sharded(model):
        from rlctl.runtime.model.vision import blank_image

        sequences = replace(sequences, vision=blank_image(model.hf))
    return part, sequences
