"""Engine `sglang` (experimental): an SGLang server, started by the engine or reached at a URL.

It has only been run against a test server that implements the same endpoints, never against SGLang
itself. Endpoints follow docs.sglang.io, "SGLang for RL Systems".

SGLang reports log-probs at the sampling temperature and before top-k and top-p (unless its
SGLANG_RETURN_ORIGINAL_LOGPROB is set), as `RolloutEngine.generate` requires. It uses seeds only
with `--enable-deterministic-inference`, which servers started here receive.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError, Problem, RlctlError, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.batch import Ragged
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    SamplingParams,
    finish_reasons,
    response_limits,
)
from rlctl.runtime.rollout.requests import Completion, Decoding, Request
from rlctl.runtime.rollout.sglang_server import SGLangServer

_KEY = "actor_rollout_ref.rollout.engine_kwargs"
_ROWS_PER_REQUEST = 32
_SHARD_BYTES = 2**30  # of a file of weights: limits the additional host memory in this process
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class SGLangArguments:
    """Keys of `rollout.engine_kwargs` for this engine."""

    url: str | tuple[str, ...] | None = None  # running servers, one per rank; None: start one each
    server_args: tuple[str, ...] = ()  # additional arguments of sglang.launch_server
    start_timeout_s: float = 300.0  # until the server must be ready
    weights_dir: str | None = None  # folder shared with the server for weights; None: shared memory

    @classmethod
    def from_config(cls, rollout: schema.Rollout) -> Self:
        """Read `rollout.engine_kwargs`. Raises ConfigError for an unknown key."""
        known = cls.__dataclass_fields__
        unknown = [key for key in rollout.engine_kwargs if key not in known]
        hint = f"known: {', '.join(known)}"
        raise_problems(
            [
                Problem(f"the engine sglang has no argument {key!r}", where=_KEY, hint=hint)
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
        """URLs of running servers; empty if each rank starts its own."""
        if self.url is None:
            return ()
        return (self.url,) if isinstance(self.url, str) else self.url


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
        context = AutoConfig.from_pretrained(
            spec.model.path, trust_remote_code=spec.model.trust_remote_code
        ).get_text_config()
        self.max_length = min(spec.max_length, context.max_position_embeddings)
        self.weights_dir = weights_dir or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None)
        self.asleep = False
        self._pool = ThreadPoolExecutor(spec.rollout.max_num_seqs, "sglang")
        self._open: dict[Future[list[list[list[Any]]]], tuple[Request, int]] = {}

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
                where=f"{_KEY}.url",
                hint="give one address per rank",
            )
        if not arguments.urls and importlib.util.find_spec("sglang") is None:
            raise MissingExtraError(
                "the engine sglang needs the package sglang, or the address of a server",
                where="actor_rollout_ref.rollout.name",
                hint="pip install 'sglang>=0.5.3', or run a server in another environment and set "
                f"+{_KEY}.url=http://HOST:PORT",
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
                [*_launch_arguments(spec), *arguments.server_args], arguments.start_timeout_s
            )
        return cls(server, spec, arguments.weights_dir)

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """Sample responses: see `RolloutEngine.generate`.

        With both `top_k` and `top_p`, SGLang may apply `top_p` to the full distribution.
        """
        prompt_ids = prompt_ids.to("cpu")
        num_rows = len(prompt_ids) * sampling.n
        limits = response_limits(prompt_ids.lengths, sampling, self.max_length)
        prompts = [row.tolist() for row in prompt_ids.rows() for _ in range(sampling.n)]
        params = [
            _params(sampling, limit, seed)
            for limit, seed in zip(
                limits.tolist(), sampling.row_seeds(num_rows).tolist(), strict=True
            )
        ]
        starts = range(0, num_rows, _ROWS_PER_REQUEST)
        with ThreadPoolExecutor(
            max(1, ceil_div(self.spec.rollout.max_num_seqs, _ROWS_PER_REQUEST))
        ) as pool:
            parts = pool.map(
                lambda at: self._request(
                    prompts[at : at + _ROWS_PER_REQUEST], params[at : at + _ROWS_PER_REQUEST]
                ),
                starts,
            )
            rows = [row for part in parts for row in part]
        ids = Ragged.from_rows([[token for _, token, *_ in row] for row in rows], dtype=torch.int64)
        log_probs = Ragged.from_rows(
            [[log_prob for log_prob, *_ in row] for row in rows], dtype=torch.float32
        )
        return Responses(ids, log_probs, finish_reasons(ids, sampling.stop_token_ids))

    @property
    def num_open(self) -> int:
        """See `RolloutEngine.num_open`."""
        return len(self._open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests: see `RolloutEngine.submit`. The server batches and caches contexts."""
        for request in requests:
            for index, (limit, seed) in enumerate(
                zip(request.max_tokens, request.seeds, strict=True)
            ):
                params = _params(request.decoding, limit, seed)
                ids = request.context_ids.tolist()
                future = self._pool.submit(self._request, [ids], [params])
                self._open[future] = request, index

    def step(self) -> list[Completion]:
        """Wait until a response is finished: see `RolloutEngine.step`."""
        done = wait(self._open, return_when=FIRST_COMPLETED).done if self._open else ()
        finished: list[Completion] = []
        try:
            for future in done:
                (row,) = future.result()
                request, index = self._open.pop(future)
                finished.append(_to_completion(request, index, row))
        except BaseException:
            for future in self._open:
                future.cancel()
            self._open.clear()
            raise
        return finished

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

    def _request(
        self, prompts: Sequence[list[int]], params: Sequence[dict[str, Any]]
    ) -> list[list[list[Any]]]:
        """Sample one response per prompt: for each, the list of its [log-prob, token, …]."""
        body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
        replies = self._call("/generate", body)
        if not isinstance(replies, list) or len(replies) != len(prompts):
            raise RlctlError(
                f"SGLang did not return {len(prompts)} responses: {str(replies)[:500]}",
                where=self.server.url,
            )
        rows = [reply.get("meta_info", {}).get("output_token_logprobs") for reply in replies]
        for reply, row in zip(replies, rows, strict=True):
            if not row or reply["meta_info"].get("finish_reason", {}).get("type") == "abort":
                raise RlctlError(
                    f"SGLang aborted a response, or returned no log-probs: {str(reply)[:500]}",
                    where=self.server.url,
                )
        return rows


