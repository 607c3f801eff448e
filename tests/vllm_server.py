"""Test server with the endpoints of a vLLM server that `vllm_server` uses, on a transformers model.

The soak test runs the engine against vLLM itself.
"""

from __future__ import annotations

import json
import time
from typing import Any

from transformers import PreTrainedModel

from tests import sglang_server


class Server(sglang_server.Server):
    """HTTP server; `config` is what `/server_info` reports, None as outside development mode."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.RequestHandlerClass = Handler
        self.slow_s = 0.0
        self.aborted: list[str] = []
        self.config: dict[str, Any] | None = {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
            "device_config": {"device": "cpu"},
            "load_config": {"load_format": "auto"},
            "parallel_config": {
                "worker_extension_cls": "rlctl.runtime.rollout.vllm_engine.server_extension."
                "UnpackedWeights"
            },
            "scheduler_config": {"enable_chunked_prefill": False},
        }


class Handler(sglang_server.Handler):
    """Request handler for vLLM's endpoints."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        if self.path == "/health":
            self.reply(200, "")
        elif self.path.startswith("/server_info") and self.server.config is not None:
            self.reply(200, {"vllm_config": self.server.config})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.authorized():
            self.reply(401, {"error": "Unauthorized"})
            return
        server.calls.append(self.path)
        match self.path:
            case "/inference/v1/generate":
                time.sleep(server.slow_s)
                with server.lock:
                    self.generate(body)
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                wrong = server.update(body["kwargs"]["weights_path"])
                self.reply(500, {"error": wrong}) if wrong else self.reply(200, {"results": [None]})
            case "/reset_prefix_cache?reset_running_requests=true":
                server.cache.clear()
                self.reply(200, {"success": True})
            case "/inference/v1/abort_requests":
                server.aborted += body["request_ids"]
                self.reply(200, "")
            case _:
                self.reply(404, {"detail": "Not Found"})

    def generate(self, body: dict[str, Any]) -> None:
        if self.server.broken == "closed":
            message = "Scale-out endpoints are disabled. Restart with --enable-scale-out."
            return self.reply(403, {"error": {"message": message}})
        params = body["sampling_params"]
        assert (params["logprobs"], params["ignore_eos"]) == (0, True)
        response = self.server.respond(
            body["token_ids"],
            params | {"sampling_seed": params["seed"], "max_new_tokens": params["max_tokens"]},
        )
        rows = response["meta_info"]["output_token_logprobs"]
        choice = {
            "finish_reason": response["meta_info"]["finish_reason"]["type"],
            "token_ids": response["output_ids"],
            "logprobs": {"content": [{"token_id": row[1], "logprob": row[0]} for row in rows]},
        }
        return self.reply(200, {"choices": [choice]})
