"""Base of engines that are clients of a server, and the choice of the server."""

from __future__ import annotations

import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.plugins import Unused
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    SamplingParams,
    in_order,
    to_requests,
    to_responses,
)
from rlctl.runtime.rollout.http_server import HttpServer
from rlctl.runtime.rollout.requests import Completion, Request
from rlctl.runtime.rollout.sampling_params import rows_at_a_time
from rlctl.runtime.rollout.sync_contents import MERGES

ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"

_STEP_S = 0.05
_SHARD_BYTES = 2**30  # of a file of weights: limits the additional host memory in this process
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ServerArguments:
    """Keys of `rollout.engine_kwargs` for engines over HTTP."""

    url: str | tuple[str, ...] | None = None  # running servers, one per engine
    start_timeout_s: float = 300.0  # until the server must be ready
    weights_dir: str | None = None  # folder shared with the server for weights; None: shared memory
    api_key_env: str | None = None  # environment variable with the API key of running servers

    @classmethod
    def from_config(cls, rollout: schema.Rollout) -> Self:
        """Read `rollout.engine_kwargs`. Raises ConfigError for an unknown key."""
        known = cls.__dataclass_fields__
        unknown = [key for key in rollout.engine_kwargs if key not in known]
        hint = f"known: {', '.join(known)}"
        raise_problems(
            [
                Problem(
                    f"the engine {rollout.name} has no argument {key!r}",
                    where=ENGINE_KWARGS,
                    hint=hint,
                )
                for key in unknown
            ]
        )
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in rollout.engine_kwargs.items()
        }
        return cls(**given)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of running servers."""
        if self.url is None:
            return ()
        return (self.url,) if isinstance(self.url, str) else self.url


@dataclass(frozen=True, eq=False)
class Call:
    """A response that the server generates."""

    request: Request
    index: int  # of the response among the request's n
    id: str  # the server's name of it

    def completion(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        top: Iterable[Iterable[tuple[int, float]]] = (),
    ) -> Completion:
        """Return the response with these tokens, their log-probs and the most probable tokens."""
        return Completion.of(self.request, self.index, ids, log_probs, top)


class HttpEngine(ABC):
    """Client of one server, which batches and caches contexts. See `RolloutEngine`.

    Weights are synced through safetensors files in shared memory, or in `weights_dir`.
    """

    def __init__(self, server: HttpServer, spec: EngineSpec, weights_dir: str | None) -> None:
        self.server = server
        self.spec = spec
        model = spec.model
        config = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, **model.override_config
        )
        self.architectures: list[str] = config.architectures or []
        self.max_length = min(spec.max_length, config.get_text_config().max_position_embeddings)
        self.weights_dir = weights_dir or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None)
        rows = rows_at_a_time(spec.rollout, spec.rank_info.device)
        self._pool = ThreadPoolExecutor(rows, server.product)
        self._open: dict[Future[Completion], Call] = {}

    @staticmethod
    def unused_keys(config: schema.Config) -> dict[str, str | Unused]:
        """Return the config keys that this engine does not use, with reasons."""
        unused: dict[str, str | Unused] = {**MERGES}
        if config.actor_rollout_ref.rollout.engine_kwargs.get("url") is not None:
            keys = ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager")
            url = f"{ENGINE_KWARGS}.url"
            unused |= dict.fromkeys(keys, Unused(f"{url} is a running server", (url,)))
        return {f"actor_rollout_ref.rollout.{key}": reason for key, reason in unused.items()}

    @abstractmethod
    def _complete(self, call: Call) -> Completion:
        """Sample one response. Called in a thread."""

    @abstractmethod
    def _abort(self, call: Call) -> None:
        """Ask the server to drop a response."""

    @abstractmethod
    def _load(self, folder: str) -> None:
        """Let the server load the safetensors files in `folder`, and drop its caches."""

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """Sample responses: see `RolloutEngine.generate`."""
        requests = to_requests(prompt_ids, sampling, self.max_length)
        calls = [call for request in requests for call in self._start(request)]
        return to_responses(in_order(requests, [call.result() for call in calls]))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests: see `RolloutEngine.submit`."""
        for request in requests:
            self._open |= self._start(request)

    def step(self) -> list[Completion]:
        """Wait shortly for responses to finish: see `RolloutEngine.step`."""
        done = wait(self._open, _STEP_S, FIRST_COMPLETED).done
        try:
            finished = [call.result() for call in done]
        except BaseException:
            for call in self._open:
                call.cancel()
            self._open.clear()
            raise
        for call in done:
            del self._open[call]
        return finished

    def cancel(self, keys: Collection[int]) -> None:
        """See `RolloutEngine.cancel`. Responses of the server that come nevertheless are lost."""
        for call, open_call in list(self._open.items()):
            if open_call.request.key in keys:
                del self._open[call]
                if not call.cancel():
                    self._abort(open_call)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sync full weights (N, ...) through temporary files, which are removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="rlctl-weights-", dir=self.weights_dir) as folder:
            for number, shard in enumerate(_shards(weights)):
                save_file(shard, Path(folder) / f"model-{number:05d}.safetensors", {"format": "pt"})
            self._load(folder)

    def close(self) -> None:
        """Drop open calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, request: Request) -> dict[Future[Completion], Call]:
        """Send one call for each response of a request."""
        calls = [Call(request, index, uuid.uuid4().hex) for index in range(len(request.seeds))]
        return {self._pool.submit(self._complete, turn): turn for turn in calls}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """POST `body` to an endpoint with the call timeout of the run."""
        return self.server.call("POST", path, body, self.spec.rank_info.timeout_s)


def check_urls(urls: Sequence[str], num_ranks: int, server: type[HttpServer]) -> None:
    """Validate the addresses of running servers.

    In a pool of engines `num_ranks` is 1, and later addresses are for engines that join.
    """
    for url in urls:
        server(url)  # validates the address
    if urls and len(urls) != num_ranks > 1:
        raise ConfigError(
            f"{len(urls)} servers for {num_ranks} ranks",
            where=f"{ENGINE_KWARGS}.url",
            hint="give one address per rank",
        )


def own_url(urls: Sequence[str], spec: EngineSpec) -> str:
    """Return the address of this engine's server: by its number in a pool, else by its rank."""
    number = spec.rank_info.rank if spec.number is None else spec.number
    if number >= len(urls) or (spec.number is None and len(urls) != spec.rank_info.world_size):
        raise ConfigError(
            f"engine {number} needs a separate server: {len(urls)} addresses are given",
            where=f"{ENGINE_KWARGS}.url",
            hint="give one address per engine, or `rlctl engines add RUN --url ADDRESS`",
        )
    return urls[number]


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Copy weights to the CPU in shards of about `_SHARD_BYTES`, one tensor at a time."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, value in weights:
        shard[name] = value.detach().to("cpu", copy=True).contiguous()
        size += shard[name].nbytes
        if size >= _SHARD_BYTES:
            yield shard
            shard = {}
            size = 0
    if shard:
        yield shard
