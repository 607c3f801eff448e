"""Memory of one role on one device, estimated from the model's config; no weights are read.

Parameters and moments are exact. Activations, gradients and gathered blocks are estimates for a
decoder with a gated feed-forward layer and an attention that stores no scores. Fragmentation is not
included. Loading a model takes less than a pass: its share and one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from rlctl.recipes import schema
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.model.causal_lm import MAX_LOGITS
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.workers.optimizers import BLOCK

GIB = 2**30
_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on one device."""

    weights: int = 0  # 0: those of its role
    cache: int = 0
    row_cache: int = 0  # of the longest row
    keeps_cache: bool = False  # during training
    graphs: int = 0
    scratch: int = 0  # of a pass
    sleeps: bool = False  # without weights during training
    share: int | None = None  # of vLLM; None: another engine, or a GPU of unknown memory

    @property
    def awake(self) -> int:
        """Bytes while it generates."""
        return self.weights + self.cache + self.graphs + self.scratch

    @property
    def asleep(self) -> int:
        """Bytes during training."""
        held = self.graphs
        if self.keeps_cache:
            held += self.cache
        if not self.sleeps:
            held += self.weights
        return held

    @property
    def num_rows(self) -> int:
        """Number of rows of the longest length that the cache holds."""
        return self.cache // max(1, self.row_cache)


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
    param_offload: bool = False  # keep parameters in host memory while other roles work
    tensor: int = 1  # ranks that split each layer
    stages: int = 1  # ranks that have some layers each
    gloo: bool = False  # collectives are gloo's, which work on copies and free them late
    on_gpu: bool = False

    @classmethod
    def unsharded(cls, dtype: torch.dtype) -> Self:
        """Return the storage of a complete copy on every device, in the type of computation."""
        size = dtype.itemsize
        return cls(size, size, 1, replicated=False, wrapped=False, reshard=True, offload=False)

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
        tensor = fsdp.tensor_model_parallel_size
        stages = fsdp.pipeline_model_parallel_size
        rest = max(1, ranks // tensor // stages)
        shards = rest if fsdp.fsdp_size == -1 else min(rest, fsdp.fsdp_size)
        return cls(
            master.itemsize,
            compute.itemsize,
            shards,
            shards < rest,
            wrapped,
            fsdp.reshard_after_forward,
            wrapped and fsdp.offload_policy and device != "cpu",
            fsdp.optimizer_offload and device != "cpu",
            fsdp.param_offload and device != "cpu",
            tensor,
            stages,
            gloo=device == "cpu",
            on_gpu=device != "cpu",
        )


@dataclass(frozen=True)
class Work:
    """Largest amount of work of a role at a time, on one rank."""

    tokens: int  # of a micro-batch; 0 without forward passes
    learns: bool
    has_logits: bool
    engine: EngineMemory  # in the processes of the role
    recomputed: int = 0  # one of how many layers is recomputed in the backward pass; 0: none
    offloads: bool = False  # activations to host memory
    averages: bool = False  # keeps a moving average of the trained parameters
    state_bytes: float | None = None  # of the optimizer per parameter; None: two moments
    in_flight: int = 1  # micro-batches whose activations a stage of a pipeline has
    passed_on: int = 0  # micro-batches whose hidden states, or gradients of them, a stage has
    saves: bool = False  # checkpoints


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of a role on one device, and in the memory of the host."""

    role: str
    num_parameters: int
    num_trained: int
    parameters: int
    moments: int
    gathered: int
    stays_gathered: bool  # after a pass, until the next backward pass
    learns: bool
    gradients: int
    activations: int
    recomputing: int  # activations of one layer, which exist when the logits do not
    logits: int
    engine: EngineMemory
    visiting: int  # parameters that are on the device only while the role works
    update: int  # of the optimizer: offloaded state on the device, a bfloat16 weight as float32
    host: int  # offloaded state and activations, and the copy of a checkpoint

    @property
    def held(self) -> int:
        """Bytes held during training."""
        gathered = self.gathered if self.stays_gathered else 0
        return self.parameters + self.moments + gathered + self.engine.asleep

    @property
    def passing(self) -> int:
        """Temporary bytes of training: the larger of backward pass and update, which take turns."""
        backward = self.activations - self.recomputing + max(self.recomputing, self.logits)
        gathered = 0 if self.stays_gathered else self.gathered
        return self.visiting + self.gradients + max(gathered + backward, self.update)

    @property
    def resident(self) -> int:
        """Bytes held while an engine generates, without those of the engine."""
        gathered = self.gathered if self.stays_gathered and not self.learns else 0
        return self.parameters + self.moments + gathered

    @property
    def peak(self) -> int:
        """Largest number of bytes at any time."""
        return peak_of([self])


def peak_of(roles: Sequence[RoleMemory]) -> int:
    """Return the largest number of bytes of roles that take turns on one device."""
    training = sum(role.held for role in roles) + max(role.passing for role in roles)
    return max(training, generating(roles))


def generating(roles: Sequence[RoleMemory]) -> int:
    """Return the bytes of roles on one device while an engine generates."""
    return sum(role.resident + role.engine.awake for role in roles)


def role_memory(role: str, size: ModelSize, storage: Storage, work: Work) -> RoleMemory:
    """Estimate the memory of one role.

    A recomputed layer stores its input, and one layer at a time all activations; so does one whose
    activations are offloaded.
    """
    part = size.split(storage.tensor).stage(storage.stages)
    gathered = part.num_parameters * storage.compute
    if storage.reshard:
        in_use = 2 * part.largest_block + part.outside_blocks
        gathered = min(gathered, in_use * storage.compute)
    layer = work.tokens * part.activations_per_token * storage.compute
    num_recomputed = ceil_div(part.num_layers, work.recomputed) if work.recomputed else 0
    inputs = num_recomputed * work.tokens * size.hidden * storage.compute
    stored = (inputs + (part.num_layers - num_recomputed) * layer) * work.in_flight
    passed_on = work.passed_on * work.tokens * size.hidden * storage.compute
    state = _state(part, storage, work)
    activations = 0
    host = state.host
    if work.learns and work.offloads:
        host += stored
    elif work.learns:
        activations = stored
    recomputing = 0 if activations and not num_recomputed else layer
    return RoleMemory(
        role=role,
        num_parameters=size.num_parameters,
        num_trained=size.num_trained,
        parameters=state.parameters,
        visiting=state.visiting,
        moments=state.moments,
        gathered=gathered if storage.wrapped else 0,
        stays_gathered=not storage.reshard,
        learns=work.learns,
        gradients=state.gradients,
        activations=activations + recomputing + passed_on,
        recomputing=recomputing,
        logits=_logits(part, storage, work),
        engine=work.engine,
        update=state.update,
        host=host if storage.on_gpu else 0,
    )


def _logits(part: ModelSize, storage: Storage, work: Work) -> int:
    """Return the bytes of the logits that are computed at a time, and of their gradients."""
    if not work.has_logits:
        return 0
    rows = min(work.tokens, max(1, MAX_LOGITS // part.vocab))
    logits = rows * part.vocab * storage.compute
    return 2 * logits if work.learns else logits


@dataclass(frozen=True)
class _State:
    """Bytes of weights, of what the optimizer needs, and of both in host memory."""

    parameters: int
    visiting: int  # see `RoleMemory`
    moments: int
    gradients: int
    update: int
    host: int


def _state(part: ModelSize, storage: Storage, work: Work) -> _State:
    """Return the state of a rank; an offloaded optimizer has two blocks of it on the device."""
    stored = ceil_div(part.num_parameters, storage.shards)
    trained = ceil_div(part.num_trained, storage.shards)
    parameters = trained * storage.master + (stored - trained) * storage.compute
    if work.averages:
        parameters += trained * _FLOAT32
    visiting = parameters if storage.param_offload and not storage.offload else 0
    if not work.learns:
        host = parameters if storage.offload else visiting
        return _State(parameters - host, visiting, 0, 0, 0, host)
    bytes_each = 2 * _FLOAT32 if work.state_bytes is None else work.state_bytes
    bytes_each += _FLOAT32 - storage.master  # the other bits of weights in bfloat16
    moments = int(trained * bytes_each)
    gradients = trained * storage.master
    host = trained * storage.master + moments if work.saves else 0
    reduced = _reduced(part, storage) if storage.wrapped else 0
    if storage.offload:
        return _State(0, 0, 0, reduced, 0, host + parameters + moments + gradients)
    host += visiting
    largest = ceil_div(part.largest_tensor, storage.shards)
    update = 0
    if storage.optimizer_offload:
        host += moments
        update = min(moments, int(2 * max(BLOCK, largest) * bytes_each))
        moments = 0
    if storage.master < _FLOAT32:  # a weight and its gradient in float32
        update += 2 * _FLOAT32 * min(trained, largest)
    return _State(parameters - visiting, visiting, moments, gradients + reduced, update, host)


def _reduced(size: ModelSize, storage: Storage) -> int:
    """Return the bytes of the gradients that FSDP has not reduced yet, and of their copies in fp32.

    Those outside the blocks are reduced last. Replicas add their shards, all at the end.
    """
    share = size.num_trained / size.num_parameters
    whole = size.outside_blocks * storage.compute
    if storage.shards > 1:
        copies = 2 if storage.gloo else 1
        whole += copies * size.largest_block * (storage.compute + 4)
    sums = 4 * ceil_div(size.num_parameters, storage.shards) if storage.replicated else 0
    return int(share * (whole + sums))
