"""The engine `sglang`: answers sampled by an SGLang server, started here or reached at an address.

SGLang reports log-probs at the sampling temperature and before top-k and top-p (unless its SGLANG_RETURN_ORIGINAL_LOGPROB is set), which is
what an engine owes. It honours seeds under `--enable-deterministic-inference`, which a server that is started here gets. Endpoints are
those of docs.sglang.io, "SGLang for RL Systems".
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from rlctl.runtime.rollout.sglang_server import SGLangServer

_KEY = "actor_rollout_ref.rollout.engine_kwargs"
_ROWS_PER_REQUEST = 32
_SHARD_BYTES = (
    2**30
)  # of a file of weights: so much of the model is in this process's memory a second time, at most
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class SGLangArguments:
    """What `rollout.engine_kwargs` may hold for this engine."""

    url: str | tuple[str, ...] | None = (
        None  # of running servers, one a rank; None: each rank starts one
    )
    server_args: tuple[str, ...] = ()  # further arguments of sglang.launch_server
    start_timeout_s: float = 300.0  # in which the server must be ready
    weights_dir: str | None = (
        None  # where new weights pass through files that the server can read; None: shared memory
    )

    @classmethod
    def from_config(cls, rollout: schema.Rollout) -> Self:
        """`ConfigError` for a key that is none of these."""
        known = cls.__dataclass_fields__
        unknown = [key for key in rollout.engine_kwargs if key not in known]
        hint = f"known: {', '.join(known)}"
        raise_problems(
            [
                Problem(f"the engine sglang takes no argument {key!r}", where=_KEY, hint=hint)
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
        return () if self.url is None else (self.url,) if isinstance(self.url, str) else self.url


class SGLangEngine:
    """One server for one rank. New weights pass through safetensors files: in shared memory, or in `weights_dir` for a server elsewhere."""

    def __init__(self, server: SGLangServer, spec: EngineSpec, weights_dir: str | None) -> None:
        self.server = server
        self.spec = spec
        context = AutoConfig.from_pretrained(
            spec.model.path, trust_remote_code=spec.model.trust_remote_code
        ).get_text_config()
        self.max_length = min(spec.max_length, context.max_position_embeddings)
        self.weights_dir = weights_dir or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None)
        self.asleep = False

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:  # noqa: ARG003
        """See `RolloutEngine.check`."""
        arguments = SGLangArguments.from_config(rollout)
        if rollout.tensor_model_parallel_size > 1:
            raise ConfigError(
                "the engine sglang has one server a rank; tensor parallelism is the server's",
                where="actor_rollout_ref.rollout.tensor_model_parallel_size",
                hint="leave it 1 and give --tp-size to servers of your own",
            )
        for url in arguments.urls:
            SGLangServer(url)  # judges the address
        if arguments.urls and len(arguments.urls) != num_ranks:
            raise ConfigError(
                f"{len(arguments.urls)} servers for {num_ranks} ranks",
                where=f"{_KEY}.url",
                hint="one address a rank",
            )
        if not arguments.urls and importlib.util.find_spec("sglang") is None:
            raise MissingExtraError(
                "the engine sglang needs the package sglang, or the address of a server",
                where="actor_rollout_ref.rollout.name",
                hint=f"pip install 'sglang>=0.5.3' (in an environment of its own if its torch is another), or +{_KEY}.url=http://HOST:PORT",
            )

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:  # noqa: ARG003
        """See `RolloutEngine.from_spec`. A server that is started here begins with dummy weights."""
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
        """See `RolloutEngine.generate`. Where both restrict, SGLang may take `top_p` of the whole distribution."""
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
                lambda at: self._ask(
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

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_weights`. All weights lie in files for as long as the server reads them."""
        with tempfile.TemporaryDirectory(prefix="rlctl-weights-", dir=self.weights_dir) as folder:
            for number, shard in enumerate(_shards(weights)):
                save_file(shard, Path(folder) / f"model-{number:05d}.safetensors", {"format": "pt"})
            answer = self._call(
                "/update_weights_from_disk", {"model_path": folder, "load_format": "safetensors"}
            )
        if not isinstance(answer, dict) or not answer.get("success"):
            raise RlctlError(
                f"SGLang did not take the new weights: {answer}",
                where=self.server.url,
                hint=self.server.last_lines(),
            )
        self._call("/flush_cache", {})

    def sleep(self) -> bool:
        """See `RolloutEngine.sleep`. With `rollout.free_cache_engine` weights and cache go; the server needs `--enable-memory-saver`."""
        if self.spec.rollout.free_cache_engine and not self.asleep:
            self._call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self.asleep = True
        return self.asleep

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        if self.asleep:
            self._call("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self.asleep = False

    def close(self) -> None:
        """End a server that was started here; another one is left as it is."""
        self.server.close()

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        return self.server.call("POST", path, body, self.spec.rank_info.timeout_s)

    def _ask(
        self, prompts: Sequence[list[int]], params: Sequence[dict[str, Any]]
    ) -> list[list[list[Any]]]:
        """Of each answer the list of [log-prob, token, …]."""
        body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
        answers = self._call("/generate", body)
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise RlctlError(
                f"SGLang gave no {len(prompts)} answers to {len(prompts)} prompts: {str(answers)[:500]}",
                where=self.server.url,
            )
        rows = [answer.get("meta_info", {}).get("output_token_logprobs") for answer in answers]
        for answer, row in zip(answers, rows, strict=True):
            if not row or answer["meta_info"].get("finish_reason", {}).get("type") == "abort":
                raise RlctlError(
                    f"SGLang broke an answer off, or gave no log-probs: {str(answer)[:500]}",
                    where=self.server.url,
                )
        return rows


def _launch_arguments(spec: EngineSpec) -> list[str]:
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


def _params(sampling: SamplingParams, limit: int, seed: int) -> dict[str, Any]:
    """SGLang's sampling parameters of one row; its seeds have 31 bits."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.temperature else 1.0,
        "top_k": sampling.top_k if sampling.temperature and sampling.top_k > 0 else -1,
        "max_new_tokens": limit,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": seed & 0x7FFFFFFF,
    }


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterable[dict[str, Tensor]]:
    """Copies on the CPU in dicts of about `_SHARD_BYTES`; each tensor is copied before the next one is asked for."""
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
