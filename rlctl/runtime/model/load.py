"""From a folder or a hub name to a transformers model that runs packed sequences."""

from __future__ import annotations

from typing import Literal

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.storage import local

Kind = Literal["policy", "backbone"]

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(model: schema.Model, kind: Kind, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Load the weights (`init: auto`) or make new ones of the folder's config.json from `seed` (`init: random`), on the CPU.

    An address is with_local_path by each machine that needs it.
    A model without weights, or of an architecture that transformers does not know, is a `ConfigError`.
    """
    logging.disable_progress_bar()  # the run has its own
    auto = AutoModelForCausalLM if kind == "policy" else AutoModel
    options = {"trust_remote_code": model.trust_remote_code, "dtype": dtype}
    try:
        if model.init == "auto":
            loaded = auto.from_pretrained(local(model.path), **options)
        else:
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(
                local(model.path), trust_remote_code=model.trust_remote_code
            )
            loaded = auto.from_config(config, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the model {model.path!r} cannot be loaded: {reason}",
            hint="a folder with config.json and *.safetensors of a transformers architecture, or the name of one on the hub",
        ) from error
    use_rlctl_attention(loaded)
    return loaded


def with_local_path(model: schema.Model) -> schema.Model:
    """The same with a path of this machine, for engines that load it themselves."""
    return model.model_copy(update={"path": local(model.path)})


def compute_dtype(model: schema.Model, device: str) -> torch.dtype:
    """What forward and backward passes run in: `model.dtype`, or bfloat16 on a GPU and float32 on a CPU."""
    return (
        (torch.bfloat16 if device == "cuda" else torch.float32)
        if model.dtype == "auto"
        else _DTYPES[model.dtype]
    )


def master_dtype(fsdp: schema.FSDP | schema.FrozenFSDP) -> torch.dtype:
    """What weights and optimizer state are kept in."""
    return _DTYPES[fsdp.model_dtype]
