"""Mesh of the ranks of a model, and the division of its layers, rows and experts over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.causal_lm import PackedModel
from rlctl.runtime.model.mapped import RankStorage

if TYPE_CHECKING:
    from rlctl.runtime.model.pipeline_parallel import Stage
    from rlctl.runtime.model.sequence_parallel import SequenceGroup

_STAGE = "stage"  # dimension of a mesh


def mesh_of(rank_info: RankInfo, fsdp: schema.FSDP) -> DeviceMesh:
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


def divide(
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


def _stage(mesh: DeviceMesh, fsdp: schema.FSDP, dtype: torch.dtype) -> Stage:
    """Return this rank's place in its pipeline, whose hidden states have `dtype`."""
    from rlctl.runtime.model.pipeline_parallel import Stage

    group = mesh.get_group(_STAGE)
    index = mesh.get_local_rank(_STAGE)
    size = fsdp.pipeline_model_parallel_size
    return Stage(group, index, size, fsdp.pipeline_schedule, dtype)


def _sequence_group(rank_info: RankInfo, size: int, tensor: int) -> SequenceGroup:
    """Return the group of `size` ranks, `tensor` apart, that this rank is in. Collective."""
    from rlctl.runtime.model.sequence_parallel import SequenceGroup

    shape = rank_info.world_size // (size * tensor), size, tensor
    mesh = init_device_mesh(rank_info.device, shape, mesh_dim_names=("data", "sequence", "tensor"))
    return SequenceGroup(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size)
