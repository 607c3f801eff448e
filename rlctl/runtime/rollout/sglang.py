"""Engine `sglang` (experimental): an SGLang server, started by the engine or reached at a URL.

It has only been run against a test server with the same endpoints, which follow docs.sglang.io.

SGLang reports log-probs at the sampling temperature and before top-k and top-p, as
`RolloutEngine.generate` requires. It uses seeds only with `--enable-deterministic-inference`.
"""

from __future__ import annotations

import importlib.util
import tempfile
import uuid
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.batch import Ragged
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    SamplingParams,
    to_requests,
    to_responses,
)
from rlctl.runtime.rollout.requests import Completion, Request
from rlctl.runtime.rollout.sglang_arguments import (
    ENGINE_KWARGS,
    SGLangArguments,
    launch_arguments,
)
from rlctl.runtime.rollout.sglang_server import SGLangServer

_STEP_S = 0.05
_SHARD_BYTES = 2**30  # of a file of weights: limits the additional host memory in this process
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, eq=False)
class _Call:
    """A response that the server generates."""

    request: Request
    index: int  # of the response among the request's n
    rid: str  # the server's name of it


class SGLangEngine:
    """Client of one SGLang server for one rank.

    Weights are synced through safetensors files in shared memory, or in `weights_dir`.
    """

    @staticmethod
    def unused_keys(config: schema.Config) -> dict[str, str]:
        """Return the config keys that this engine does not use, with reasons."""
        if config.actor_rollout_ref.rollout.engine_kwargs.get("url") is None:
            return {}
        keys = ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager")
        reason = "actor_rollout_ref.rollout.engine_kwargs.url is a running server"
        return {f"actor_rollout_ref.rollout.{key}": reason for key in keys}

    def __init__(self, server: SGLangServer, spec: EngineSpec, weights_dir: str | None) -> None:
        self.server = server
        self.spec = spec
        model = spec.model
        context = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, **model.override_config
        ).get_text_config()
        self.max_length = min(spec.max_length, context.max_position_embeddings)
        self.weights_dir = weights_dir or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None)
        self.asleep = False
        self._pool = ThreadPoolExecutor(spec.rollout.max_num_seqs, "sglang")
        self._open: dict[Future[Completion], _Call] = {}

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """Validate `engine_kwargs` and the installation: see `RolloutEngine.check`."""
        del device
        arguments = SGLangArguments.from_config(rollout)
        if rollout.tensor_model_parallel_size > 1:
            raise ConfigError(
                "the engine sglang runs one server per rank without tensor parallelism of its own",
                where="actor_rollout_ref.rollout.tensor_model_parallel_size",
                hint="set it to 1, and start your own servers with --tp-size",
            )
        for url in arguments.urls:
            SGLangServer(url)  # validates the address
        if arguments.urls and len(arguments.urls) != num_ranks:
            raise ConfigError(
                f"{len(arguments.urls)} servers for {num_ranks} ranks",
                where=f"{ENGINE_KWARGS}.url",
                hint="give one address per rank",
            )
        if not arguments.urls and importlib.util.find_spec("sglang") is None:
            raise MissingExtraError(
                "the engine sglang needs the package sglang, or the address of a server",
                where="actor_rollout_ref.rollout.name",
                hint="pip install 'sglang>=0.5.3', or run a server in another environment and set "
                f"+{ENGINE_KWARGS}.url=http://HOST:PORT",
            )

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Connect to a server, or start one with dummy weights; `policy` is not used."""
        del policy
        cls.check(spec.rollout, spec.rank_info.device, spec.rank_info.world_size)
        arguments = SGLangArguments.from_config(spec.rollout)
        if arguments.urls:
            server = SGLangServer(arguments.urls[spec.rank_info.rank])
            server.wait_until_ready(arguments.start_timeout_s)
        else:
            server = SGLangServer.launch(
                [*launch_arguments(spec), *arguments.server_args], arguments.start_timeout_s
            )
        return cls(server, spec, arguments.weights_dir)

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """Sample responses: see `RolloutEngine.generate`.

        With both `top_k` and `top_p`, SGLang may apply `top_p` to the full distribution.
        """
        requests = to_requests(prompt_ids, sampling, self.max_length)
        calls = [call for request in requests for call in self._start(request)]
        return to_responses(requests, [call.result() for call in calls])

    @property
    def num_open(self) -> int:
        """See `RolloutEngine.num_open`."""
        return len(self._open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests: see `RolloutEngine.submit`. The server batches and caches contexts."""
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
        for call, each in list(self._open.items()):
            if each.request.key in keys:
                del self._open[call]
                if not call.cancel():
                    self._call("/abort_request", {"rid": each.rid})

    def _start(self, request: Request) -> dict[Future[Completion], _Call]:
        """Send one call for each response of a request."""
        calls = [_Call(request, index, uuid.uuid4().hex) for index in range(len(request.seeds))]
        return {self._pool.submit(self._complete, each): each for each in calls}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sync full weights (N, ...) through temporary files, which are removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="rlctl-weights-", dir=self.weights_dir) as folder:
            for number, shard in enumerate(_shards(weights)):
                save_file(shard, Path(folder) / f"model-{number:05d}.safetensors", {"format": "pt"})
            reply = self._call(
                "/update_weights_from_disk", {"model_path": folder, "load_format": "safetensors"}
            )
        if not isinstance(reply, dict) or not reply.get("success"):
            raise RlctlError(
                f"SGLang rejected the new weights: {reply}",
                where=self.server.url,
                hint=self.server.last_lines(),
            )
        self._call("/flush_cache", {})

    def sleep(self) -> bool:
        """Release weights and cache if `rollout.free_cache_engine` is set.

        The server must have been started with `--enable-memory-saver`.
        """
        if self.spec.rollout.free_cache_engine and not self.asleep:
            self._call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self.asleep = True
        return self.asleep

    def wake(self) -> None:
        """Reacquire the memory for weights and cache, if it was released."""
        if self.asleep:
            self._call("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self.asleep = False

    def close(self) -> None:
        """End the server if this engine started it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.server.close()

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        """POST `body` to an endpoint with the call timeout of the run."""
        return self.server.call("POST", path, body, self.spec.rank_info.timeout_s)

    def _complete(self, call: _Call) -> Completion:
        """Sample one response."""
        request, index = call.request, call.index
        body = {
            "rid": call.rid,
            "input_ids": request.context_ids.tolist(),
            "sampling_params": _params(request, index),
            "return_logprob": True,
        }
        reply = self._call("/generate", body)
        meta = reply.get("meta_info", {}) if isinstance(reply, dict) else {}
        row = meta.get("output_token_logprobs")  # of [log-prob, token, …]
        if not row or meta.get("finish_reason", {}).get("type") == "abort":
            raise RlctlError(
                f"SGLang aborted a response, or returned no log-probs: {str(reply)[:500]}",
                where=self.server.url,
            )
        ids = torch.tensor([token for _, token, *_ in row], dtype=torch.int64)
        log_probs = torch.tensor([log_prob for log_prob, *_ in row], dtype=torch.float32)
        stopped = int(ids[-1]) in request.decoding.stop_token_ids
        return Completion(request.key, index, ids, log_probs, "stop" if stopped else "length")


def _params(request: Request, index: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters of one response; its seeds have 31 bits."""
    decoding = request.decoding
    return {
        "temperature": decoding.temperature,
        "top_p": decoding.top_p if decoding.temperature else 1.0,
        "top_k": decoding.top_k if decoding.temperature and decoding.top_k > 0 else -1,
        "max_new_tokens": request.max_tokens[index],
        "stop_token_ids": list(decoding.stop_token_ids),
        "sampling_seed": request.seeds[index] & 0x7FFFFFFF,
    }


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterable[dict[str, Tensor]]:
    """Copy weights to the CPU in shards of about `_SHARD_BYTES`, one tensor at a time."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, value in weights:
        shard[name] = value.detach().to("cpu", copy=True).contiguous()
        size += shard[name].nbytes
        if size >= _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
