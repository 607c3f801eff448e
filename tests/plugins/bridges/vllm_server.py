"""Test server with the endpoints of a vLLM server that `vllm_server` uses, on a transformers model.

The soak test runs the engine against vLLM itself.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import RlctlError
from rlctl.runtime.rollout.weight_group import (
    Broadcast,
    BrokenGroupError,
    GroupAddress,
    WeightGroup,
)
from rlctl.runtime.rollout.weight_sync import join_buckets
from tests.distributed.ranks import rank_info


class Server(ThreadingHTTPServer):
    """HTTP server; `calls` are the requested paths, `cache` holds logits by prefix.

    `config` is what `/server_info` reports, None as outside development mode.
    """

    request_queue_size = 128  # one connection per response
    daemon_threads = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model.eval()
        self.calls: list[str] = []
        self.cache: dict[tuple[int, ...], Tensor] = {}
        self.is_closed = False  # the endpoint for token ids is disabled
        self.api_key: str | None = None
        self.lock = threading.Lock()
        self.slow_s = 0.0
        self.groups: list[WeightGroup] = []
        self.aborted: list[str] = []
        self.config: dict[str, Any] | None = {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
            "device_config": {"device": "cpu"},
            "load_config": {"load_format": "auto"},
            "parallel_config": {
                "worker_extension_cls": "rlctl.plugins.bridges.vllm_server_extension."
                "WeightReceiver",
                "world_size": 2,
                "data_parallel_size": 1,
            },
            "scheduler_config": {"enable_chunked_prefill": False},
        }

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> Server:
        """Serve in a thread."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    @torch.no_grad()
    def logits(self, ids: tuple[int, ...]) -> Tensor:
        """Return the logits (V,) after a prefix, cached."""
        if ids not in self.cache:
            self.cache[ids] = self.model(torch.tensor([ids])).logits[0, -1].float()
        return self.cache[ids]

    def respond(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """Sample one response; return a choice of vLLM's reply."""
        generator = torch.Generator().manual_seed(params["seed"])
        ids, tokens, reason = tuple(prompt), list[tuple[int, float]](), "length"
        temperature, top_k = params["temperature"], params["top_k"]
        if temperature == 0:
            temperature, top_k = 1.0, 1
        for _ in range(params["max_tokens"]):
            log_probs = (self.logits(ids) / temperature).log_softmax(-1)
            probs, order = log_probs.exp().sort(descending=True)
            keep = torch.arange(len(probs)) < (top_k if top_k > 0 else len(probs))
            token = int(order[torch.multinomial(probs * keep, 1, generator=generator)])
            tokens.append((token, float(log_probs[token])))
            ids += (token,)
            if token in params["stop_token_ids"]:
                reason = "stop"
                break
        return {
            "finish_reason": reason,
            "token_ids": [token for token, _ in tokens],
            "logprobs": {
                "content": [{"token_id": token, "logprob": value} for token, value in tokens]
            },
        }

    def update(self, folder: str) -> str | None:
        """Load weights from a folder; return an error message or None."""
        lacking = dict(self.model.named_parameters())
        for file in sorted(Path(folder).glob("*.safetensors")):
            for name, value in load_file(file).items():
                if name not in lacking or lacking[name].shape != value.shape:
                    return f"Failed to update weights: {name} {tuple(value.shape)} does not fit"
                lacking.pop(name).data.copy_(value)
        return f"Failed to update weights: {len(lacking)} are missing" if lacking else None

    def receive(
        self,
        host: str,
        port: int,
        num_receivers: int,
        secret: str,
        number: int,
        timeout_s: float,
    ) -> list[dict[str, Any]]:
        """Get weights as two workers, of which the first has the model; return their replies."""

        def work(worker: int) -> dict[str, Any]:
            where = replace(rank_info(), timeout_s=timeout_s)
            address = GroupAddress(host, port, num_receivers, secret)
            group = WeightGroup(address, number + worker, where)
            weights, problems, version = Broadcast(group), list[dict[str, Any]](), None
            try:
                received = dict(join_buckets(weights, "cpu"))
                version = weights.version
                if worker == 0:
                    self.model.load_state_dict(received, strict=False)
                self.groups.append(group)  # else the others may leave before the end
            except BrokenGroupError:
                pass
            except RlctlError as error:
                problems = [asdict(problem) for problem in error.problems]
                group.close()
            return {"version": version, "problems": problems}

        with ThreadPoolExecutor(2) as executor:
            return list(executor.map(work, range(2)))


class Handler(BaseHTTPRequestHandler):
    """Request handler for vLLM's endpoints."""

    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)

    def reply(self, status: int, content: Any) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, "")
        elif self.path.startswith("/server_info") and self.server.config is not None:
            self.reply(200, {"vllm_config": self.server.config})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.api_key and self.headers["Authorization"] != f"Bearer {server.api_key}":
            self.reply(401, {"error": "Unauthorized"})
            return
        server.calls.append(self.path)
        match self.path:
            case "/inference/v1/generate":
                time.sleep(server.slow_s)
                with server.lock:
                    self.generate(body)
            case "/collective_rpc" if body["method"] == "receive_from_trainer":
                self.reply(200, {"results": server.receive(**body["kwargs"])})
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
        if self.server.is_closed:
            message = "Scale-out endpoints are disabled. Restart with --enable-scale-out."
            return self.reply(403, {"error": {"message": message}})
        params = body["sampling_params"]
        assert (params["logprobs"], params["ignore_eos"]) == (0, True)
        choice = self.server.respond(body["token_ids"], params)
        return self.reply(200, {"choices": [choice]})
