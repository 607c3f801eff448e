"""Map weights from their files until a rank takes its share of them.

On a CPU transformers maps the weights of safetensors files into memory if it need not convert them.
So each rank loads a model in the dtype of its files, and then block by block moves the weights to
its device, in the dtype that the run stores, and shards them. It never holds more than its share
and one block, and the pages of the files are shared by all ranks of a node.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel


@dataclass(frozen=True)
class RankStorage:
    """The device on which a rank keeps the weights of a model, and their dtypes."""

    device: str
    trained: torch.dtype
    compute: torch.dtype  # also of frozen weights: nothing is ever added to them

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which a parameter (N, ...) is stored."""
        if not parameter.is_floating_point():  # weights in 4 bits
            return parameter.dtype
        return self.trained if parameter.requires_grad else self.compute

    def move(self, block: nn.Module) -> None:
        """Move the parameters and buffers of `block` here, in place; tied parameters stay tied."""
        moved: dict[nn.Parameter, nn.Parameter] = {}
        for module in block.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in moved:
                    moved[parameter] = self._moved(parameter)
                module.register_parameter(name, moved[parameter])
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))

    def _moved(self, parameter: nn.Parameter) -> nn.Parameter:
        dtype = self.dtype_of(parameter)
        if parameter.device.type == self.device and parameter.dtype == dtype:
            return parameter
        value = parameter.detach().to(self.device, dtype)
        return nn.Parameter(value, parameter.requires_grad)


def rebuild_buffers(loaded: PreTrainedModel, dtype: torch.dtype, auto: Any, **options: Any) -> None:
    """Compute the buffers that no file has as a model in `dtype` has them, in place.

    transformers computes them in the dtype in which a model is loaded. `auto` is the class that
    has loaded it, with `options`.
    """

    def without_data(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(cast(Any, without_data))
    try:
        with torch.random.fork_rng(devices=[]):
            built = auto.from_config(copy.deepcopy(loaded.config), dtype=dtype, **options)
    finally:
        hook.remove()
    in_files = built.state_dict().keys()
    for path, buffer in built.named_buffers():
        if path not in in_files:
            holder, _, name = path.rpartition(".")
            setattr(loaded.get_submodule(holder), name, buffer)
    loaded.config.dtype = dtype
