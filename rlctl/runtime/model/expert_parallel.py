"""Expert parallelism: each rank keeps some whole experts of a mixture, and tokens travel to them.

FSDP would gather the weights of all experts of a layer for every pass. Here a rank computes with
its experts the tokens of all ranks that share the weights (GShard, arXiv 2006.16668). A weight
has the layout that FSDP would give it, so checkpoints and weight syncs see no difference.

Ranks that split layers have the same tokens. Each computes those of its experts, and their
results are summed.

Axes: T tokens, H hidden size, E experts, K experts of a token, R rows computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlctl.errors import ConfigError
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.rank_exchange import exchange, summed, with_summed_gradient


def expert_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold all experts of a layer, as matrices (E, …, …) of weights."""
    for module in model.modules():
        number = getattr(module, "num_experts", None)
        parameters = list(module.parameters(recurse=False))
        has_matrices = any(parameter.ndim == 3 for parameter in parameters)
        if has_matrices and all(len(parameter) == number for parameter in parameters):
            yield module


@dataclass(frozen=True)
class _Layout:
    """The E experts of a layer over a mesh: of replicas, of S shards, of N ranks that split layers.

    The rank (s, n) has the (s·N + n)-th block of E / (S·N) experts, for the tokens of all shards;
    those of the N ranks are the same.
    """

    mesh: DeviceMesh
    block: int  # experts of a rank
    dtype: torch.dtype  # of computation

    def size(self, name: str) -> int:
        """Return the size of a dimension of the mesh; 1 if it has none of this name."""
        return self.mesh[name].size() if name in (self.mesh.mesh_dim_names or ()) else 1


def shard_experts(model: nn.Module, mesh: DeviceMesh, storage: RankStorage) -> set[nn.Parameter]:
    """Divide the experts over `mesh`, and move them into `storage`, in place; return them.

    The mesh has dimensions "shard" or "tensor" or both, and "replicate" if there are replicas.
    Raises ConfigError if the ranks do not divide the number of experts.
    """
    names = mesh.mesh_dim_names or ()
    number = 1
    index = 0
    for name in names:
        if name != "replicate":
            number *= mesh[name].size()
            index = index * mesh[name].size() + mesh[name].get_local_rank()
    placements = [Replicate() if name == "replicate" else Shard(0) for name in names]
    found: set[nn.Parameter] = set()
    for module in list(expert_layers(model)):
        total = int(module.num_experts)  # pyright: ignore[reportArgumentType]
        if total % number:
            raise ConfigError(f"{number} ranks do not divide the {total} experts of a layer")
        for name, whole in list(module.named_parameters(recurse=False)):
            local = whole.detach().tensor_split(number)[index]
            local = local.to(storage.device, storage.dtype_of(whole), copy=True)
            value = DTensor.from_local(local, mesh, placements, run_check=False)
            sharded = nn.Parameter(value, requires_grad=whole.requires_grad)
            setattr(module, name, sharded)
            found.add(sharded)
        layout = _Layout(mesh, total // number, storage.compute)
        module.forward = torch.compiler.disable(partial(_forward, module, layout))
    return found


def _forward(
    module: nn.Module,
    layout: _Layout,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the weighted sum over each token's experts: (T, H), (T, K), (T, K) -> (T, H)."""
    mesh = layout.mesh
    num_shards = layout.size("shard")
    num_parts = layout.size("tensor")
    expert, order = top_k_index.flatten().sort(stable=True)  # (T·K,), so by rank
    block = expert // layout.block
    if num_parts > 1:
        group = mesh.get_group("tensor")
        hidden, top_k_weights = (with_summed_gradient(x, group) for x in (hidden, top_k_weights))
        is_local = block % num_parts == mesh.get_local_rank("tensor")
        expert = expert[is_local]
        order = order[is_local]
        block = block[is_local]
    top_k = top_k_index.shape[1]
    rows = hidden[order // top_k]  # (R, H)
    sizes = None
    numbers = expert % layout.block
    if num_shards > 1:
        group = mesh.get_group("shard")
        sent = torch.bincount(block // num_parts, minlength=num_shards)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        sizes = sent.tolist(), received.tolist()
        rows = exchange(rows, *sizes, group)
        numbers = exchange(numbers, *sizes, group)
    out = _compute(module, layout, rows, numbers[:, None])
    if sizes is not None:
        out = exchange(out, sizes[1], sizes[0], mesh.get_group("shard"))
    outputs = out.new_zeros(top_k_index.numel(), out.shape[-1]).index_copy(0, order, out)
    result = (outputs.unflatten(0, (-1, top_k)) * top_k_weights[..., None]).sum(1).to(hidden.dtype)
    if num_parts > 1:
        result = summed(result, mesh.get_group("tensor"))
    return result


def _compute(module: nn.Module, layout: _Layout, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the outputs of this rank's experts `numbers` (R, 1) for rows (R, H)."""
    weights = {
        name: _own_part(parameter, layout)
        for name, parameter in module.named_parameters(recurse=False)
    }
    local: Any = _LocalExperts(module, layout.block, weights)
    out = type(module).forward(local, rows, numbers, torch.ones_like(numbers, dtype=rows.dtype))
    # A rank without rows has gradients of 0, for which the others wait.
    return out + sum(tensor.flatten()[:0].sum() for tensor in (rows, *weights.values()))


def _own_part(parameter: Tensor, layout: _Layout) -> Tensor:
    """Return this rank's experts (E / (S·N), …); their gradient is summed over replicas."""
    assert isinstance(parameter, DTensor)
    value = parameter.to_local()
    if layout.size("replicate") > 1:
        value = with_summed_gradient(value, layout.mesh.get_group("replicate"))
    return value.to(layout.dtype)


class _LocalExperts:
    """The experts of a layer as they appear to their `forward`, with the weights of one rank."""

    def __init__(self, module: nn.Module, number: int, weights: dict[str, Tensor]) -> None:
        vars(self).update(weights, num_experts=number, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)
