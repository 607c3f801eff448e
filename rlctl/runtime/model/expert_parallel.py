"""Expert parallelism: each rank keeps some whole experts of a mixture, and tokens travel to them.

FSDP would gather the weights of all experts of a layer for every pass. Here a rank computes with
its own experts the tokens of all ranks that share the weights (GShard, arXiv 2006.16668). A weight
has the layout that FSDP would give it, so checkpoints and weight syncs see no difference.

Axes: T tokens, H hidden size, E experts, K experts of a token, S ranks, R rows received.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlctl.errors import ConfigError
from rlctl.runtime.model.exchange import exchange


def expert_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold all experts of a layer, as matrices (E, …, …) of weights."""
    for module in model.modules():
        number, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
        if any(each.ndim == 3 for each in own) and all(len(each) == number for each in own):
            yield module


def shard_experts(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> set[nn.Parameter]:
    """Split the experts over the last dimension of `mesh`, in place; return their parameters.

    They compute in `dtype`. The other dimension, if any, has replicas. Raises ConfigError if there
    are no experts, or if the ranks do not divide their number.
    """
    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    found: set[nn.Parameter] = set()
    for module in list(expert_layers(model)):
        number = int(module.num_experts)  # pyright: ignore[reportArgumentType]
        if number % size:
            raise ConfigError(f"{size} ranks do not divide the {number} experts of a layer")
        for name, whole in list(module.named_parameters(recurse=False)):
            own = whole.detach().tensor_split(size)[rank].clone()
            placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
            value = DTensor.from_local(own, mesh, placements, run_check=False)
            sharded = nn.Parameter(value, requires_grad=whole.requires_grad)
            setattr(module, name, sharded)
            found.add(sharded)
        module.forward = torch.compiler.disable(partial(_forward, module, mesh, dtype))
    if not found:
        raise ConfigError("the model has no experts", hint="expert_model_parallel_size=1")
    return found


def _forward(
    module: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the weighted sum over each token's experts: (T, H), (T, K), (T, K) -> (T, H)."""
    group, size = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    per_rank = int(module.num_experts) // size  # pyright: ignore[reportArgumentType]
    expert, order = top_k_index.flatten().sort(stable=True)  # (T·K,), so by rank
    sent = torch.bincount(expert // per_rank, minlength=size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes = sent.tolist(), received.tolist()
    top_k = top_k_index.shape[1]
    rows = exchange(hidden[order // top_k], *sizes, group)  # (R, H)
    numbers = exchange(expert % per_rank, *sizes, group)[:, None]  # (R, 1)
    weights = {
        name: _own_part(parameter, mesh, dtype)
        for name, parameter in module.named_parameters(recurse=False)
    }
    local: Any = _LocalExperts(module, per_rank, weights)
    out = type(module).forward(local, rows, numbers, torch.ones_like(numbers, dtype=rows.dtype))
    # A rank without rows has gradients of 0: every rank steps with the same parameters.
    out = out + 0.0 * sum(each.flatten()[0] for each in weights.values())
    back = exchange(out, sizes[1], sizes[0], group)
    own = torch.empty_like(order)
    own[order] = torch.arange(len(order), device=order.device)
    weighted = back[own].unflatten(0, (-1, top_k)) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden.dtype)


def _own_part(parameter: Tensor, mesh: DeviceMesh, dtype: torch.dtype) -> Tensor:
    """Return this rank's experts (E / S, …); their gradient is summed over replicas."""
    assert isinstance(parameter, DTensor)
    value = parameter.to_local()
    if mesh.ndim > 1:
        apply: Any = _SumGradients.apply
        value = apply(value, mesh.get_group(0))
    return value.to(dtype)


class _LocalExperts:
    """The experts of a layer as they appear to their `forward`, with the weights of one rank."""

    def __init__(self, module: nn.Module, number: int, weights: dict[str, Tensor]) -> None:
        vars(self).update(weights, num_experts=number, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return `value` (N, …)."""
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        """Sum the gradients (N, …) of all ranks."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
