"""Rows with images for the check of packed rows, see `probe`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.data_prep.decoded_images import pattern
from rlctl.runtime.base.image_processor import image_token, num_image_tokens
from rlctl.runtime.model.probe import Row, arbitrary_tokens
from rlctl.runtime.model.tower import image_processor


def image_rows(hf: PreTrainedModel) -> list[Row]:
    """Return two rows with an image and one with both; the first two share a prompt."""
    processor = image_processor(hf)
    rows: list[Row] = []
    assert processor is not None
    first, second = (pattern(width, 56) for width in (56, 112))
    for number, images in enumerate([(first,), (first,), (first, second)]):
        counts = [num_image_tokens(processor.inputs([image]), hf.config) for image in images]
        parts = [torch.full((n,), image_token(hf.config), device=hf.device) for n in counts]
        text = arbitrary_tokens(hf, 8 + number)
        prompt = torch.cat([*(each for part in parts for each in (text[:4], part)), text[:3]])
        rows.append(Row(torch.cat([prompt, text.flip(0)]), len(prompt), images))
    return rows


def image_arguments(part: Any, row: Row, copies: int) -> dict[str, Tensor]:
    """Return the arguments of a pass of `copies` of a row (N,) for its images: (copies, N), …"""
    processor = image_processor(part)
    assert processor is not None
    known = inspect.signature(part.forward).parameters
    types = (row.ids == image_token(part.config)).int().expand(copies, -1)
    given = {**processor.inputs(row.images * copies)}
    given |= dict.fromkeys(("mm_token_type_ids", "token_type_ids"), types)
    return {name: value.to(part.device) for name, value in given.items() if name in known}
