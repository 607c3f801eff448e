"""Test server with SGLang's documented endpoints, which samples from a transformers model on a CPU.

It lacks tokenizers, streaming and tensor parallelism. `POST /break {"how": …}` makes the next
`/generate` fail.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel


class Server(ThreadingHTTPServer):
    """HTTP server; `calls` are the requested paths, `cache` holds logits by prefix."""

    request_queue_size = 128  # one connection per response

    daemon_threads = True

    def __init__(self, model: PreTrainedModel, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model.eval()
        self.calls: list[str] = []
        self.cache: dict[tuple[int, ...], Tensor] = {}
        self.released = False
        self.broken: str | None = None
        self.api_key: str | None = None
        self.lock = threading.Lock()
        self.params: list[dict[str, Any]] = []

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
        """Sample one response."""
        generator = torch.Generator().manual_seed(params["sampling_seed"])
        ids, tokens, reason = tuple(prompt), [], "length"
        temperature, top_k = params["temperature"], params["top_k"]
        if temperature == 0:
            temperature, top_k = 1.0, 1
        for _ in range(params["max_new_tokens"]):
            log_probs = (self.logits(ids) / temperature).log_softmax(-1)
            probs, order = log_probs.exp().sort(descending=True)
            keep = torch.arange(len(probs)) < (top_k if top_k > 0 else len(probs))
            keep &= probs.cumsum(0) - probs < params["top_p"] * probs[keep].sum()
            token = int(order[torch.multinomial(probs * keep, 1, generator=generator)])
            tokens.append([float(log_probs[token]), token, None])
            ids += (token,)
            if token in params["stop_token_ids"]:
                reason = "stop"
                break
        return {
            "output_ids": [token for _, token, _ in tokens],
            "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": tokens},
        }

    def update(self, folder: str) -> str | None:
        """Load weights from a folder; return an error message or None."""
        own = dict(self.model.named_parameters())
        for file in sorted(Path(folder).glob("*.safetensors")):
            for name, value in load_file(file).items():
                if name not in own or own[name].shape != value.shape:
                    return f"Failed to update weights: {name} {tuple(value.shape)} does not fit"
                own.pop(name).data.copy_(value)
        return f"Failed to update weights: {len(own)} are missing" if own else None


class Handler(BaseHTTPRequestHandler):
    """Request handler for SGLang's endpoints."""

    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)

    def authorized(self) -> bool:
        key = self.server.api_key
        return key is None or self.headers["Authorization"] == f"Bearer {key}"

    def reply(self, status: int, content: Any) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, "") if self.path == "/health_generate" else self.reply(
            404, {"detail": "Not Found"}
        )

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.authorized():
            self.reply(401, {"error": "Unauthorized"})
            return
        with server.lock:
            server.calls.append(self.path)
            match self.path:
                case "/generate":
                    self.generate(body)
                case "/update_weights_from_disk":
                    wrong = (
                        "memory is released"
                        if server.released
                        else server.update(body["model_path"])
                    )
                    message = wrong or "Succeeded to update model weights."
                    self.reply(
                        400 if wrong else 200,
                        {"success": not wrong, "message": message, "num_paused_requests": 0},
                    )
                case "/abort_request":
                    self.reply(200, "")
                case "/flush_cache":
                    server.cache.clear()
                    self.reply(200, "Cache flushed.\n")
                case "/release_memory_occupation" | "/resume_memory_occupation":
                    server.released = "release" in self.path
                    if server.released and "weights" in body["tags"]:
                        for parameter in server.model.parameters():
                            parameter.data.zero_()
                    self.reply(200, "")
                case "/break":
                    server.broken = body["how"]
                    self.reply(200, "")
                case _:
                    self.reply(404, {"detail": "Not Found"})

    def generate(self, body: dict[str, Any]) -> None:
        server = self.server
        how, server.broken = server.broken, None
        if how == "hang":
            time.sleep(3)
        if how == "error" or server.released:
            return self.reply(
                500, {"error": {"message": "CUDA error: an illegal memory access was encountered"}}
            )
        assert body["return_logprob"]
        server.params.append(body["sampling_params"])
        response = server.respond(body["input_ids"], body["sampling_params"])
        if how == "abort":
            response["meta_info"] |= {
                "finish_reason": {"type": "abort", "message": "Abort before prefill"}
            }
        return self.reply(200, response)
