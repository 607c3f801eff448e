"""Sequence classifiers of vision-language models for which transformers has none."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoModelForSequenceClassification, PretrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)


def auto_classifier(config: PretrainedConfig) -> Any:
    """Return transformers' auto class of classifiers, which knows one for `config`, too.

    A missing one of a vision-language model has the form of those that transformers has: the model
    without its head, and a linear head `score`. Its weights have the names of the policy's.
    """
    kind = config.model_type
    writer = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    if writer is not None and kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        whole = getattr(transformers, writer)
        name = writer.replace("ForConditionalGeneration", "") + "ForSequenceClassification"
        bases = GenericForSequenceClassification, whole.__bases__[0]
        own = type(name, bases, {"config_class": type(config), "__module__": __name__})
        AutoModelForSequenceClassification.register(type(config), own, exist_ok=True)
        renamed = get_checkpoint_conversion_mapping(writer)
        if renamed is not None:
            register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return AutoModelForSequenceClassification
