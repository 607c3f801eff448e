"""FSDP2 over the ranks of a pool.

A model on one rank that computes in its storage dtype is not sharded: sharding over one rank would
only copy every block before each use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.model.causal_lm import PackedModel
from rlctl.runtime.model.four_bit import dense
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.padded_rows import check_undivided, decoder_of
from rlctl.runtime.model.stage import saved_buffers, stage_of
from rlctl.runtime.rank_info import RankInfo

if TYPE_CHECKING:
    from rlctl.runtime.model.pipeline_parallel import Stage
    from rlctl.runtime.model.sequence_parallel import SequenceGroup

_STAGE = "stage"  # dimension of a mesh


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
    mesh = _mesh(rank_info, fsdp)
    experts: set[nn.Parameter] = set()
    if fsdp.ranks_per_row > 1 or fsdp.expert_model_parallel_size > 1:
        mesh, experts = _divide(model, mesh, rank_info, fsdp, storage)
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


def _divide(
    model: PackedModel,
    mesh: DeviceMesh,
    rank_info: RankInfo,
    fsdp: schema.FSDP,
    storage: RankStorage,
) -> tuple[DeviceMesh, set[nn.Parameter]]:
    """Divide layers, rows and experts over the ranks; return FSDP's mesh, and what it leaves out.

    Raises ConfigError for a model without experts that are to be divided.
    """
    from rlctl.runtime.model.expert_parallel import shard_experts

    tensor = fsdp.tensor_model_parallel_size
    sequence = fsdp.ulysses_sequence_parallel_size
    stage = _stage(mesh, fsdp, storage.compute) if fsdp.pipeline_model_parallel_size > 1 else None
    mesh = mesh[tuple(each for each in mesh.mesh_dim_names or () if each != _STAGE)]
    experts: set[nn.Parameter] = set()
    if fsdp.expert_model_parallel_size > 1:
        experts = shard_experts(model.hf, mesh, storage)
        if not experts:
            raise ConfigError("the model has no experts", hint="expert_model_parallel_size=1")
    elif tensor > 1:
        shard_experts(model.hf, mesh["tensor"], storage)
    if tensor > 1:
        from rlctl.runtime.model.tensor_parallel import split_model

        split_model(model, mesh["tensor"])
        mesh = mesh[tuple(mesh.mesh_dim_names or ())[:-1]]
    if stage is not None:
        from rlctl.runtime.model.pipeline_parallel import split_layers

        split_layers(model, stage, storage)
    if sequence > 1:
        model.sequence_group = _sequence_group(rank_info, sequence, tensor)
    return mesh, experts


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
    ranks, tensor = rank_info.world_size, fsdp.tensor_model_parallel_size
    stages = fsdp.pipeline_model_parallel_size
    sequence, rest = fsdp.ulysses_sequence_parallel_size, ranks // tensor // stages
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


def _mesh(rank_info: RankInfo, fsdp: schema.FSDP) -> DeviceMesh:
    """Return a mesh (stage, replicate, shard, tensor); without dimensions that are not used.

    There are replicas for an `fsdp_size` below the number of ranks. The ranks of a pipeline are
    adjacent, and those of a stage are around slices of rows and of layers.
    """
    if not dist.is_initialized():  # one rank on a CPU joins no process group
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    tensor = fsdp.tensor_model_parallel_size
    stages = fsdp.pipeline_model_parallel_size
    rest = rank_info.world_size // tensor // stages
    shards = rest if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    sizes = {"shard": shards}
    if shards < rest:
        sizes = {"replicate": rest // shards, **sizes}
    if tensor > 1:
        sizes["tensor"] = tensor
    if stages == 1:
        names = tuple(sizes)
        return init_device_mesh(rank_info.device, tuple(sizes.values()), mesh_dim_names=names)
    per_stage = fsdp.ranks_per_row // stages
    ranks = torch.arange(rank_info.world_size).view(-1, stages, per_stage).movedim(1, 0)
    names = (_STAGE, *sizes)
    return DeviceMesh(
        rank_info.device, ranks.reshape(stages, *sizes.values()), mesh_dim_names=names
    )


def _stage(mesh: DeviceMesh, fsdp: schema.FSDP, dtype: torch.dtype) -> Stage:
    """Return this rank's place in its pipeline, whose hidden states have `dtype`."""
    from rlctl.runtime.model.pipeline_parallel import Stage

    group, index = mesh.get_group(_STAGE), mesh.get_local_rank(_STAGE)
    size = fsdp.pipeline_model_parallel_size
    return Stage(group, index, size, fsdp.pipeline_schedule, dtype)


def _sequence_group(rank_info: RankInfo, size: int, tensor: int) -> SequenceGroup:
    """Return the group of `size` ranks, `tensor` apart, that this rank is in. Collective."""
    from rlctl.runtime.model.sequence_parallel import SequenceGroup

    shape = rank_info.world_size // (size * tensor), size, tensor
    mesh = init_device_mesh(rank_info.device, shape, mesh_dim_names=("data", "sequence", "tensor"))
    return SequenceGroup(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size)


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


def full_tensor(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a parameter in its full shape (N, ...), detached. Collective.

    Shards of floating-point numbers are converted to `dtype` before they are gathered.
    """
    value = dense(parameter).detach()
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
            mesh, stage = parameter.device_mesh, stage_of(model)
            if mesh.ndim > 1 and mesh.get_local_rank("replicate") > 0:
                return None
            own, count = mesh.get_local_rank("shard"), mesh.size(mesh.ndim - 1)
            if stage is None:
                return own, count
            return stage.index * count + own, stage.size * count
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
        own = dict(model.named_parameters())
        for name, whole in stage.parameters.items():
            rows = torch.empty(0, dtype=whole.dtype)
            if whole.stage == stage.index:
                rows = local_part(own[name].detach())
            yield name, rows, whole.shape.numel()
        return
    for name, parameter in model.named_parameters():
        value = dense(parameter).detach()
        if isinstance(value, DTensor):
            yield name, value.to_local(), value.numel()
        else:
            yield name, value if part == 0 else value.new_empty(0), value.numel()


def trained_state(model: nn.Module) -> dict[str, Any]:
    """Return the trainable parameters for torch's distributed checkpoints. Collective.

    torch's own option for this keeps a tied frozen tensor under its second name.
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
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm if stage is None else stage.norm(norm)
