"""A rollout engine in a process of its own: it answers prompts under the weights that the trainer sent last."""

from __future__ import annotations

import queue
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rlctl.errors import RlctlError
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.model.load import compute_dtype, with_local_path
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine
from rlctl.runtime.rollout.sampling_params import SamplingConfig, to_rollouts
from rlctl.runtime.rollout.weight_sync import Bucket
from rlctl.runtime.workers.dispatch import Worker

_LOOK_S = 0.5  # how often a block that waits looks whether anybody still wants it


@dataclass(frozen=True)
class RolloutSpec:
    """What an engine of a pool of its own is made of."""

    model: schema.Model
    sampling: SamplingConfig
    max_prompt_length: int
    seed: int


@dataclass(frozen=True)
class _End:
    num_blocks: int


class RolloutWorker(Worker):
    """One engine. `receive` and `end` are called from another thread while `load_weights` runs; everything else comes one at a time."""

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
            concurrent=rollout.mode == "async",
        )
        self.engine: RolloutEngine = load("engines", rollout.name).from_spec(engine_spec, None)
        self._arrived: queue.Queue[tuple[int, Bucket | _End | RlctlError]] = queue.Queue(maxsize=1)
        self._last = -1  # the hand-over that is over, well or not
        # Blocks lie in shared memory that nobody may write to, and engines only read them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def load_weights(self, sync_id: int, timeout_s: float) -> None:
        """Take up the weights of a hand-over, which come by `receive`; no block may take longer than `timeout_s`.

        Raises `RlctlError` where a block is missing or damaged.
        """
        try:
            self.engine.load_weights(self._parameters(sync_id, timeout_s))
        finally:
            self._last = sync_id

    def receive(self, sync_id: int, block: Bucket) -> None:
        """The next block of a hand-over. Returns when `load_weights` has taken the block before it, so that few wait in memory."""
        try:
            block.verify()
        except RlctlError as error:
            self._put(sync_id, error)
        else:
            self._put(sync_id, block)

    def end(self, sync_id: int, num_blocks: int) -> None:
        """All blocks of a hand-over have been sent."""
        self._put(sync_id, _End(num_blocks))

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool
    ) -> Rollouts:
        """See `Actor`; for some of a batch's prompts, whose `group` is their number in the whole batch."""
        sampling = self.spec.sampling.params(prompts.group, seed, validate, greedy)
        responses = self.engine.generate(prompts.prompt_ids.to(self.rank_info.device), sampling)
        return to_rollouts(prompts, sampling.n, responses)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def _put(self, sync_id: int, item: Bucket | _End | RlctlError) -> None:
        while sync_id > self._last:
            try:
                self._arrived.put((sync_id, item), timeout=_LOOK_S)
                return
            except queue.Full:
                continue

    def _parameters(self, sync_id: int, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        num_blocks, deadline = 0, time.monotonic() + timeout_s
        while True:
            try:
                sent, item = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty as error:
                raise RlctlError(
                    f"no block of weights came from the trainer within {timeout_s:g} s"
                ) from error
            if sent != sync_id:  # of a hand-over that was given up
                continue
            if isinstance(item, RlctlError):
                raise item
            if isinstance(item, _End):
                if item.num_blocks != num_blocks:
                    raise RlctlError(
                        f"{num_blocks} blocks of weights arrived, and {item.num_blocks} were sent"
                    )
                return
            for parameter in item.parameters:
                yield parameter.name, parameter.tensor().to(self.rank_info.device)
            num_blocks, deadline = num_blocks + 1, time.monotonic() + timeout_s
