"""Weight sync: buckets are complete, and corruption is detected."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from rlctl.errors import RlctlError
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.rollout.weight_sync import WHOLE, Bucket, Joined, Part, to_buckets, whole
from tests.distributed.ranks import in_a_process

SHAPES = {
    "embedding": (300, 64),
    "norm": (64,),
    "scale": (),
    "none": (0, 4),
    "wide": (3, 2, 1100),
    "odd": (7,),
}


def parameters(seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in SHAPES.items():
        yield name, torch.randn(shape, generator=generator)
    yield "transposed", torch.randn(8, 5, generator=generator).T
    yield "steps", torch.arange(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_arrive_in_the_engine_dtype(dtype: torch.dtype) -> None:
    sent, small = dict(parameters()), 30_000
    buckets = list(to_buckets(whole(parameters()), WHOLE, dtype, max_bytes=small))
    assert [bucket.header.number for bucket in buckets] == list(range(len(buckets)))
    assert len(buckets) > 1
    assert all(
        len(bucket.header.entries) == 1
        or sum(entry.num_bytes for entry in bucket.header.entries) <= small
        for bucket in buckets
    )
    arrived = dict(chain.from_iterable(bucket.tensors() for bucket in buckets))
    assert list(arrived) == list(sent)
    for name, value in sent.items():
        assert torch.equal(arrived[name], value if name == "steps" else value.to(dtype)), name


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_rows_of_all_ranks_join_to_the_whole(num_parts: int) -> None:
    """Also where ranks have no rows, and where one rank has a scalar."""
    buckets = list(to_buckets(whole(parameters()), WHOLE, torch.float32, max_bytes=30_000))

    def rows(part: int) -> Iterator[tuple[str, Tensor, int]]:
        for name, value in parameters():
            if value.ndim:
                cut = value.tensor_split(num_parts)[part]
            else:
                cut = value if part == 0 else value.new_empty(0)
            yield name, cut, value.numel()

    sent = [
        list(to_buckets(rows(i), Part(i, num_parts), torch.float32, 30_000))
        for i in range(num_parts)
    ]
    assert all(len(each) == len(buckets) for each in sent)
    assert num_bytes(chain.from_iterable(sent)) == num_bytes(buckets)
    joined = Joined()
    for number, bucket in enumerate(buckets):
        arrived = [joined.add(sent[i][number]) for i in reversed(range(num_parts))]
        assert arrived[:-1] == [None] * (num_parts - 1)
        assert arrived[-1] is not None
        for (name, value), (wanted_name, wanted) in zip(arrived[-1], bucket.tensors(), strict=True):
            assert name == wanted_name
            assert torch.equal(value, wanted)
    assert not joined.open


def num_bytes(buckets: Iterable[Bucket]) -> int:
    return sum(entry.num_bytes for bucket in buckets for entry in bucket.header.entries)


def damaged(bucket: Bucket, how: str) -> Bucket:
    data, entries = bucket.data.clone(), bucket.header.entries
    words = data.view(torch.int64)
    if how == "one bit":
        data[12_345] ^= 1
    elif how == "two pages change places":
        words[:1024] = words[:1024].view(2, 512).flip(0).flatten()
    elif how == "the last byte":
        data[-1] ^= 128
    elif how == "another name":
        entries = (replace(entries[0], name="other"), *entries[1:])
    elif how == "another order":
        entries = tuple(reversed(entries))
    return Bucket(replace(bucket.header, entries=entries), data)


@pytest.mark.parametrize(
    "how",
    [
        "one bit",
        "two pages change places",
        "the last byte",
        "another name",
        "another order",
    ],
)
def test_corruption_is_detected(how: str) -> None:
    (bucket,) = to_buckets(whole(parameters()), WHOLE, torch.float32, 2**20)
    bucket.verify()
    with pytest.raises(RlctlError, match="weights were corrupted in transit: bucket 0"):
        damaged(bucket, how).verify()


def test_a_checksum_is_that_of_the_sums_of_pages() -> None:
    """It is the same for parameters of many blocks, and whatever lies between them."""
    generator = torch.Generator().manual_seed(1)
    tensors = [
        ("wide", torch.randn(301, 1001, generator=generator)),
        ("turned", torch.randn(700, 501, generator=generator).t()),
        ("short", torch.randn(3, generator=generator)),
    ]
    bucket = Bucket.from_tensors(0, tensors, torch.bfloat16)
    content = bucket.data.numpy().tobytes()
    end = len(content) // 4096 * 4096
    words = np.frombuffer(content[:end], np.int64)
    sums = np.array([words[i : i + 512].sum() for i in range(0, len(words), 512)])
    checksum = zlib.crc32(repr(bucket.header.entries).encode())
    checksum = zlib.crc32(content[end:], zlib.crc32(sums.tobytes(), checksum))
    assert bucket.header.checksum == checksum
    bucket.verify()


@dataclass
class Arrived:
    """Implements `IncomingWeights` with buckets that are there."""

    buckets: list[Bucket]
    version: int

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)


def test_corrupted_and_incomplete_weights_are_errors(tiny_worker) -> None:
    worker, model = tiny_worker
    rows = [*whole(model.named_parameters())]
    buckets = list(to_buckets(rows, WHOLE, torch.float32, 10_000))
    with pytest.raises(RlctlError, match="corrupted"):
        worker.load_weights(Arrived([damaged(buckets[0], "one bit"), *buckets[1:]], 3))
    part = list(to_buckets(rows, Part(0, 2), torch.float32, 10_000))
    with pytest.raises(RlctlError, match=f"{len(part)} buckets of weights have arrived in part"):
        worker.load_weights(Arrived(part, 3))
    worker.load_weights(Arrived(buckets, 4))
    engine = dict(worker.engine.model.named_parameters())
    assert all(torch.equal(engine[name], value) for name, value in model.named_parameters())
    assert worker.versions.now == 4


@pytest.fixture
def tiny_worker(tmp_path):
    from rlctl.recipes.compose import compose
    from rlctl.runtime.rollout.sampling_params import SamplingConfig
    from rlctl.runtime.workers.rollout import RolloutSpec, RolloutWorker
    from tests.distributed.ranks import rank_info
    from tests.models import tiny_model, write_tiny_model

    write_tiny_model(tmp_path / "model")
    recipe = compose(
        "ppo", [f"actor_rollout_ref.model.path={tmp_path}/model"]
    ).config.actor_rollout_ref
    spec = RolloutSpec(recipe.model, SamplingConfig(recipe.rollout, 8, (2,)), 16, seed=1)
    return RolloutWorker(rank_info(), spec), tiny_model(seed=5, vocab_size=259)


class Gathered(TorchDispatchMode):
    """Records the types of tensors that are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_gather" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def gather(where: RankInfo) -> list[torch.dtype]:
    """Return the types that are gathered of shards of numbers, with and without a conversion."""
    del where
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    shards = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
    numbers = distribute_tensor(torch.arange(8), mesh, [Shard(0)])
    with Gathered() as gathered:
        assert full_tensor(shards, torch.bfloat16).dtype == torch.bfloat16
        assert full_tensor(shards).dtype == torch.float32
        assert full_tensor(numbers, torch.bfloat16).dtype == torch.int64
    return gathered.dtypes


def test_shards_are_converted_before_they_are_gathered() -> None:
    found = in_a_process(gather)  # other tests may have a process group in this one
    assert found == [torch.bfloat16, torch.float32, torch.int64]
