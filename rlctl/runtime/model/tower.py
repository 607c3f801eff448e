"""Vision tower of a model, if it has one; `vision` has the passes with images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlctl.runtime.model.padded_rows import decoder_of

if TYPE_CHECKING:
    from rlctl.runtime.base.image_processor import ImageProcessor

PROCESSOR = "_rlctl_images"  # attribute of a model
_PLACEHOLDERS = tuple(
    f"{modality}_token_{ending}"
    for modality in ("image", "video", "audio")
    for ending in ("id", "index")
)


def image_processor(hf: nn.Module) -> ImageProcessor | None:
    """Return the image processor of a model that reads images, else None."""
    return getattr(hf, PROCESSOR, None)


def placeholder_ids(config: PretrainedConfig) -> list[int]:
    """Return the placeholders of images, videos and audio."""
    size = config.get_text_config(decoder=True).vocab_size
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return sorted({number for number in found if isinstance(number, int) and number < size})


def freeze_tower(hf: PreTrainedModel, freezes: bool = True) -> None:
    """Freeze all parameters but those of the language model and its head, in place, if asked."""
    if freezes:
        for module in towers(hf):
            module.requires_grad_(False)


def towers(hf: nn.Module) -> list[nn.Module]:
    """Return the modules beside the language model, which rows of text do not use."""
    model: Any = hf
    if not hasattr(model.config, "vision_config") or decoder_of(model) is model.base_model:
        return []
    language = {decoder_of(model), model.get_output_embeddings()}
    return [part for part in model.base_model.children() if language.isdisjoint(part.modules())]


def frozen_in_towers(hf: nn.Module) -> set[str]:
    """Return the names of the frozen parameters beside the language model."""
    ids = {id(each) for module in towers(hf) for each in module.parameters()}
    pairs = hf.named_parameters()
    return {name for name, each in pairs if id(each) in ids and not each.requires_grad}
