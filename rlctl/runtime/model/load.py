"""Loading of transformers models, prepared for packed sequences.

For vision-language models of which transformers has no classifier, one is made here.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils.peft_utils import find_adapter_config_file

from rlctl.errors import ConfigError, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.base.budget import is_oom
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.hf_files import stored_dtype, weight_files
from rlctl.runtime.model.mapped import rebuild_buffers
from rlctl.runtime.model.onednn import use_onednn
from rlctl.runtime.model.weight_check import REPORTING, misfits, quiet_loading
from rlctl.storage import local

# A model's code may fail in any way where its config is not what it expects.
_NOT_LOADED = (
    *(OSError, ValueError, LookupError, ArithmeticError, AssertionError, RuntimeError),
    *(ImportError, AttributeError, TypeError),
)

Kind = Literal["policy", "backbone", "classifier", "new_classifier"]


def class_for(kind: Kind, config: PretrainedConfig) -> Any:
    """Return the auto class of transformers for a model of `config`."""
    if kind == "backbone":
        return AutoModel
    if kind != "policy":
        return auto_classifier(config)
    if hasattr(config, "vision_config"):
        from rlctl.runtime.base.image_processor import reads_images

        if reads_images(config):
            return AutoModelForImageTextToText
    return AutoModelForCausalLM


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES |= {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@quiet_loading()
def load_model(
    model: schema.Model, kind: Kind, dtype: torch.dtype, seed: int, mapped: bool = False
) -> PreTrainedModel:
    """Load a model on the CPU (`init: auto`), or initialize it from `seed` (`init: random`).

    `kind` "policy" includes the LM head, "backbone" does not; "classifier" has a head with one
    label, which "new_classifier" initializes from `seed` if the files have none. A remote address
    is downloaded to this machine first. With `mapped`, weights stay in their files, in the dtype
    that they have there, until `RankStorage.move`; the config says `dtype`.

    Raises ConfigError if weights are missing or do not fit, or the architecture is unknown.
    """
    try:
        if model.init == "random":
            loaded = _random(model, kind, dtype, seed)
        elif mapped and not model.is_4bit:
            loaded = _mapped(model, kind, dtype, seed)
        else:
            loaded = _from_files(model, kind, dtype, seed)
    except _NOT_LOADED as error:
        if isinstance(error, RuntimeError) and is_oom(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the model {model.path!r} cannot be loaded: {reason}",
            hint="give a folder with config.json and *.safetensors of a transformers architecture, "
            "or owner/name on the hub",
        ) from error
    if model.is_4bit:
        from rlctl.runtime.model.four_bit import as_plain

        as_plain(loaded)
    use_rlctl_attention(loaded)
    if hasattr(loaded.config, "vision_config"):
        from rlctl.runtime.base.image_processor import processor_of
        from rlctl.runtime.model.vision import give_images

        if (processor := processor_of(model.path, model.trust_remote_code)) is not None:
            give_images(loaded, processor)
    use_onednn(loaded)
    return loaded


def _random(model: schema.Model, kind: Kind, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "dtype": dtype}
    if model.is_4bit:
        from rlctl.runtime.model.four_bit import four_bit_options

        options |= four_bit_options(dtype)
    torch.manual_seed(seed)
    config = load_config(model, kind)
    return class_for(kind, config).from_config(config, **options)


def _from_files(
    model: schema.Model, kind: Kind, dtype: torch.dtype | str, seed: int
) -> PreTrainedModel:
    config = load_config(model, kind)
    replaced = _with_labels(model.override_config, kind)
    options = {name: value for name, value in replaced.items() if not hasattr(config, name)}
    if isinstance(dtype, torch.dtype) and model.is_4bit:
        from rlctl.runtime.model.four_bit import four_bit_options

        options |= four_bit_options(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        both: Any = class_for(kind, config).from_pretrained(
            local(model.path),
            config=config,
            use_safetensors=True,
            trust_remote_code=model.trust_remote_code,
            dtype=dtype,
            **REPORTING,
            **options,
        )
    loaded, info = both
    raise_problems(misfits(loaded, info, model.path, kind == "new_classifier"))
    return loaded


def _mapped(model: schema.Model, kind: Kind, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Load a model in the dtype of its files, which transformers maps into memory."""
    files = weight_files(model)
    if not files:  # on a hub, and not downloaded yet
        _from_files(model, kind, "auto", seed)
        files = weight_files(model)
    stored = stored_dtype(files)
    loaded = _from_files(model, kind, stored or dtype, seed)
    if loaded.dtype != dtype:
        auto = class_for(kind, loaded.config)
        rebuild_buffers(loaded, dtype, auto, trust_remote_code=model.trust_remote_code)
    return loaded


