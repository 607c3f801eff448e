"""Passes of micro-batches, one after the other, or through stages: see `stage_passes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model.causal_lm import PackedModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import has_replicas
from rlctl.runtime.model.stage import stage_of

B = TypeVar("B")
R = TypeVar("R")
# Most micro-batches, for each stage of a pipeline, that pass before it is emptied: torch allocates
# their hidden states, and the gradients of these, before the first one.
PARTS_PER_STAGE = 8
# Returns the result of a micro-batch, and its loss, a scalar with a graph, or None.
Compute = Callable[[B, Sequences], tuple[R, Tensor | None]]


def enter_training(model: nn.Module) -> None:
    """Let the layers of `model` that are recomputed do so, and all others behave as in scoring.

    Dropout and random choices of experts stay off: log-probs of two passes must agree.
    """
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)


def passes(
    model: PackedModel,
    parts: Iterable[tuple[B, Sequences]],
    num_parts: int,
    compute: Compute[B, R],
) -> Iterator[R]:
    """Yield a result for each micro-batch, from `compute`, and add the gradient of its loss.

    Collective for the stages of a pipeline, which all yield the results of the last one. Replicas
    add their gradients once, after the last of the `num_parts` micro-batches.
    """
    stage = stage_of(model)
    if stage is not None:
        from rlctl.runtime.workers.stage_passes import in_stages

        yield from in_stages(model, stage, list(parts), compute)
        return
    replicas = has_replicas(model)
    for number, (part, sequences) in enumerate(parts, 1):
        result, loss = compute(part, sequences)
        if loss is not None:
            if replicas:
                assert isinstance(model, FSDPModule), "replicas are FSDP's"
                model.set_is_last_backward(number == num_parts)
                model.set_requires_all_reduce(number == num_parts)
            loss.backward()
        yield result


def in_order(parts: Sequence[Tensor], rows: Sequence[Tensor], lengths: Tensor) -> Ragged:
    """Return the values (T,) of each micro-batch in the order of the batch: B rows, on the CPU.

    `rows` are those of the micro-batches, (N,) int64; those of `lengths` (B,) are the batch's.
    """
    back = torch.cat(list(rows))
    return Ragged(torch.cat(list(parts)).cpu(), lengths[back]).select(back.argsort())
