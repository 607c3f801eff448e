"""Optimizers by import path, and their state in host memory between updates.

As in verl, `optim.optimizer_impl` names a module and `optim.optimizer` a class of it, such as
`torch.optim` and `AdamW`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.recipes import schema
from rlctl.runtime.model.activations import Lane
from rlctl.runtime.model.sharding import local_part
from rlctl.runtime.workers.optimizer_mixins import Eager, RowBlocks, SplitWeights

# Elements of a block of parameters whose state is on the device at a time (128 MiB in AdamW).
BLOCK = 2**24
_LIBRARY, _QUANTIZED = "torchao", "AdamW8bit"


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
    mixins: list[type[Optimizer]] = [_Offloaded] if offload and not on_cpu else []
    if any(parameter.dtype == torch.bfloat16 for parameter in parameters):
        mixins.append(SplitWeights)
    if _is_quantized(optim):
        mixins += [RowBlocks, *([Eager] if on_cpu else [])]
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
    module, name = optim.optimizer_impl, optim.optimizer
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


class _Offloaded(Optimizer):
    """Mixin: the state is in host memory between steps.

    Blocks of parameters are updated one after another by the optimizer's own step, so the results
    are bitwise those without offload, as long as the update of a parameter depends on no other one.
    On CUDA the state of the next block arrives, and that of the previous one leaves, while a block
    is updated.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters; the state of at most two blocks is on the device at a time."""
        groups = self.param_groups
        work = [(group, block) for group in groups for block in _blocks(group["params"])]
        device = local_part(work[0][1][0]).device
        arriving, leaving = Lane(device), Lane(device)
        hosts = _fetch(self.state, work[0][1], arriving)
        on_device: list[Tensor] = []
        for number, (group, block) in enumerate(work):
            arriving.wait()
            everything, group["params"], self.param_groups = group["params"], block, [group]
            try:
                super().step(closure)
            finally:
                group["params"], self.param_groups = everything, groups
            leaving.synchronize()  # the previous block has left: free what it had on the device
            on_device.clear()
            on_device += _store(self.state, block, hosts, leaving)
            if number + 1 < len(work):
                hosts = _fetch(self.state, work[number + 1][1], arriving)
        leaving.synchronize()


_Hosts = dict[tuple[Tensor, str], Tensor]  # tensors in host memory by parameter and name


def _fetch(state: Mapping[Any, Any], block: Sequence[Tensor], lane: Lane) -> _Hosts:
    """Start to copy the state of `block`, parameters (N, ...), to the device.

    Returns the tensors (N, ...) in host memory; none before the first step.
    """
    hosts: _Hosts = {}
    with lane.block():
        for parameter, name, value in _tensors(state, block):
            hosts[parameter, name] = value
            state[parameter][name] = value.to(lane.device, non_blocking=True)
    return hosts


def _store(
    state: Mapping[Any, Any], block: Sequence[Tensor], hosts: _Hosts, lane: Lane
) -> list[Tensor]:
    """Start to copy the state of `block`, parameters (N, ...), to host memory.

    Returns the tensors (N, ...) on the device, which must live until the copies are complete.
    """
    lane.follow()
    on_device: list[Tensor] = []
    with lane.block():
        for parameter, name, value in _tensors(state, block):
            host = hosts.get((parameter, name))
            if host is None:
                host = _on_host(value)
            local_part(host).copy_(local_part(value), non_blocking=True)
            state[parameter][name] = host
            on_device.append(value)
    return on_device


def _tensors(
    state: Mapping[Any, Any], block: Sequence[Tensor]
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield parameter, name and value (N, ...) of all state but scalars, which stay in place."""
    for parameter in block:
        of_parameter: dict[str, Any] = state.get(parameter, {})
        for name, value in list(of_parameter.items()):
            if isinstance(value, Tensor) and value.dim() > 0:
                yield parameter, name, value


def _on_host(value: Tensor) -> Tensor:
    """Return a copy (N, ...) in host memory, which CUDA can copy while it computes."""
    host = value.to("cpu")
    if local_part(value).device.type != "cuda":
        return host
    if isinstance(host, DTensor):
        if type(host._local_tensor) is Tensor:  # quantized state has no pinned memory
            host._local_tensor = host._local_tensor.pin_memory()
        return host
    return host.pin_memory() if type(host) is Tensor else host


def _blocks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters (N, ...) in order, in blocks of at most `BLOCK` elements, or of one."""
    block: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if block and size + local_part(parameter).numel() > BLOCK:
            yield block
            block, size = [], 0
        block.append(parameter)
        size += local_part(parameter).numel()
    yield block
