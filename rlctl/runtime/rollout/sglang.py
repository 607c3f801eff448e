"""Engine `sglang` (experimental): an SGLang server, started by the engine or reached at a URL.

It has only been run against a test server with the same endpoints, which follow docs.sglang.io.

SGLang reports log-probs at the sampling temperature and before top-k and top-p, as
`RolloutEngine.generate` requires. It uses seeds only with `--enable-deterministic-inference`.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.http_engine import (
    ENGINE_KWARGS,
    Call,
    HttpEngine,
    ServerArguments,
    check_urls,
    own_url,
)
from rlctl.runtime.rollout.requests import Completion, Request
from rlctl.runtime.rollout.sglang_server import SGLangServer


@dataclass(frozen=True)
class SGLangArguments(ServerArguments):
    """Keys of `rollout.engine_kwargs` for this engine; without `url`, ranks start servers."""

    server_args: tuple[str, ...] = ()  # additional arguments of sglang.launch_server


class SGLangEngine(HttpEngine):
    """Client of one SGLang server for one rank.

    With both `top_k` and `top_p`, SGLang may apply `top_p` to the full distribution.
    """

    def __init__(self, server: SGLangServer, spec: EngineSpec, weights_dir: str | None) -> None:
        super().__init__(server, spec, weights_dir)
        self.server: SGLangServer = server
        self.asleep = False

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
        check_urls(arguments.urls, num_ranks, SGLangServer)
        if not arguments.urls and importlib.util.find_spec("sglang") is None:
            raise MissingExtraError(
                "the engine sglang needs the package sglang, or the address of a server",
                where="actor_rollout_ref.rollout.name",
                hint="run a server (sglang>=0.5.3) in another environment and set "
                f"+{ENGINE_KWARGS}.url=http://HOST:PORT",
            )

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Connect to a server, or start one with dummy weights; `policy` is not used."""
        del policy
        cls.check(spec.rollout, spec.rank_info.device, spec.rank_info.world_size)
        arguments = SGLangArguments.from_config(spec.rollout)
        if arguments.urls:
            server = SGLangServer(own_url(arguments.urls, spec), api_key_env=arguments.api_key_env)
            server.wait_until_ready(arguments.start_timeout_s)
        else:
            server = SGLangServer.launch(
                [*_launch_arguments(spec), *arguments.server_args], arguments.start_timeout_s
            )
        return cls(server, spec, arguments.weights_dir)

    def _load(self, folder: str) -> None:
        reply = self._post(
            "/update_weights_from_disk", {"model_path": folder, "load_format": "safetensors"}
        )
        if not isinstance(reply, dict) or not reply.get("success"):
            raise RlctlError(
                f"SGLang rejected the new weights: {reply}",
                where=self.server.url,
                hint=self.server.last_lines(),
            )
        self._post("/flush_cache", {})

    def _abort(self, call: Call) -> None:
        self._post("/abort_request", {"rid": call.id})

    def sleep(self) -> bool:
        """Release weights and cache if `rollout.free_cache_engine` is set.

        The server must have been started with `--enable-memory-saver`.
        """
        if self.spec.rollout.free_cache_engine and not self.asleep:
            self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self.asleep = True
        return self.asleep

    def wake(self) -> None:
        """Reacquire the memory for weights and cache, if it was released."""
        if self.asleep:
            self._post("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self.asleep = False

    def close(self) -> None:
        """End the server if this engine started it."""
        super().close()
        self.server.close()

    def _complete(self, call: Call) -> Completion:
        """Sample one response."""
        request, index = call.request, call.index
        body = {
            "rid": call.id,
            "input_ids": request.context_ids.tolist(),
            "sampling_params": _params(request, index),
            "return_logprob": True,
        }
        reply = self._post("/generate", body)
        meta = reply.get("meta_info", {}) if isinstance(reply, dict) else {}
        row = meta.get("output_token_logprobs")  # of [log-prob, token, …]
        if not row or meta.get("finish_reason", {}).get("type") == "abort":
            raise RlctlError(
                f"SGLang aborted a response, or returned no log-probs: {str(reply)[:500]}",
                where=self.server.url,
            )
        ids, log_probs = [token for _, token, *_ in row], [log_prob for log_prob, *_ in row]
        return call.completion(ids, log_probs)


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
        "--mem-fraction-static": spec.memory_fraction,
        "--random-seed": spec.seed,
        "--device": spec.rank_info.device,
        "--json-model-override-args": json.dumps(spec.model.override_config),
    }
    given = [pair for pair in values.items() if pair[1] is not None]
    return [str(part) for pair in given for part in pair] + [
        name for name, on in switches.items() if on
    ]