def _launch_arguments(spec: EngineSpec) -> list[str]:
    """Return the arguments of `sglang.launch_server` that follow from the configuration."""
    rollout = spec.rollout
    switches = {
        "--skip-tokenizer-init": True,
        "--enable-deterministic-inference": True,
        "--trust-remote-code": spec.model.trust_remote_code,
        "--disable-cuda-graph": rollout.enforce_eager,
        "--enable-memory-saver": rollout.free_cache_engine,
    }
    values = {
        "--model-path": spec.model.path,
        "--load-format": "dummy",
        "--dtype": str(spec.dtype).removeprefix("torch."),
        "--context-length": spec.max_length,
        "--max-running-requests": rollout.max_num_seqs,
        "--max-prefill-tokens": rollout.max_num_batched_tokens,
        "--mem-fraction-static": rollout.gpu_memory_utilization,
        "--random-seed": spec.seed,
        "--device": spec.rank_info.device,
    }
    return [str(part) for pair in values.items() for part in pair] + [
        name for name, on in switches.items() if on
    ]


def _params(sampling: Decoding, limit: int, seed: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters of one row; its seeds have 31 bits."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.temperature else 1.0,
        "top_k": sampling.top_k if sampling.temperature and sampling.top_k > 0 else -1,
        "max_new_tokens": limit,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": seed & 0x7FFFFFFF,
    }


def _to_completion(request: Request, index: int, row: list[list[Any]]) -> Completion:
    """Convert a response, a list of its [log-prob, token, …]."""
    ids = torch.tensor([token for _, token, *_ in row], dtype=torch.int64)
    log_probs = torch.tensor([log_prob for log_prob, *_ in row], dtype=torch.float32)
    stopped = int(ids[-1]) in request.decoding.stop_token_ids
    return Completion(request.key, index, ids, log_probs, "stop" if stopped else "length")


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
