"""Optimizers by import path.

As in verl, `optim.optimizer_impl` names a module and `optim.optimizer` a class of it, such as
`torch.optim` and `AdamW`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.recipes import schema
from rlctl.runtime.model.sharding import local_part

# Elements of a block of parameters whose state is on the device at a time (128 MiB in AdamW).
BLOCK = 2**24
_LIBRARY = "torchao"
_QUANTIZED = "AdamW8bit"


def build_optimizer(
    parameters: Sequence[nn.Parameter], optim: schema.Optim, offload: bool
) -> Optimizer:
    """Return the optimizer of `parameters` (N, ...) that `optim` describes.

    With `offload` its state is in host memory between steps. Raises ConfigError for an optimizer
    that cannot be built, and MissingExtraError if its package is not installed.
    """
    found = _class_of(optim)
    accepted = inspect.signature(found).parameters
    common = {
        "lr": optim.lr,
        "betas": (optim.betas[0], optim.betas[1]),
        "weight_decay": optim.weight_decay,
        "fused": True,
    }
    given = {name: value for name, value in common.items() if name in accepted}
    on_cpu = all(local_part(parameter).device.type == "cpu" for parameter in parameters)
    mixins: list[type[Optimizer]] = []
    if offload and not on_cpu:
        from rlctl.runtime.workers.offloaded_optimizer import Offloaded

        mixins.append(Offloaded)
    if any(parameter.dtype == torch.bfloat16 for parameter in parameters):
        from rlctl.runtime.workers.optimizer_mixins import SplitWeights

        mixins.append(SplitWeights)
    if _is_quantized(optim):
        from rlctl.runtime.workers.optimizer_mixins import Eager, RowBlocks

        mixins.append(RowBlocks)
        if on_cpu:
            mixins.append(Eager)
    if mixins:
        found = type(found.__name__, (*mixins, found), {})
    try:
        return found(parameters, **given | optim.override_optimizer_config)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"the optimizer {optim.optimizer_impl}.{optim.optimizer} cannot be built: "
            + str(error).strip().splitlines()[0],
            where="optim.override_optimizer_config",
            hint="its keys are arguments of the optimizer's constructor",
        ) from error


def check_optimizer(optim: schema.Optim, fsdp: schema.FSDP | None, section: str) -> None:
    """Check that the optimizer can be imported, built and stepped; `section` is that of the role.

    Raises ConfigError, and MissingExtraError if its package is not installed.
    """
    if (
        _is_quantized(optim)
        and fsdp is not None
        and (fsdp.optimizer_offload or fsdp.offload_policy)
    ):
        raise ConfigError(
            f"the state of {optim.optimizer} cannot be in host memory",
            where=f"{section}.fsdp_config",
            hint="optimizer_offload=false and offload_policy=false, or another optimizer",
        )
    if fsdp is not None and fsdp.model_dtype == "fp16":
        raise ConfigError(
            "weights and gradients in fp16 cannot be trained: small gradients would be 0",
            where=f"{section}.fsdp_config.model_dtype",
            hint="fp32, or bf16 for less memory",
        )
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    optimizer = build_optimizer([parameter], optim, offload=False)
    optimizer.step()
    if "step" not in optimizer.state[parameter]:
        raise ConfigError(
            f"the optimizer {optim.optimizer_impl}.{optim.optimizer} keeps no number of steps, "
            "which a resumed run needs",
            where=f"{section}.optim.optimizer",
            hint='AdamW, or a subclass that counts in `state[parameter]["step"]`',
        )


def bytes_per_parameter(optim: schema.Optim) -> float | None:
    """Return the bytes of state per parameter of a quantized optimizer; None for any other."""
    return 2 * (1 + 4 / 256) if _is_quantized(optim) else None


def _is_quantized(optim: schema.Optim) -> bool:
    return (optim.optimizer_impl, optim.optimizer) == (f"{_LIBRARY}.optim", _QUANTIZED)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # compiled optimizers refuse another object
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _class_of(optim: schema.Optim) -> type[Optimizer]:
    """Import the class of the optimizer."""
    module = optim.optimizer_impl
    name = optim.optimizer
    if module.partition(".")[0] == _LIBRARY and not _is_quantized(optim):
        raise ConfigError(
            f"the optimizer {module}.{name} is not supported: its state cannot be saved for any "
            "number of ranks",
            where="optim.optimizer",
            hint=f"{_LIBRARY}.optim has {_QUANTIZED}",
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        if module.partition(".")[0] == _LIBRARY:
            raise MissingExtraError(
                f"the optimizer {module}.{name} needs {_LIBRARY}, which is not installed",
                where="optim.optimizer_impl",
                hint=f"pip install 'rlctl[{_LIBRARY}]'",
            ) from error
        raise ConfigError(
            f"the module {module!r} of the optimizer cannot be imported: {error}",
            where="optim.optimizer_impl",
            hint="torch.optim, or a module on PYTHONPATH",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"{module} has no optimizer {name!r}",
            where="optim.optimizer",
            hint="AdamW of torch.optim, AdamW8bit of torchao.optim, or a subclass of "
            "torch.optim.Optimizer in a module of yours, which optim.optimizer_impl names",
        )
    return found
