"""Sending of an actor's weights to engines in other processes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from rlctl.runtime.model.load import compute_dtype
from rlctl.runtime.model.sharding import shard_of
from rlctl.runtime.model.stage import saved_buffers
from rlctl.runtime.rollout.weight_sync import (
    WHOLE,
    Part,
    WeightChannel,
    bucket_bytes,
    to_buckets,
    whole,
)

if TYPE_CHECKING:
    from rlctl.runtime.workers.actor import ActorWorker

T = TypeVar("T")


def send_weights(actor: ActorWorker, channel: WeightChannel[T]) -> list[T]:
    """Send the weights of this rank, in compute dtype, to a channel; return its result.

    See `ActorWorker.send_weights`. Returns nothing on a rank that has nothing to send.
    """
    spec = actor.spec
    rank = actor.rank_info.rank
    policy = actor.policy.hf
    if actor.engine_weights.merges or spec.fsdp.tensor_model_parallel_size > 1:
        merged = actor.engine_weights.parameters(channel.selection)
        if rank > 0:
            deque(merged, maxlen=0)  # merging is collective
            return []
        part = WHOLE
        rows = whole(merged)
    else:
        shard = shard_of(policy, rank)
        if shard is None:
            return []
        part = Part(*shard)
        rows = actor.engine_weights.rows(channel.selection, part.index)
    dtype = compute_dtype(spec.model, actor.rank_info.device)
    max_bytes = bucket_bytes(spec.sampling.rollout, channel.device)
    kept = saved_buffers(policy)
    for bucket in to_buckets(rows, part, dtype, max_bytes, channel.allocate, kept):
        channel.send(bucket)
    return [channel.close(actor.learner.num_updates, part)]
