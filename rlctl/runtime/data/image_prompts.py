"""Prompts with images: the tokens of an image take the place of its part of a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlctl.data_prep.images import Image, content_of, images_in, with_parts
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.base.image_processor import processor_class, processor_of, source_of
from rlctl.runtime.data.tokenizer import Chat, render_prompt


class ImagePrompts:
    """Renderer of prompts with images for one model, whose chat template the tokenizer has."""

    def __init__(self, model: schema.Model | None, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the processor of `model`; None: a role that reads no images.

        Raises:
            MissingExtraError: Pillow is not installed.
            ConfigError: the model reads text alone.
        """
        from rlctl.data_prep.decoded_images import require_pillow

        require_pillow("data.image_key")
        found = model and processor_of(model.path, model.trust_remote_code)
        if model is None or found is None:
            raise ConfigError(
                "the rows have images, and the model reads text alone",
                where="" if model is None else model.path,
                hint="use a vision-language model with its preprocessor_config.json, such as "
                "Qwen3-VL, or rows without images",
            )
        self.tokenizer = tokenizer
        self.images = found
        self._processor: Any = _build(model, found.processor, tokenizer)
        self._tokens_of = lru_cache(maxsize=None)(self._tokens_of_size)

    @property
    def settings(self) -> str:
        """Everything that the lengths of prompts depend on, besides the tokenizer."""
        return f"{self.images.processor} {self.images.kwargs}"

    def render(self, chat: Chat, images: Sequence[Image], **kwargs: Any) -> str:
        """Render `chat`, which refers to `images` by `<image>`, with the tokens of each image.

        Raises ConfigError if the template rejects the chat, or an image cannot be read.
        """
        if not images:
            return render_prompt(self.tokenizer, chat, **kwargs)
        chat = with_parts(chat, images)
        return self.expand(render_prompt(self.tokenizer, chat, **kwargs), images)

    def expand(self, text: str, images: Sequence[Image]) -> str:
        """Return the rendered `text` with all tokens of its images. Raises ConfigError."""
        first, *others = text.split(self._processor.image_token)
        if len(others) != len(images):
            raise ConfigError(
                f"the chat template writes {len(others)} of {len(images)} images",
                where=self.tokenizer.name_or_path,
                hint="use the chat template of the vision-language model",
            )
        from rlctl.data_prep.decoded_images import size_of

        tokens = [self._tokens_of(size_of(content_of(image))) for image in images]
        return first + "".join(map("".join, zip(tokens, others, strict=True)))

    def _tokens_of_size(self, size: tuple[int, int]) -> str:
        """Return the placeholders, as text, of an image of `size`, width and height.

        Raises ConfigError for a size that the model's processor refuses.
        """
        tokens_of = self._tokens_by_count if self._counts_patches else self._tokens_of_blank
        try:
            return tokens_of(size)
        except ValueError as error:  # some have a largest aspect ratio
            width, height = size
            raise ConfigError(
                f"an image of {width} × {height} pixels is refused by the model's image processor: "
                f"{error}",
                hint="resize the image, or `data.skip_invalid=true` leaves such rows out",
            ) from error

    @cached_property
    def _counts_patches(self) -> bool:
        """True if the tokens of an image follow from its number of patches, for an example."""
        size = (112, 56)
        has_count = hasattr(self.images.processor, "merge_size")
        return has_count and self._tokens_by_count(size) == self._tokens_of_blank(size)

    def _tokens_by_count(self, size: tuple[int, int]) -> str:
        count = self.images.processor.get_number_of_image_patches(*size[::-1], self.images.kwargs)
        inputs = {"image_grid_thw": torch.tensor([[1, 1, count]])}
        return self._processor.replace_image_token(inputs, image_idx=0)

    def _tokens_of_blank(self, size: tuple[int, int]) -> str:
        """Process a blank image, which takes as long as any other."""
        from PIL import Image as Pillow

        inputs = self.images.process(Pillow.new("RGB", size))
        return self._processor.replace_image_token(inputs, image_idx=0)


@lru_cache(maxsize=1)  # callers ask for each row of a file
def row_renderer(tokenizer: PreTrainedTokenizerBase) -> Callable[[PromptRow], str]:
    """Return a function that renders a row's prompt for the model in the tokenizer's folder."""

    @cache
    def images() -> ImagePrompts:
        path = tokenizer.name_or_path
        return ImagePrompts(
            schema.Model.model_construct(path=path, trust_remote_code=False), tokenizer
        )

    def render(row: PromptRow) -> str:
        if not row.images:
            return render_prompt(tokenizer, row.prompt)
        return images().render(row.prompt, row.images)

    return render


def expanded(text: str, messages: Sequence[Mapping[str, Any]], images: ImagePrompts | None) -> str:
    """Return the rendered text of `messages` with all tokens of their images.

    Raises ConfigError if they have any and `images` is None.
    """
    in_messages = images_in(messages)
    if in_messages and images is None:
        raise ConfigError(
            "a message has images, and the model or the engine reads text alone",
            hint="docs/images.md names what reads images",
        )
    if images is None or not in_messages:
        return text
    return images.expand(text, in_messages)


def _build(model: schema.Model, images: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the processor of text and images of `model`, without one for videos."""
    source = source_of(model.path)
    trust = model.trust_remote_code
    kind = processor_class(AutoConfig.from_pretrained(source, trust_remote_code=trust))
    settings, _ = kind.get_processor_dict(source)
    parts = dict.fromkeys(kind.get_attributes())  # None: that of transformers needs torchvision
    parts |= {name: value for name, value in settings.items() if name == "image_seq_length"}
    without_videos = type(kind.__name__, (kind,), {"check_argument_for_proper_class": _accept})
    return without_videos(**parts | {"image_processor": images, "tokenizer": tokenizer})


def _accept(*_: Any) -> None:
    """Accept any class of a part."""
