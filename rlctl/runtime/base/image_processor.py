"""Vision-language models of transformers: placeholders of images, and their pixel values.

Images are processed by the variant for Pillow of a model's image processor, so that no run
depends on whether torchvision is installed; once per distinct image and process.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from rlctl.storage import local

Images = tuple[bytes, ...]  # the files of a row's images
Inputs = dict[str, Tensor]  # arguments of a model's `forward`, along images or their patches

_CACHE_BYTES = 2**30  # of processed images


def reads_images(config: PretrainedConfig) -> bool:
    """Return True if a policy or classifier of `config` is loaded with its vision tower.

    A class for text alone is used if config.json does not name the other one.
    """
    kind = config.model_type
    named = config.architectures or ()
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    if whole is None or not hasattr(config, "vision_config"):
        return False
    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, whole)
    classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    return text == whole or whole in named or classifier in named


def image_token(config: PretrainedConfig) -> int:
    """Return the placeholder of a part of an image."""
    return getattr(config, "image_token_id", None) or config.image_token_index


def num_image_tokens(inputs: Inputs, config: Any) -> int:
    """Return the number of tokens of processed images."""
    grids = inputs.get("image_grid_thw")
    if grids is not None:
        return int(grids.prod(-1).sum()) // config.vision_config.spatial_merge_size**2
    per_tile = getattr(config, "image_seq_length", None) or config.mm_tokens_per_image
    return len(inputs["pixel_values"]) * per_tile


def patches_per_token(config: Any) -> int:
    """Return how many patches of the vision tower a token of an image has."""
    vision = config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        return vision.spatial_merge_size**2
    if hasattr(config, "mm_tokens_per_image"):
        return (vision.image_size // vision.patch_size) ** 2 // config.mm_tokens_per_image
    return round(1 / getattr(config, "downsample_ratio", 1.0) ** 2)


def processor_class(config: PretrainedConfig) -> Any:
    """Return transformers' class of the processor of text and images, or None."""
    names = _auto("processing_auto").PROCESSOR_MAPPING_NAMES
    return getattr(transformers, names.get(config.model_type) or "", None)


def _auto(name: str) -> Any:
    """Import a module of transformers' tables, which needs Pillow."""
    return import_module(f"transformers.models.auto.{name}")


class ImageProcessor:
    """Image processor of the model in a folder or on a hub."""

    def __init__(self, config: PretrainedConfig, path: str) -> None:
        """Load it. Raises OSError if there is none."""
        names = _auto("image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES
        name = names.get(config.model_type)
        if name is None or "pil" not in name or processor_class(config) is None:
            raise OSError(f"transformers has no image processor for {config.model_type}")
        self.source = source_of(path)
        self.processor: Any = getattr(transformers, name["pil"]).from_pretrained(self.source)
        defaults = processor_class(config).valid_processor_kwargs._defaults
        self.kwargs: dict[str, Any] = dict(defaults.get("images_kwargs") or {})
        self._done: OrderedDict[bytes, Inputs] = OrderedDict()
        self._num_bytes = 0  # of `_done`

    def process(self, image: Any) -> Inputs:
        """Return the inputs for an image of Pillow, or an array (H, W, 3) of 8 bits."""
        return dict(self.processor(images=[image], return_tensors="pt", **self.kwargs))

    def inputs(self, images: Iterable[bytes]) -> Inputs:
        """Return the inputs for one or more image files, in their order."""
        parts = self.parts(images)
        return {
            name: torch.cat([torch.as_tensor(part[name]) for part in parts]) for name in parts[0]
        }

    def parts(self, images: Iterable[bytes]) -> list[Inputs]:
        """Return the inputs for each of the image files."""
        return [self._processed(image) for image in images]

    def _processed(self, image: bytes) -> Inputs:
        found = self._done.get(image)
        if found is None:
            from rlctl.data_prep.decoded_images import opened

            found = self._done[image] = self.process(opened(image))
            self._num_bytes += _num_bytes(found)
        self._done.move_to_end(image)
        while len(self._done) > 1 and self._num_bytes > _CACHE_BYTES:
            self._num_bytes -= _num_bytes(self._done.popitem(last=False)[1])
        return found


def _num_bytes(inputs: Inputs) -> int:
    return sum(torch.as_tensor(value).nbytes for value in inputs.values())


@functools.cache
def processor_of(path: str, trust_remote_code: bool) -> ImageProcessor | None:
    """Return the image processor of a model that is loaded with its vision tower, else None."""
    source = source_of(path)
    auto = transformers.AutoConfig
    try:
        config = auto.from_pretrained(source, trust_remote_code=trust_remote_code)
        if not reads_images(config):
            return None
        return ImageProcessor(config, path)
    except (OSError, ValueError, ImportError):  # ImportError: Pillow is not installed
        return None


def source_of(path: str) -> str:
    """Return the folder of a model, or its name on the hub."""
    folder = Path(local(path)).expanduser()
    return str(folder) if folder.is_dir() else path
