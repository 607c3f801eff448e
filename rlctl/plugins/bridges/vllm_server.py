"""Engine `vllm_server`: a running vLLM server, reached at a URL.

It uses vLLM's endpoint for token ids (`/inference/v1/generate`) and its development endpoints for
weights, as in vLLM 0.31 and 0.32. The server's workers get weights in the process group of a pool,
or the server reads them from a folder shared with the trainer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlctl.errors import ConfigError, Problem, RlctlError, raise_problems
from rlctl.network import is_loopback
from rlctl.plugins.bridges.http_engine import (
    ENGINE_KWARGS,
    Call,
    HttpEngine,
    ServerArguments,
    check_urls,
    own_url,
)
from rlctl.recipes import schema
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.http_server import HttpServer, LostServerError
from rlctl.runtime.rollout.requests import Completion, Decoding, Request
from rlctl.runtime.rollout.vllm_engine.versions import unlike_transformers
from rlctl.runtime.rollout.vllm_engine.vllm_requests import vllm_arguments
from rlctl.runtime.rollout.weight_group import GroupAddress

_EXTENSION = "rlctl.plugins.bridges.vllm_server_extension.WeightReceiver"
_KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class VLLMServer(HttpServer):
    """vLLM server at `url`."""

    product: ClassVar[str] = "vLLM"


class VLLMServerEngine(HttpEngine):
    """Client of one vLLM server, whose weights it replaces."""

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """Validate `engine_kwargs` and the sampling: see `RolloutEngine.check`."""
        del device
        arguments = ServerArguments.from_config(rollout)
        if not arguments.urls:
            raise ConfigError(
                f"rollout.name={rollout.name} needs the address of a vLLM server",
                where=f"{ENGINE_KWARGS}.url",
                hint=f"+{ENGINE_KWARGS}.url=http://HOST:8000",
            )
        check_urls(arguments.urls, num_ranks, VLLMServer)
        problems: list[Problem] = []
        if rollout.tensor_model_parallel_size > 1:
            key = "tensor_model_parallel_size"
            hint = "set it to 1, and give it to the server"
            problems.append(Problem(f"{_KEY}.{key} concerns engines of the run", hint=hint))
        if rollout.top_p < 1 or rollout.top_k > 0:
            problems.append(
                Problem(
                    "a vLLM server reports log-probs after top-k and top-p, and the loss needs "
                    "those of the entire vocabulary",
                    where=f"{_KEY}.top_p={rollout.top_p}, {_KEY}.top_k={rollout.top_k}",
                    hint="top_p=1 top_k=-1, or an engine of the run instead of a server",
                )
            )
        raise_problems(problems)

    @classmethod
    def check_model(
        cls, config: PretrainedConfig, rollout: schema.Rollout, device: str
    ) -> list[Problem]:
        """Return why vLLM cannot generate with models of this config.

        The server is taken to have the `device` of the run: the real one is known when it answers.
        """
        del rollout  # its ranks are those of the run
        return unlike_transformers(config, device == "cpu")

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Connect to the server and check its settings; `policy` is not used."""
        del policy
        cls.check(spec.rollout, spec.rank_info.device, spec.rank_info.world_size)
        arguments = ServerArguments.from_config(spec.rollout)
        server = VLLMServer(own_url(arguments.urls, spec), api_key_env=arguments.api_key_env)
        server.wait_for("/health", arguments.start_timeout_s)
        engine = cls(server, spec, arguments.weights_dir)
        engine._check_server()
        return engine

    def sleep(self) -> bool:
        """Keep the memory: the server is on other devices."""
        return False

    def wake(self) -> None:
        """See `RolloutEngine`. The server never sleeps."""

    def _check_server(self) -> None:
        """Raise ConfigError unless the server can take weights and reports exact log-probs."""
        path = "/server_info?config_format=json"
        try:
            info = self.server.call("GET", path, None, self.spec.rank_info.timeout_s)
        except RlctlError as error:
            raise ConfigError(
                f"the vLLM server has no endpoints for weights: {error.problems[0].message}",
                where=self.server.url,
                hint="set VLLM_SERVER_DEV_MODE=1 where it is started",
            ) from error
        self.config = info["vllm_config"]
        raise_problems(
            [
                Problem(message, where=self.server.url, hint=f"start it with {option}")
                for message, option in _unsuitable(self.config, self.max_length)
            ]
        )
        probe = Request(
            0, torch.zeros(1, dtype=torch.int64), Decoding(1.0, 1.0, -1, ()), (1,), (0,)
        )
        self._complete(Call(probe, 0, "rlctl-probe"))  # the endpoint may be disabled

    def _complete(self, call: Call) -> Completion:
        body = {
            "request_id": call.id,
            "token_ids": call.request.context_ids.tolist(),
            "sampling_params": vllm_arguments(call.request, call.index),
        }
        reply = self._post("/inference/v1/generate", body)
        choice = reply["choices"][0]
        ids = choice["token_ids"]
        content = (choice["logprobs"] or {}).get("content")
        if not ids or not content or choice["finish_reason"] == "abort":
            raise RlctlError(
                f"vLLM aborted a response, or returned no log-probs: {str(choice)[:500]}",
                where=self.server.url,
            )
        return call.completion(ids, [entry["logprob"] for entry in content])

    def _abort(self, call: Call) -> None:
        self._post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{call.id}"]})

    def _load(self, folder: str) -> None:
        self._post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        )
        self._drop_cache()

    def num_receivers(self, device: str, host: str) -> int:
        """See `RemoteReceiver`. A server with data parallelism sends calls to one replica."""
        parallel = self.config["parallel_config"]
        on_device = self.config["device_config"]["device"] == device
        is_reached = self.server.is_local or not is_loopback(host)
        is_extended = parallel["worker_extension_cls"] == _EXTENSION
        can_join = is_extended and parallel["data_parallel_size"] == 1 and on_device
        return parallel["world_size"] if can_join and is_reached else 0

    def receive_weights(self, address: GroupAddress, number: int) -> int | None:
        """See `RemoteReceiver`."""
        timeout_s = self.spec.rank_info.timeout_s
        arguments = asdict(address) | {"number": number, "timeout_s": timeout_s}
        call = {"method": "receive_from_trainer", "kwargs": arguments}
        try:
            replies = self._post("/collective_rpc", call)["results"]
        except RlctlError as error:
            raise LostServerError(*error.problems) from error
        problems = [Problem(**problem) for reply in replies for problem in reply["problems"]]
        raise_problems(problems, RlctlError)
        versions = {reply["version"] for reply in replies}
        if None in versions:
            return None
        self._drop_cache()
        return versions.pop()

    def _drop_cache(self) -> None:
        # Requests of other clients are computed again under the new weights.
        reply = self._post("/reset_prefix_cache?reset_running_requests=true", {})
        if not reply["success"]:
            raise RlctlError(
                "vLLM did not drop the cache of the old weights", where=self.server.url
            )


