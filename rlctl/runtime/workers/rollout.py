"""Worker of a separate rollout engine, which receives its weights from the trainer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.base.budget import OomRetry
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.load import compute_dtype, with_local_path
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, log_oom_retry
from rlctl.runtime.rollout.exchange import InFlightEngine, WeightVersions, exchange
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.shared_engine import SharedEngine
from rlctl.runtime.rollout.weight_group import GroupAddress, receive_weights
from rlctl.runtime.rollout.weight_sync import Bucket, join_buckets
from rlctl.runtime.workers.dispatch import Worker


@runtime_checkable
class RemoteReceiver(Protocol):
    """Engine in other processes, which are receivers of a group themselves."""

    def num_receivers(self, device: str, host: str) -> int:
        """Return the number of its processes; 0 if they cannot join a group of `device`s.

        `host` is the address of the run in this process's network.
        """
        ...

    def receive_weights(self, address: GroupAddress, number: int) -> int | None:
        """See `receive_weights`; `number` is that of the first process."""
        ...


@dataclass(frozen=True)
class RolloutSpec:
    """Settings of a separate rollout engine."""

    model: schema.Model
    sampling: SamplingConfig
    max_prompt_length: int
    seed: int
    number: int = 0  # of the engine in its pool
    trainer_device: str | None = None  # "cpu" or "cuda"; None: as the engine's

    def at(self, url: str) -> Self:
        """Return the settings of an engine that is a client of the server at `url` alone."""
        rollout = self.sampling.rollout
        kwargs = {"engine_kwargs": {**rollout.engine_kwargs, "url": url}}
        return replace(
            self,
            sampling=replace(self.sampling, rollout=rollout.model_copy(update=kwargs)),
            number=0,
        )


class IncomingWeights(Protocol):
    """Buckets of weights, of which each has all parts in the order of numbers."""

    version: int  # known once all buckets have come

    def __iter__(self) -> Iterator[Bucket]: ...


class RolloutWorker(Worker):
    """Worker with one engine, or with one rank of it.

    Its methods are called one at a time.
    """

    def __init__(self, rank_info: RankInfo, spec: RolloutSpec) -> None:
        self.rank_info = rank_info
        self.spec = spec
        rollout = spec.sampling.rollout
        engine_spec = EngineSpec(
            model=with_local_path(spec.model),
            rollout=rollout,
            dtype=compute_dtype(spec.model, rank_info.device),
            rank_info=rank_info,
            max_length=spec.max_prompt_length + spec.sampling.max_response_length,
            seed=spec.seed,
            number=spec.number,
            on_oom=self._restarted,
            routing=spec.sampling.routing,
        )
        kind: type[RolloutEngine] = SharedEngine
        if rank_info.world_size == 1:
            kind = load("engines", rollout.name)
        self.engine = kind.from_spec(engine_spec, None)
        self.versions = WeightVersions()

    def follow(self) -> None:
        """Make the calls that rank 0 of the engine makes, until it is closed."""
        assert isinstance(self.engine, SharedEngine)
        self.engine.follow()

    def load_weights(self, weights: IncomingWeights) -> None:
        """Load weights as they arrive; open responses continue under them.

        Raises RlctlError for a corrupted bucket.
        """
        engine = self.engine
        progress = engine.progress() if isinstance(engine, InFlightEngine) else {}
        engine.load_weights(join_buckets(weights, self.rank_info.device))
        self.versions.switch(weights.version, progress)

    def num_receivers(self, host: str) -> int:
        """Return the number of processes that get weights in a group at `host`; 0: none can."""
        device = self.spec.trainer_device or self.rank_info.device
        if isinstance(self.engine, RemoteReceiver):
            return self.engine.num_receivers(device, host)
        return int(device == self.rank_info.device)

    def load_broadcast(self, address: GroupAddress, number: int) -> bool:
        """Load the weights that a group gets, as its receivers from `number` on: see above.

        Returns False if the group breaks.
        """
        if isinstance(self.engine, RemoteReceiver):
            version = self.engine.receive_weights(address, number)
            if version is not None:
                self.versions.switch(version, {})
        else:
            version = receive_weights(address, number, self.rank_info, self.load_weights)
        return version is not None

    def exchange(
        self, requests: list[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        """Submit requests and advance the engine: see `rollout.exchange.exchange`."""
        return exchange(self.engine, requests, limit, cancelled, self.versions)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _restarted(self, retry: OomRetry) -> None:
        """Note that the engine has dropped the tokens of its responses for lack of memory."""
        self.versions.restart()
        log_oom_retry(retry)
