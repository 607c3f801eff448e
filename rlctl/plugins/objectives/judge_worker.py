"""Worker of an engine that serves a judge of the run, on the API of chat completions."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from rlctl.errors import ConfigError
from rlctl.plugins import load
from rlctl.quickstart import real_path
from rlctl.recipes import schema
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.data.tokenizer import encode_prompt, stop_token_ids, tokenizer_of
from rlctl.runtime.model.adapter_names import engine_parameters
from rlctl.runtime.model.load import compute_dtype, load_model, with_local_path
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, next_key
from rlctl.runtime.serving.chat import Turn
from rlctl.runtime.serving.chat_api import ChatReply
from rlctl.runtime.serving.chat_request import ApiError, ChatRequest
from rlctl.runtime.workers.dispatch import Dispatch, Worker, dispatch

# Receives the response to a request, or the error that ended the loop. Runs in the loop's thread.
Deliver = Callable[[Completion | Exception], None]


class EngineLoop:
    """Batches the requests of concurrent callers in one engine.

    Only this thread may use `engine` meanwhile, on `num_threads` cores; weights may be changed only
    while it is `idle`. An error of the engine ends the loop and is delivered to all callers, also
    later ones.
    """

    def __init__(self, engine: RolloutEngine, num_threads: int) -> None:
        self.engine = engine
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._open: dict[int, Deliver] = {}  # by key of the request
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """True if no response is open, so that the engine may be used."""
        return not self._open

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request of one response, which `deliver` receives."""
        with self._lock:
            if self._error is None:
                self._open[request.key] = deliver
                self._queue.put(request)
                return
        deliver(self._error)

    def close(self) -> None:
        """End the thread. No response may be open."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # OpenMP's setting is per thread
        try:
            self._serve()
        except Exception as error:
            with self._lock:
                self._error = error
                waiting = list(self._open.values())
                self._open.clear()
            for deliver in waiting:
                deliver(error)

    def _serve(self) -> None:
        while True:
            while not self.engine.num_open or not self._queue.empty():
                request = self._queue.get()
                if request is None:
                    return
                self.engine.submit([request])
            for completion in self.engine.step():
                self._open.pop(completion.key)(completion)


@dataclass(frozen=True)
class JudgeSpec:
    """Model, engine and limits of a judge."""

    model: schema.Model
    rollout: schema.Rollout
    max_prompt_length: int
    max_response_length: int
    seed: int

    @classmethod
    def from_config(cls, config: schema.Config) -> Self:
        """Return the settings of the judge that a run serves itself."""
        policy = config.actor_rollout_ref
        judge = config.reward.judge
        assert judge.model.path is not None, "the run serves no judge"
        rollout = judge.rollout
        return cls(
            model=policy.model.model_copy(
                update={
                    **{"path": real_path(judge.model.path), "tokenizer_path": None},
                    **{"custom_chat_template": None, "lora_rank": 0, "override_config": {}},
                    "init": "auto",
                }
            ),
            rollout=policy.rollout.model_copy(
                update={
                    **{"name": rollout.name, "max_num_seqs": rollout.max_num_seqs},
                    **{"tensor_model_parallel_size": 1, "free_cache_engine": False},
                    **{"gpu_memory_utilization": rollout.gpu_memory_utilization},
                    "engine_kwargs": {},
                }
            ),
            max_prompt_length=rollout.prompt_length,
            max_response_length=rollout.response_length,
            seed=config.trainer.seed,
        )


class JudgeWorker(Worker):
    """Engine with a frozen model, and its server, each on a separate thread."""

    def __init__(self, rank_info: RankInfo, spec: JudgeSpec) -> None:
        self.spec = spec
        model = with_local_path(spec.model)
        self.tokenizer = tokenizer_of(model)
        dtype = compute_dtype(model, rank_info.device)
        engine_spec = EngineSpec(
            model=model,
            rollout=spec.rollout,
            dtype=dtype,
            rank_info=rank_info,
            max_length=spec.max_prompt_length + spec.max_response_length,
            seed=spec.seed,
        )
        engine: RolloutEngine = load("engines", spec.rollout.name).from_spec(engine_spec, None)
        self.engine = engine
        weights = load_model(model, "policy", dtype, spec.seed)
        engine.load_weights(engine_parameters(weights, lambda _: True))
        self.decoding = Decoding(0.0, 1.0, -1, stop_token_ids(self.tokenizer, model.path))
        self.loop = EngineLoop(engine, rank_info.num_threads)
        self.replies = itertools.count()
        self._server: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    @dispatch(Dispatch.EACH, reads=True)
    def serve(self, places: list[tuple[str, str]]) -> list[str]:
        """Start the server of each rank; return their base URLs.

        The list has the key that a rank's server accepts, and the address on which it listens.
        """
        from rlctl.runtime.serving.endpoint import Endpoint

        ((key, host),) = places
        started = threading.Event()
        found = list[str]()

        async def run() -> None:
            self._server = asyncio.get_running_loop()
            async with Endpoint(host) as endpoint:
                endpoint.open(self, key)
                found.append(endpoint.base_url)
                started.set()
                await self._stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        started.wait()
        return found

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation greedily: see `Session`."""
        if request.prompt is not None:
            raise ApiError(400, "a judge has no completions, but chat completions", param="prompt")
        try:
            ids = encode_prompt(self.tokenizer, request.messages)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from None
        if not 0 < len(ids) <= self.spec.max_prompt_length:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, more than reward.judge.rollout.prompt_length="
                f"{self.spec.max_prompt_length}",
                "context_length_exceeded",
            )
        limit = min(self.spec.max_response_length, request.max_tokens or 2**31)
        completion = await self._generate(ids, limit)
        text = self.tokenizer.decode(completion.response_ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str), "one response is decoded"
        written = len(completion.response_ids)
        number = next(self.replies)
        return ChatReply(number, text, Turn(text), completion.finish, len(ids), written)

    async def _generate(self, ids: list[int], limit: int) -> Completion:
        server = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = server.create_future()

        def deliver(result: Completion | Exception) -> None:
            server.call_soon_threadsafe(settle, result)

        def settle(result: Completion | Exception) -> None:
            if future.done():  # its request was cancelled
                return
            if isinstance(result, Exception):
                future.set_exception(ApiError(500, f"{type(result).__name__}: {result}"))
            else:
                future.set_result(result)

        request = Request(next_key(), torch.tensor(ids), self.decoding, (limit,), (0,))
        self.loop.submit(request, deliver)
        return await future

    def close(self) -> None:
        """Stop the server. The threads are daemons, and requests in progress are lost."""
        if self._server is not None:
            self._server.call_soon_threadsafe(self._stop.set)
        if self.loop.idle:
            self.loop.close()
            self.engine.close()