def _unsuitable(config: dict[str, Any], length: int) -> list[tuple[str, str]]:
    """Return what is wrong with a server's settings, each with the option that fixes it."""
    model = config["model_config"]
    on_cpu = config["device_config"]["device"] == "cpu"
    found: list[tuple[str, str]] = []
    if model["logprobs_mode"] != "processed_logprobs":
        message = "the vLLM server reports log-probs before the temperature"
        found.append((message, "--logprobs-mode processed_logprobs"))
    if model["max_model_len"] < length:
        message = f"the vLLM server's context is {model['max_model_len']}, the run needs {length}"
        found.append((message, f"--max-model-len {length}"))
    if config["load_config"]["load_format"] == "dummy":
        found.append(("the vLLM server cannot read weights from files", "--load-format auto"))
    if on_cpu and config["parallel_config"]["worker_extension_cls"] != _EXTENSION:
        message = (
            "a vLLM server on a CPU keeps packed copies of its weights, which stay the old ones"
        )
        found.append((message, f"--worker-extension-cls {_EXTENSION}"))
    if on_cpu and config["scheduler_config"]["enable_chunked_prefill"]:
        message = (
            "a vLLM server on a CPU draws other tokens for a prompt that it computes in chunks"
        )
        found.append((message, "--no-enable-chunked-prefill"))
    return found
