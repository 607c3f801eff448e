"""Memory of one role on one device, estimated from the model's config; no weights are read.

Parameters and moments are exact. Activations, gradients and gathered blocks are estimates for a
decoder with a gated feed-forward layer and an attention that stores no scores. Fragmentation, the
framework's own memory and communication buffers are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from rlctl.recipes import schema
from rlctl.runtime.model.causal_lm import MAX_LOGITS
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.sandbox.limits import usable_memory
from rlctl.runtime.workers.optimizers import BLOCK

_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Storage:
    """Storage of a model on the devices."""

    master: int  # bytes per stored parameter that is trained; frozen ones have those of passes
    compute: int  # bytes per parameter or activation in the forward pass
    shards: int  # ranks that one copy of the parameters is divided over
    replicated: bool  # several groups of ranks have a copy each
    wrapped: bool  # by FSDP, which gathers blocks before use
    reshard: bool  # free gathered blocks after the forward pass
    offload: bool  # keep parameters and moments in host memory
    optimizer_offload: bool = False  # keep moments in host memory between updates
    tensor: int = 1  # ranks that split each layer
    stages: int = 1  # ranks that have some layers each
    gloo: bool = False  # collectives are gloo's, which work on copies and free them late

    @classmethod
    def unsharded(cls, dtype: torch.dtype) -> Self:
        """Return the storage of a complete copy on every device, in the type of computation."""
        size = dtype.itemsize
        return cls(size, size, 1, replicated=False, wrapped=False, reshard=False, offload=False)

    @classmethod
    def from_config(
        cls,
        master: torch.dtype,
        compute: torch.dtype,
        ranks: int,
        fsdp: schema.FSDP,
        device: str,
    ) -> Self:
        """Return the storage of a model that FSDP shards over `ranks` as configured.

        On a CPU nothing is offloaded: it has the host's memory.
        """
        wrapped = ranks > 1 or master != compute
        tensor, stages = fsdp.tensor_model_parallel_size, fsdp.pipeline_model_parallel_size
        rest = max(1, ranks // tensor // stages)
        shards = rest if fsdp.fsdp_size == -1 else min(rest, fsdp.fsdp_size)
        return cls(
            master.itemsize,
            compute.itemsize,
            shards,
            shards < rest,
            wrapped,
            fsdp.reshard_after_forward,
            wrapped and fsdp.param_offload and device != "cpu",
            fsdp.optimizer_offload and device != "cpu",
            tensor,
            stages,
            gloo=device == "cpu",
        )


@dataclass(frozen=True)
class Work:
    """Largest amount of work of a role at a time, on one rank."""

    tokens: int  # of a micro-batch; 0 without forward passes
    learns: bool
    has_logits: bool
    kv_tokens: int  # in the engine's cache; 0 without an engine
    engine_ranks: int = 1  # that split each layer of the engine
    keeps_cache: bool = False  # during training
    recomputed: int = 0  # one of how many layers is recomputed in the backward pass; 0: none
    offloads: bool = False  # activations to host memory
    averages: bool = False  # keeps a moving average of the trained parameters
    state_bytes: float | None = None  # of the optimizer per parameter; None: two moments
    in_flight: int = 1  # micro-batches whose activations a stage of a pipeline has
    passed_on: int = 0  # micro-batches whose hidden states, or gradients of them, a stage has


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of a role on one device: held all the time before `gradients`, temporary from there."""

    role: str
    num_parameters: int
    num_trained: int
    parameters: int
    moments: int
    gathered: int
    engine_copy: int
    gradients: int
    activations: int
    recomputing: int  # activations of one layer, which exist when the logits do not
    logits: int
    kv_cache: int
    keeps_cache: bool  # during training
    update: int  # of the optimizer: offloaded state on the device, a bfloat16 weight as float32

    @property
    def held(self) -> int:
        """Bytes held all the time."""
        kept = self.kv_cache if self.keeps_cache else 0
        return self.parameters + self.moments + self.gathered + self.engine_copy + kept

    @property
    def passing(self) -> int:
        """Temporary bytes: the largest of generation, backward pass and update: they take turns."""
        backward = self.activations - self.recomputing + max(self.recomputing, self.logits)
        cache = 0 if self.keeps_cache else self.kv_cache
        return max(cache, self.gradients + max(backward, self.update))

    @property
    def peak(self) -> int:
        """Largest number of bytes at any time."""
        return self.held + self.passing


