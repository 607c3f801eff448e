"""An engine of two ranks: its ranks make the same calls, also if weights come in part only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.rollout.requests import Decoding, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.weight_sync import WHOLE, Bucket, to_buckets, whole
from rlctl.runtime.workers.rollout import RolloutSpec, RolloutWorker
from tests.distributed.ranks import on_ranks
from tests.models import tiny_model, write_tiny_model

LENGTHS = (3, 9, 5)


@dataclass
class Incoming:
    """Weights of a version, of which the link breaks after some buckets."""

    buckets: Sequence[Bucket]
    version: int
    breaks: bool = False

    def __iter__(self) -> Iterator[Bucket]:
        yield from self.buckets
        if self.breaks:
            raise ConnectionError("the link is broken")


def contexts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 259, (length,), generator=generator) for length in LENGTHS]


def request(key: int, context: torch.Tensor) -> Request:
    return Request(key, context, Decoding(1.0, 1.0, -1, (2,)), (12, 12), (key, key + 1))


def generate(where: RankInfo, model: str) -> list[Any] | None:
    """Load weights, the first time with a broken link, and generate."""
    rollout = compose("grpo", ["actor_rollout_ref.rollout.n=2"]).config.actor_rollout_ref
    sampling = SamplingConfig(rollout.rollout, 12, (2,))
    policy = rollout.model.model_copy(update={"path": model})
    worker = RolloutWorker(where, RolloutSpec(policy, sampling, 20, seed=0))
    if where.rank > 0:
        worker.follow()
        return None
    weights = tiny_model(seed=5, vocab_size=259).named_parameters()
    buckets = list(to_buckets(whole(weights), WHOLE, torch.float32, 2**16))
    with pytest.raises(ConnectionError):
        worker.load_weights(Incoming(buckets[:2], 1, breaks=True))
    worker.load_weights(Incoming(buckets, 2))
    requests = [request(key, context) for key, context in enumerate(contexts())]
    found = worker.exchange(requests, Slice(3))
    found += worker.exchange([], Slice(None), cancelled=[1])
    worker.close()
    found.sort(key=lambda completion: (completion.key, completion.index))
    return [
        *(value for response in found for value in (response.response_ids, response.log_probs)),
        torch.tensor([(response.key, response.index, response.version) for response in found]),
    ]


def test_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    [alone] = on_ranks(1, generate, str(tmp_path))
    shared, followed = on_ranks(2, generate, str(tmp_path))
    assert followed is None
    assert len(alone) == len(shared) == 2 * 4 + 1  # without the cancelled request
    assert all(map(torch.equal, alone, shared))
    assert {version for _, _, version in alone[-1].tolist()} == {2}
