"""Worker of a separate rollout engine, which receives its weights from the trainer."""

from __future__ import annotations

import queue
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from rlctl.errors import RlctlError
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.budget import OomRetry
from rlctl.runtime.model.load import compute_dtype, with_local_path
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, log_oom_retry
from rlctl.runtime.rollout.exchange import InFlightEngine, WeightVersions, exchange
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig, to_rollouts
from rlctl.runtime.rollout.weight_sync import Bucket, Joined
from rlctl.runtime.workers.dispatch import Worker

_CHECK_INTERVAL_S = 0.5  # for a waiting bucket to detect that its weight sync has ended


@dataclass(frozen=True)
class RolloutSpec:
    """Settings of a separate rollout engine."""

    model: schema.Model
    sampling: SamplingConfig
    max_prompt_length: int
    seed: int
    number: int = 0  # of the engine in its pool

    def at(self, url: str) -> Self:
        """Return the settings of an engine that is a client of the server at `url` alone."""
        rollout = self.sampling.rollout
        kwargs = {"engine_kwargs": {**rollout.engine_kwargs, "url": url}}
        return replace(
            self,
            sampling=replace(self.sampling, rollout=rollout.model_copy(update=kwargs)),
            number=0,
        )


@dataclass(frozen=True)
class _End:
    """End of a weight sync in which the trainer sent `num_buckets`: weights of `version`."""

    num_buckets: int
    version: int


# Whole parameters of a bucket, or what ends the sync.
_Arrival = list[tuple[str, Tensor]] | _End | RlctlError


class RolloutWorker(Worker):
    """Worker with one engine.

    `receive` and `end` are called from another thread while `load_weights` runs. The other methods
    are called one at a time, except `generate_sequences` with `rollout.mode=async`.
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
            concurrent=rollout.mode == "async" and not rollout.multi_turn.enable,
            on_oom=self._restarted,
            routing=spec.sampling.routing,
        )
        self.engine: RolloutEngine = load("engines", rollout.name).from_spec(engine_spec, None)
        self._arrived: queue.Queue[tuple[int, _Arrival]] = queue.Queue(maxsize=1)
        self._joined, self._num_ends, self._sync = Joined(), 0, -1
        self.versions = WeightVersions()
        self._last_sync = -1  # id of the last weight sync that ended, with or without success
        # Buckets are in read-only shared memory; engines only read them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def load_weights(self, sync_id: int, timeout_s: float) -> None:
        """Load the weights of a sync, which arrive by `receive` and `end`.

        Raises `RlctlError` if a bucket is missing, corrupted, or takes longer than `timeout_s`.
        """
        try:
            self.engine.load_weights(self._parameters(sync_id, timeout_s))
        finally:
            self._last_sync = sync_id

    def load_stored(self, buckets: Iterable[Bucket], version: int) -> None:
        """Load the weights of `version` while responses are open, which continue under them.

        `buckets` has all parts of a bucket one after the other.
        Raises RlctlError for a corrupted bucket.
        """
        assert isinstance(self.engine, InFlightEngine), "checked before the run starts"
        progress = self.engine.progress()
        joined = Joined()
        self.engine.load_weights(
            (name, value.to(self.rank_info.device))
            for bucket in map(_verified, buckets)
            for name, value in joined.add(bucket) or ()
        )
        self.versions.switch(version, progress)

    def receive(self, sync_id: int, bucket: Bucket) -> None:
        """Verify the next bucket of a weight sync, and queue it with its last part.

        Blocks until `load_weights` has taken the previous one, so that memory holds few of them.
        """
        self._begin(sync_id)
        try:
            bucket.verify()
        except RlctlError as error:
            self._put(sync_id, error)
            return
        parameters = self._joined.add(bucket)
        if parameters is not None:
            self._put(sync_id, parameters)

    def end(self, sync_id: int, num_buckets: int, version: int, num_parts: int = 1) -> None:
        """End a weight sync in which each of `num_parts` ranks sent its part of `num_buckets`.

        They are the weights of `version`.
        """
        self._begin(sync_id)
        self._num_ends += 1
        if self._num_ends == num_parts:
            self._put(sync_id, _End(num_buckets, version))

    def _begin(self, sync_id: int) -> None:
        """Drop what is left of another weight sync."""
        if sync_id != self._sync:
            self._joined, self._num_ends, self._sync = Joined(), 0, sync_id

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool
    ) -> Rollouts:
        """See `Actor`. `prompts` may be part of a batch, which `group` numbers as a unit."""
        sampling = self.spec.sampling.params(prompts.group, seed, validate, greedy)
        responses = self.engine.generate(prompts.prompt_ids.to(self.rank_info.device), sampling)
        return to_rollouts(prompts, sampling.n, responses)

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

    def _put(self, sync_id: int, item: _Arrival) -> None:
        """Queue `item` unless its weight sync has ended."""
        while sync_id > self._last_sync:
            try:
                self._arrived.put((sync_id, item), timeout=_CHECK_INTERVAL_S)
                return
            except queue.Full:
                continue

    def _parameters(self, sync_id: int, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of a weight sync as they arrive."""
        num_buckets, deadline = 0, time.monotonic() + timeout_s
        while True:
            try:
                sent, item = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty as error:
                raise RlctlError(
                    f"no bucket of weights arrived from the trainer within {timeout_s:g} s"
                ) from error
            if sent != sync_id:  # from an aborted weight sync
                continue
            if isinstance(item, RlctlError):
                raise item
            if isinstance(item, _End):
                if item.num_buckets != num_buckets:
                    raise RlctlError(
                        f"{num_buckets} buckets of weights arrived, "
                        f"but {item.num_buckets} were sent"
                    )
                self.versions.now = item.version
                return
            for name, value in item:
                yield name, value.to(self.rank_info.device)
            num_buckets, deadline = num_buckets + 1, time.monotonic() + timeout_s


def _verified(bucket: Bucket) -> Bucket:
    bucket.verify()
    return bucket
