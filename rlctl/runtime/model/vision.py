"""Images in a pass of a vision-language model on a packed row.

The vision tower computes the images of each packed prompt once. The model's class says at which
positions the tokens of an image are; those of a response continue after its prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from rlctl.data_prep.images import digest_of
from rlctl.errors import ConfigError, RlctlError
from rlctl.files import write_bytes
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.image_processor import (
    ImageProcessor,
    Images,
    Inputs,
    image_token,
    num_image_tokens,
    patches_per_token,
)
from rlctl.runtime.base.ops import to_device
from rlctl.runtime.model.tower import PROCESSOR, image_processor, placeholder_ids

INEXACT = "_rlctl_images_refused"  # attribute of a model: the error of its probe with images
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, eq=False)
class Vision:
    """Images of a packed row of T tokens, on the device."""

    inputs: Inputs  # arguments of `forward`, of the images in the order of their tokens
    positions: Tensor | None  # (A, 1, T) or (1, T) int64; None: these images are not in the row


def give_images(hf: PreTrainedModel, processor: ImageProcessor) -> None:
    """Let `hf` read images, in place, and never predict their placeholders.

    Both engine and trainer compute logits by the model's `forward`, so that they agree.
    """
    for part in (hf, hf.base_model):
        setattr(part, PROCESSOR, processor)
    ids = torch.tensor(placeholder_ids(hf.config), dtype=torch.int64)
    on_device: dict[torch.device, Tensor] = {}  # a CUDA graph may not copy them there

    def forbid(_: nn.Module, __: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if logits is None:
            return
        if logits.device not in on_device:
            with torch.inference_mode(False):  # the backward pass keeps them
                on_device[logits.device] = ids.to(logits.device)
        logits.index_fill_(-1, on_device[logits.device], -torch.inf)

    if hf.can_generate():
        hf.register_forward_hook(forbid)


def blank_image(hf: nn.Module) -> Vision | None:
    """Return an image without placeholders in the row, for a model that reads images.

    Ranks that share weights compute it where a micro-batch has no image: they gather the weights of
    the vision tower together.
    """
    processor = image_processor(hf)
    if processor is None:
        return None
    device = next(hf.parameters()).device
    inputs = known_inputs(hf, processor.process(torch.zeros(56, 56, 3, dtype=torch.uint8).numpy()))
    return Vision({name: to_device(value, device) for name, value in inputs.items()}, None)


def known_inputs(hf: Any, inputs: Inputs) -> Inputs:
    """Return the inputs that the model's `forward` takes, as tensors."""
    known = inspect.signature(hf.base_model.forward).parameters
    return {name: torch.as_tensor(value) for name, value in inputs.items() if name in known}


def copy_processor(hf: PreTrainedModel, folder: Path) -> None:
    """Copy the settings of a model's image processor to the folder of its export."""
    processor = image_processor(hf)
    if processor is None:
        return
    for name in _FILES:
        missing_ok = {"_raise_exceptions_for_missing_entries": False}
        found = cached_file(processor.source, name, **missing_ok)
        if found is not None:
            write_bytes(folder / name, Path(found).read_bytes())


def prompt_positions(hf: PreTrainedModel, ids: Tensor, inputs: Inputs | None) -> Tensor:
    """Return the positions of the tokens (N,) of a prompt: (A, N), A = 1 or 3 axes."""
    index = getattr(hf.base_model, "get_rope_index", None)
    if index is None:
        return torch.arange(len(ids)).expand(1, -1)
    if inputs is None:
        return torch.arange(len(ids)).expand(3, -1)
    types = (ids == image_token(hf.config)).int()
    grids = {name: value for name, value in inputs.items() if name.endswith("_grid_thw")}
    return index(ids[None], mm_token_type_ids=types[None], **grids)[0][:, 0]


def num_patches(hf: PreTrainedModel, prompts: Ragged) -> Tensor:
    """Return how many patches of images the vision tower computes for each of B prompts: (B,)."""
    tokens = prompts.like((prompts.values == image_token(hf.config)).long()).sums()
    return tokens * patches_per_token(hf.config)


