"""FSDP2 over the ranks of a pool.

A model on one rank that computes in its storage dtype is not sharded: sharding over one rank would
only copy every block before each use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.causal_lm import PackedModel
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.padded_rows import check_undivided, decoder_of
from rlctl.runtime.model.stage import saved_buffers, stage_of


def shard(model: PackedModel, rank_info: RankInfo, fsdp: schema.FSDP, storage: RankStorage) -> None:
    """Move `model` into `storage` and shard it, block by block, in place.

    Gradients are summed over ranks, not averaged: the learner divides once, by the global count.
    Raises ConfigError if the sizes of the mesh do not divide the number of ranks.
    """
    _check_sizes(rank_info, fsdp)
    check_undivided(model.hf, fsdp.ranks_per_row)
    model.ranks_per_row = fsdp.ranks_per_row
    compute_dtype = storage.compute
    dtypes = {storage.dtype_of(each) for each in model.parameters() if each.is_floating_point()}
    if rank_info.world_size == 1 and dtypes == {compute_dtype}:
        storage.move(model)
        return
    from rlctl.runtime.model.device_mesh import divide, mesh_of

    mesh = mesh_of(rank_info, fsdp)
    experts: set[nn.Parameter] = set()
    if fsdp.has_mesh:
        mesh, experts = divide(model, mesh, rank_info, fsdp, storage)
    offloads = fsdp.offload_policy and rank_info.device != "cpu"  # else they are there already
    options = {
        "mesh": mesh,
        "ignored_params": experts,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.promote_types(compute_dtype, torch.float32),
        ),
        "reshard_after_forward": fsdp.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
    }
    for block in [*_blocks(model.hf), model]:
        storage.move(block)
        sharded = fully_shard(block, **options)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model."""
    inside = set(decoder_of(hf).modules())
    return [block for block in _blocks(hf) if block in inside]


def _blocks(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model, and the layers of its vision tower."""
    names = set(hf._no_split_modules or ())
    return [module for module in hf.modules() if type(module).__name__ in names]


def _check_sizes(rank_info: RankInfo, fsdp: schema.FSDP) -> None:
    """Raise ConfigError if the sizes of the mesh do not divide the number of ranks."""
    ranks = rank_info.world_size
    tensor = fsdp.tensor_model_parallel_size
    stages = fsdp.pipeline_model_parallel_size
    sequence = fsdp.ulysses_sequence_parallel_size
    rest = ranks // tensor // stages
    for key, size, available in (
        ("tensor_model_parallel_size", tensor, ranks),
        ("pipeline_model_parallel_size", stages, ranks // tensor),
        ("ulysses_sequence_parallel_size", sequence, rest),
        ("fsdp_size", max(1, fsdp.fsdp_size), rest),
    ):
        if available % size:
            raise ConfigError(
                f"the mesh does not fit: {key} {size} does not divide the {available} ranks",
                hint="use a divisor of the number of ranks, or -1 for all ranks as fsdp_size",
            )


def has_replicas(model: nn.Module) -> bool:
    """Return True if the model has several copies, each of them sharded."""
    parameter = next(model.parameters())
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return "replicate" in (names or ())


def is_sharded(model: nn.Module) -> bool:
    """Return True if the model is sharded by FSDP2."""
    return isinstance(model, FSDPModule)


def reset_gradients(model: nn.Module) -> None:
    """Drop all gradients, including partial ones of a failed pass, and reset FSDP's state."""
    # First of blocks that are unsharded at the moment: FSDP's reset would keep their gradients.
    model.zero_grad()
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
        model.zero_grad()


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the next pass gathers them from the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(value: Tensor) -> Tensor:
    """Return this rank's shard (N, ...) of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def is_quantized(value: Any) -> bool:
    """Return True for a part of an optimizer's state that is a tensor of codes and scales."""
    local: Any = local_part(value) if isinstance(value, Tensor) else value
    return isinstance(local, Tensor) and is_traceable_wrapper_subclass(local)


def _dense(parameter: Tensor) -> Tensor:
    """Return a parameter (N, ...); one stored in 4 bits is dequantized."""
    if getattr(parameter, "quant_state", None) is None:
        return parameter
    from rlctl.runtime.model.four_bit import dequantized

    return dequantized(parameter)


def full_tensor(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a parameter in its full shape (N, ...), detached. Collective.

    Shards of floating-point numbers are converted to `dtype` before they are gathered.
    """
    value = _dense(parameter).detach()
    if not isinstance(value, DTensor):
        return value
    if dtype is not None and value.is_floating_point():
        value = cast(DTensor, value.to(dtype))
    return value.full_tensor()


def shard_of(model: nn.Module, rank: int) -> tuple[int, int] | None:
    """Return which part of each sharded parameter this rank has, and the number of parts.

    None for a rank whose parts others have, too: a replica, or `rank` > 0 of an unsharded model.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            stage = stage_of(model)
            if mesh.ndim > 1 and mesh.get_local_rank("replicate") > 0:
                return None
            index = mesh.get_local_rank("shard")
            count = mesh.size(mesh.ndim - 1)
            if stage is None:
                return index, count
            return stage.index * count + index, stage.size * count
    return None if rank else (0, 1)


def local_rows(model: nn.Module, part: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the name of each parameter, its rows (M, ...) of `part`, and its number of elements.

    Part 0 has all rows of a parameter that is not sharded. There are no rows of other stages.
    `saved_buffers` come first.
    """
    for name, value in saved_buffers(model).items():
        yield name, value if part == 0 else value.new_empty(0), value.numel()
    stage = stage_of(model)
    if stage is not None:
        parameters = dict(model.named_parameters())
        for name, whole in stage.parameters.items():
            rows = torch.empty(0, dtype=whole.dtype)
            if whole.stage == stage.index:
                rows = local_part(parameters[name].detach())
            yield name, rows, whole.shape.numel()
        return
    for name, parameter in model.named_parameters():
        value = _dense(parameter).detach()
        if isinstance(value, DTensor):
            yield name, value.to_local(), value.numel()
        else:
            yield name, value if part == 0 else value.new_empty(0), value.numel()


def trained_state(model: nn.Module) -> dict[str, Any]:
    """Return the trainable parameters for torch's distributed checkpoints. Collective.

    torch's option for this keeps a tied frozen tensor under its second name.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }
    return {
        name: value
        for name, value in get_model_state_dict(model).items()
        # The scales of a weight in 4 bits are named `<weight>.<scale>`.
        if name not in frozen and name.partition(".weight.")[0] + ".weight" not in frozen
    }


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return this rank's shard (N, ...) of every gradient."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [local_part(gradient) for gradient in grads]


def total_norm(model: nn.Module) -> Tensor:
    """Return the 2-norm of all gradients over all ranks, a scalar. Collective."""
    stage = stage_of(model)
    gradients = [
        each.grad
        for name, each in model.named_parameters()
        if each.grad is not None and not (stage and stage.repeats(name.removeprefix("hf.")))
    ]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm if stage is None else stage.norm(norm)
