"""Base of a policy with adapters in 4 bits: QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

`bitsandbytes` stores the linear layers of the decoder as NF4 with quantized scales, and computes
with the weights that they stand for. Engines and exports receive those weights.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.packages import require


def check_bitsandbytes() -> None:
    """Raise MissingExtraError if `bitsandbytes` is not installed."""
    require("bitsandbytes", "a base in 4 bits needs bitsandbytes", "qlora", "load_in_4bit")


def check_unsharded(num_ranks: int, master: torch.dtype, compute: torch.dtype) -> None:
    """Raise ConfigError if FSDP would shard the model, or cast it: weights in 4 bits are opaque."""
    if num_ranks > 1:
        raise ConfigError(
            f"a base in 4 bits is not sharded, and there are {num_ranks} ranks",
            where="load_in_4bit",
            hint="train on one device, or set load_in_4bit=false",
        )
    if master != compute:
        raise ConfigError(
            f"a base in 4 bits computes in the dtype of the other parameters, {master}, "
            f"but model.dtype is {compute}",
            where="load_in_4bit",
            hint="set fsdp_config.model_dtype to the same dtype, such as bf16",
        )


def four_bit_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of `from_pretrained` for a base in 4 bits that computes in `dtype`."""
    check_bitsandbytes()
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config}


def as_plain(hf: PreTrainedModel) -> None:
    """Let transformers save the model as one without quantization, from the weights it is given.

    Also keep its layers as they are: on some CPUs bitsandbytes packs them again for inference.
    """
    model: Any = hf  # transformers' types lack what it adds to a quantized model
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    del model.config.quantization_config
    model.hf_quantizer = None
    vars(model).pop("quantization_method", None)


def dequantized(parameter: Tensor) -> Tensor:
    """Return the weights (N, ...) that a parameter stored in 4 bits stands for."""
    from bitsandbytes.functional import dequantize_4bit

    stored: Any = parameter
    value: Any = dequantize_4bit(parameter.data, stored.quant_state)
    return value