def role_memory(role: str, size: ModelSize, storage: Storage, work: Work) -> RoleMemory:
    """Estimate the memory of one role.

    A recomputed layer stores its input, and one layer at a time all activations; so does one whose
    activations are offloaded. An offloaded optimizer has two blocks of state on the device.
    """
    part = size.split(storage.tensor).stage(storage.stages)
    own, trained = (
        0 if storage.offload else ceil_div(number, storage.shards)
        for number in (part.num_parameters, part.num_trained)
    )
    has_own_engine = storage.wrapped or size.num_trained < size.num_parameters
    in_use = (
        2 * part.largest_block + part.outside_blocks if storage.reshard else part.num_parameters
    )
    layer = work.tokens * part.activations_per_token * storage.compute
    num_recomputed = ceil_div(part.num_layers, work.recomputed) if work.recomputed else 0
    inputs = num_recomputed * work.tokens * size.hidden * storage.compute
    activations = (inputs + (part.num_layers - num_recomputed) * layer) * work.in_flight
    if not work.learns or work.offloads:
        activations = 0
    recomputing = 0 if activations and not num_recomputed else layer
    passed_on = work.passed_on * work.tokens * size.hidden * storage.compute
    state = 2 * _FLOAT32 if work.state_bytes is None else work.state_bytes
    state += _FLOAT32 - storage.master  # the other bits of weights in bfloat16
    moments = int(trained * state) if work.learns else 0
    reduced = _reduced(part, storage) if storage.wrapped else 0
    largest, update = ceil_div(part.largest_tensor, storage.shards), 0
    if storage.optimizer_offload:
        moments, update = 0, min(moments, int(2 * max(BLOCK, largest) * state))
    if storage.master < _FLOAT32 and work.learns:  # a weight and its gradient in float32
        update += 2 * _FLOAT32 * min(trained, largest)
    rows = min(work.tokens, max(1, MAX_LOGITS // part.vocab)) if work.has_logits else 0
    return RoleMemory(
        role=role,
        num_parameters=size.num_parameters,
        num_trained=size.num_trained,
        parameters=trained * (storage.master + (_FLOAT32 if work.averages else 0))
        + (own - trained) * storage.compute,
        moments=moments,
        gathered=min(in_use, part.num_parameters) * storage.compute if storage.wrapped else 0,
        engine_copy=ceil_div(size.num_parameters * storage.compute, work.engine_ranks)
        if has_own_engine and work.kv_tokens
        else 0,
        gradients=trained * storage.master + reduced if work.learns else 0,
        activations=activations + recomputing + passed_on,
        recomputing=recomputing,
        logits=rows * part.vocab * storage.compute * (2 if work.learns else 1),
        update=update,
        keeps_cache=work.keeps_cache,
        kv_cache=ceil_div(
            2 * size.num_layers * size.key_value * work.kv_tokens * storage.compute,
            work.engine_ranks,
        ),
    )


def _reduced(size: ModelSize, storage: Storage) -> int:
    """Return the bytes of the gradients that FSDP has not reduced yet, and of their copies in fp32.

    Those outside the blocks are reduced last. Replicas add their shards, all at the end.
    """
    share = size.num_trained / size.num_parameters
    whole = size.outside_blocks * storage.compute
    copies = 2 if storage.gloo else 1
    whole += copies * size.largest_block * (storage.compute + 4) if storage.shards > 1 else 0
    sums = 4 * ceil_div(size.num_parameters, storage.shards) if storage.replicated else 0
    return int(share * (whole + sums))


def device_memory(kind: str, processes_per_node: int) -> int:
    """Return the bytes available to one process.

    On a GPU that is the memory of the GPU, on a CPU an equal share of the host's memory or of the
    container's limit.
    """
    if kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return usable_memory() // processes_per_node
