"""Engine `sglang`: an SGLang server, started by the engine or reached at a URL.

SGLang reports log-probs at the sampling temperature and before top-k and top-p, as
`RolloutEngine.generate` requires. It uses seeds only with `--enable-deterministic-inference`,
which it does not have on CPUs.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError, Problem, RlctlError, raise_problems
from rlctl.plugins.bridges.http_engine import (
    ENGINE_KWARGS,
    Call,
    HttpEngine,
    ServerArguments,
    check_urls,
    own_url,
)
from rlctl.plugins.bridges.sglang_server import SGLangServer
from rlctl.plugins.user_code import check_interpreter
from rlctl.recipes import schema
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.requests import Completion, Request
from rlctl.runtime.rollout.sampling_params import rows_at_a_time

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SGLangArguments(ServerArguments):
    """Keys of `rollout.engine_kwargs` for this engine; without `url`, ranks start servers."""

    python: str | None = None  # interpreter with the package sglang; None: that of the run
    server_args: tuple[str, ...] = ()  # additional arguments of sglang.launch_server


class SGLangEngine(HttpEngine):
    """Client of one SGLang server for one rank.

    With both `top_k` and `top_p`, SGLang may apply `top_p` to the full distribution.
    """

    def __init__(self, server: SGLangServer, spec: EngineSpec, weights_dir: str | None) -> None:
        super().__init__(server, spec, weights_dir)
        self.server: SGLangServer = server
        self.sleeps = self.asleep = False

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """Validate `engine_kwargs` and the installation: see `RolloutEngine.check`."""
        del device
        arguments = SGLangArguments.from_config(rollout)
        if rollout.tensor_model_parallel_size > 1:
            key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
            raise ConfigError(
                "the engine sglang runs one server per rank without tensor parallelism",
                where=key,
                hint="set it to 1, and start your servers with --tp-size",
                fix=(key, f"{key}=1"),
            )
        check_urls(arguments.urls, num_ranks, SGLangServer)
        if arguments.python is not None:
            key = f"{ENGINE_KWARGS}.python"
            if arguments.urls:
                message = "python starts servers, and url names running ones"
                raise ConfigError(message, where=key, hint="give one")
            check_interpreter(arguments.python, key)
        elif not arguments.urls and importlib.util.find_spec("sglang") is None:
            raise MissingExtraError(
                "the engine sglang needs the package sglang, or the address of a server",
                where="actor_rollout_ref.rollout.name",
                hint="install sglang in a separate environment, and set "
                f"+{ENGINE_KWARGS}.python=ENVIRONMENT/bin/python or "
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
                arguments.python or sys.executable,
                [*_launch_arguments(spec), *map(str, arguments.server_args)],
                spec.rank_info.device == "cpu",
                arguments.start_timeout_s,
            )
        engine = cls(server, spec, arguments.weights_dir)
        engine._check_server()
        return engine

    def _check_server(self) -> None:
        """Raise ConfigError if the server has another model or cannot do what the run asks of it.

        A server that ignores seeds is a warning.
        """
        timeout_s = self.spec.rank_info.timeout_s
        info = self.server.call("GET", "/model_info", None, timeout_s)
        settings = self.server.call("GET", "/server_info", None, timeout_s)
        problems: list[Problem] = []
        served = info.get("architectures") or self.architectures  # null: SGLang does not know
        if not set(served) & set(self.architectures):
            path = self.spec.model.path
            has, trains = map(", ".join, (served, self.architectures))
            message = (
                f"the SGLang server has the model {info['model_path']} ({has}), and the run trains "
                f"{path} ({trains})"
            )
            hint = f"start it with --model-path {path}"
            problems.append(Problem(message, self.server.url, hint))
        self.sleeps = self.spec.rollout.free_cache_engine and settings["device"] != "cpu"
        if self.sleeps and not settings["enable_memory_saver"]:
            message = "the SGLang server cannot release its memory"
            hint = "start it with --enable-memory-saver, or set rollout.free_cache_engine=false"
            problems.append(Problem(message, self.server.url, hint))
        raise_problems(problems)
        if not settings["enable_deterministic_inference"]:
            LOG.warning("the SGLang server ignores seeds: another run samples other responses")

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
        """Release weights and cache if `rollout.free_cache_engine` is set, except on a CPU."""
        if self.sleeps and not self.asleep:
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
        request = call.request
        index = call.index
        body = {
            "rid": call.id,
            "input_ids": request.context_ids.tolist(),
            "sampling_params": _params(request, index),
            "return_logprob": True,
            "top_logprobs_num": request.num_top,
        }
        reply = self._post("/generate", body)
        meta = reply.get("meta_info", {}) if isinstance(reply, dict) else {}
        row = meta.get("output_token_logprobs")  # of [log-prob, token, …]
        if not row or meta.get("finish_reason", {}).get("type") == "abort":
            raise RlctlError(
                f"SGLang aborted a response, or returned no log-probs: {str(reply)[:500]}",
                where=self.server.url,
            )
        ids = [token for _, token, *_ in row]
        log_probs = [log_prob for log_prob, *_ in row]
        tops = meta.get("output_top_logprobs") or ()
        return call.completion(
            ids, log_probs, [[(token, number) for number, token, *_ in top] for top in tops]
        )


def _params(request: Request, index: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters of one response; its seeds have 31 bits."""
    decoding = request.decoding
    params: dict[str, Any] = {
        "temperature": decoding.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": request.max_tokens[index],
        "stop_token_ids": list(decoding.stop_token_ids),
        "sampling_seed": request.seeds[index] & 0x7FFFFFFF,
    }
    if decoding.temperature:
        params["top_p"] = decoding.top_p
        if decoding.top_k > 0:
            params["top_k"] = decoding.top_k
    return params


def _launch_arguments(spec: EngineSpec) -> list[str]:
    """Return the arguments of `sglang.launch_server` that follow from the configuration."""
    rollout = spec.rollout
    on_cpu = spec.rank_info.device == "cpu"
    switches = {
        "--skip-tokenizer-init": True,
        "--enable-deterministic-inference": not on_cpu,
        "--trust-remote-code": spec.model.trust_remote_code,
        "--disable-cuda-graph": rollout.enforce_eager and not on_cpu,
        "--disable-overlap-schedule": on_cpu,
        "--sleep-on-idle": on_cpu,
        "--enable-memory-saver": rollout.free_cache_engine and not on_cpu,
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
    if on_cpu:  # its kernels for CPUs need AMX, and its cache would fill the machine's memory
        rows = rows_at_a_time(rollout, "cpu")
        values |= {
            "--attention-backend": "torch_native",
            "--max-running-requests": rows,
            "--max-total-tokens": rows * spec.max_length,
        }
    given = [pair for pair in values.items() if pair[1] is not None]
    return [str(part) for pair in given for part in pair] + [
        name for name, on in switches.items() if on
    ]