@dataclass(frozen=True, eq=False)
class SeenPrompt:
    """A prompt of N tokens with its images, processed."""

    inputs: Inputs | None
    positions: Tensor  # (A, N) int64

    @classmethod
    def of(cls, hf: PreTrainedModel, ids: Tensor, images: Images) -> SeenPrompt:
        """Process the images of a prompt (N,) on the CPU.

        Raises RlctlError if its tokens do not have as many images, ConfigError for a model whose
        passes with images are not exact.
        """
        processor = image_processor(hf)
        inputs = None
        if images and processor is None:
            raise ConfigError(f"{hf.name_or_path} reads text alone, and a row has images")
        if images and (error := getattr(hf, INEXACT, None)) is not None:
            raise error
        if images and processor is not None:
            inputs = known_inputs(hf, processor.inputs(images))
            expected = num_image_tokens(inputs, hf.config)
            check_count(expected, int((ids == image_token(hf.config)).sum()), images)
        return cls(inputs, prompt_positions(hf, ids, inputs))

    @property
    def next_position(self) -> int:
        """Position of the first token after the prompt."""
        return int(self.positions.max()) + 1

    def followed_by(self, num_tokens: int) -> Tensor:
        """Return positions of the prompt and M = `num_tokens` tokens after it: (A, N+M)."""
        after = self.next_position + torch.arange(num_tokens)
        return torch.cat([self.positions, after.expand(len(self.positions), -1)], 1)


def check_count(expected: int, count: int, images: Images) -> None:
    """Raise RlctlError unless the `count` of tokens of a row's images is as `expected`."""
    if count != expected:
        raise RlctlError(
            f"a prompt has {count} tokens of images, and its {len(images)} images give {expected}",
            where=described(images),
            hint="placeholders are neither cut nor written by hand; write <image> for an image",
        )


def split_images(hf: PreTrainedModel, ids: Tensor, images: Images) -> tuple[Images, Images]:
    """Split the images of a row into those of its prompt (N,) and those of replies after it.

    All are of the prompt if its tokens do not tell: `SeenPrompt.of` raises the error.
    """
    processor = image_processor(hf)
    if processor is None or not images:
        return images, ()
    left = int((ids == image_token(hf.config)).sum())
    for number, inputs in enumerate(processor.parts(images)):
        if left == 0:
            return images[:number], images[number:]
        left -= num_image_tokens(inputs, hf.config)
    return images, ()


def seen_reply(
    hf: PreTrainedModel, texts: tuple[Tensor, Tensor], images: tuple[Images, Images]
) -> SeenPrompt:
    """Return the images of replies in a response, and the positions of the row: (A, N).

    `texts` are prompt and response, `images` those of each. Raises as `SeenPrompt.of`.
    """
    whole = SeenPrompt.of(hf, torch.cat(texts), sum(images, ()))
    processor = image_processor(hf)
    assert processor is not None
    return SeenPrompt(known_inputs(hf, processor.inputs(images[1])), whole.positions)


def check_responses(
    hf: PreTrainedModel,
    responses: Sequence[Tensor],
    images: Sequence[Images],
    checked: Sequence[bool],
) -> None:
    """Raise RlctlError if a response (N,) that is `checked` has a placeholder of an image."""
    for number, (response, row_images) in enumerate(zip(responses, images, strict=True)):
        if checked[number] and (response == image_token(hf.config)).any():
            raise RlctlError(
                f"the response in row {number} of a micro-batch has tokens of images",
                where=described(row_images),
                hint="only prompts and replies may have images, and text contains no such token",
            )


def described(images: Images) -> str:
    """Return how errors name the row of images."""
    return f"the row with images of SHA-256 {', '.join(digest_of(each)[:12] for each in images)}"


def join_vision(seen: Sequence[SeenPrompt], positions: Tensor | None, device: Any) -> Vision | None:
    """Return the images of the packed prompts `seen`, None without any.

    `positions` (A, T) are those of all packed tokens; None: there are no tokens after the prompts.
    """
    inputs = [prompt.inputs for prompt in seen if prompt.inputs is not None]
    if not inputs:
        return None
    joined = {name: torch.cat([part[name] for part in inputs]) for name in inputs[0]}
    if positions is None:
        positions = torch.cat([prompt.positions for prompt in seen], 1)
    placed = positions if len(positions) == 1 else positions[:, None]
    return Vision(
        {name: to_device(value, device) for name, value in joined.items()},
        to_device(placed.contiguous(), device),
    )