def empty_model(model: schema.Model) -> PreTrainedModel:
    """Build a policy on the meta device: modules and shapes of parameters, without data."""
    return build_empty(load_config(model, "policy"), model.trust_remote_code, "policy")


def build_empty(config: PretrainedConfig, has_own_code: bool, kind: Kind) -> PreTrainedModel:
    """Build a model of `config` on the meta device. Raises any error of the model's code."""
    choose_implementations(config := deepcopy(config))  # it may be that of an engine
    with torch.device("meta"):
        return class_for(kind, config).from_config(config, trust_remote_code=has_own_code)


def load_config(model: schema.Model, kind: Kind) -> PretrainedConfig:
    """Return config.json with the values that replace some of it.

    Raises ConfigError if the files would make transformers load something else.
    """
    if find_adapter_config_file(source := local(model.path)):
        raise ConfigError(
            f"the model {model.path!r} has an adapter_config.json, whose base and adapter "
            "transformers would load",
            hint="merge the adapter into its base (`merge_and_unload` of peft), or remove the file",
        )
    config = AutoConfig.from_pretrained(
        source,
        trust_remote_code=model.trust_remote_code,
        **_with_labels(model.override_config, kind),
    )
    choose_implementations(config)
    return config


def choose_implementations(config: PretrainedConfig) -> None:
    """Leave attention and experts to rlctl and transformers, in place.

    Raises ConfigError for one of a hub: it is code, which the model's folder does not have.
    """
    for name in ("_attn_implementation", "_experts_implementation"):
        if "/" in str(getattr(config, name, "")):
            raise ConfigError(
                f"config.json asks for {name.strip('_')}={getattr(config, name)!r}, code of a hub",
                hint="remove it from the model's config.json: rlctl chooses the implementation",
            )
        setattr(config, name, None)


def _with_labels(override_config: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the values that replace those of config.json, with one label for a classifier."""
    one_label = {"num_labels": 1} if kind in ("classifier", "new_classifier") else {}
    return override_config | one_label


def with_local_path(model: schema.Model) -> schema.Model:
    """Download the model to this machine if necessary, and return it with the local path."""
    return model.model_copy(update={"path": local(model.path)})


def compute_dtype(model: schema.Model, device: str, has_bf16: bool | None = None) -> torch.dtype:
    """Return the dtype of passes: `model.dtype`.

    `auto` is bfloat16 on a GPU that computes in it, else float32: float16 would need loss scaling.
    `has_bf16` says it of GPUs elsewhere; None: ask those of this machine, if any.
    """
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    if device != "cuda":
        return torch.float32
    if has_bf16 is None:
        here = torch.cuda.is_available()
        has_bf16 = not here or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float32


def master_dtype(fsdp: schema.FSDP) -> torch.dtype:
    """Return the dtype in which weights and optimizer state are stored."""
    return _DTYPES[fsdp.model_dtype]


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
        classifier = type(name, bases, {"config_class": type(config), "__module__": __name__})
        # Before transformers 5.19, `register` ignores classes of transformers' configurations.
        known: Any = AutoModelForSequenceClassification._model_mapping
        known._extra_content[type(config)] = classifier
        renamed = get_checkpoint_conversion_mapping(writer)
        if renamed is not None:
            register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return AutoModelForSequenceClassification
