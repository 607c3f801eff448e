"""Images of packed rows: those of prompts, and of replies in responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.image_processor import Images, image_token
from rlctl.runtime.model.image_attention import LOOKS_AHEAD
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.vision import (
    SeenPrompt,
    check_responses,
    join_vision,
    seen_reply,
    split_images,
)


def with_images(
    sequences: Sequences,
    hf: PreTrainedModel,
    texts: tuple[Ragged, Ragged],
    images: Sequence[Images],
) -> Sequences:
    """Return packed rows with the images of their B rows: see `Sequences.with_images`.

    `texts` are the prompts and responses.
    """
    prompts, responses = texts
    seen: dict[tuple[bytes, Images], SeenPrompt] = {}
    rows: list[SeenPrompt] = []
    replies: list[SeenPrompt | None] = []
    for ids, response, row_images in zip(prompts.rows(), responses.rows(), images, strict=True):
        before, after = split_images(hf, ids, row_images)
        key = ids.numpy().tobytes(), before
        rows.append(seen.get(key) or seen.setdefault(key, SeenPrompt.of(hf, ids, before)))
        replies.append(seen_reply(hf, (ids, response), (before, after)) if after else None)
    if any(replies) and hf.config.model_type in LOOKS_AHEAD:
        raise ConfigError(
            f"replies may have no images with models of type {hf.config.model_type}, whose "
            "tokens of an image attend to later ones",
            hint="use another vision-language model, such as Qwen3-VL",
        )
    check_responses(hf, responses.rows(), images, [reply is None for reply in replies])
    triples = zip(rows, replies, responses.lengths.tolist(), strict=True)
    positions = torch.cat(  # (A, N)
        [row.followed_by(length) if r is None else r.positions for row, r, length in triples], 1
    )
    if sequences.token_of_rows is not None:
        packed = positions.new_empty(len(positions), len(sequences.ids))
        packed[:, sequences.token_of_rows.cpu()] = positions
        positions = packed
    if sequences.prompt_rows is None:
        parts = [part for pair in zip(rows, replies, strict=True) for part in pair]
    else:
        parts = [*(rows[row] for row in sequences.prompt_rows), *replies]
    vision = join_vision([part for part in parts if part], positions, sequences.ids.device)
    if not any(replies):
        return replace(sequences, vision=vision)
    # Nothing learns from the tokens of replies, and those of images have no log-prob.
    number = image_token(hf.config)
    other = sequences.ids[sequences.ids != number][0]
    return replace(
        sequences,
        vision=vision,
        targets=sequences.targets.where(sequences.targets != number, other),
    )
