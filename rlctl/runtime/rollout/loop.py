"""Thread that steps an engine while requests are open, so that callers on any thread share it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from rlctl.runtime.batch import Ragged
from rlctl.runtime.rollout.engine import (
    Responses,
    RolloutEngine,
    SamplingParams,
    in_order,
    to_requests,
    to_responses,
)
from rlctl.runtime.rollout.requests import Completion, Request

# Receives each response of a request, or the error that ended the loop. Runs in the loop's thread.
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
        self._open: dict[tuple[int, int], Deliver] = {}  # by key and index of the response
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[Sequence[Request] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """True if no response is open, so that the engine may be used."""
        return not self._open

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Queue requests; `deliver` receives each of their responses."""
        with self._lock:
            if self._error is None:
                for request in requests:
                    self._open |= {(request.key, i): deliver for i in range(len(request.seeds))}
                self._queue.put(requests)
                return
        deliver(self._error)

    def generate(
        self, prompt_ids: Ragged, sampling: SamplingParams, context_length: int
    ) -> Responses:
        """Sample responses to B prompts (ragged): see `RolloutEngine.generate`."""
        requests = to_requests(prompt_ids, sampling, context_length)
        results: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()
        self.submit(requests, results.put)
        completions: list[Completion] = []
        for _ in range(len(requests) * sampling.n):
            result = results.get()
            if isinstance(result, Exception):
                raise result
            completions.append(result)
        return to_responses(in_order(requests, completions))

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
                self._error, waiting = error, set(self._open.values())
                self._open.clear()
            for deliver in waiting:
                deliver(error)

    def _serve(self) -> None:
        while True:
            while not self.engine.num_open or not self._queue.empty():
                requests = self._queue.get()
                if requests is None:
                    return
                self.engine.submit(requests)
            for completion in self.engine.step():
                self._open.pop((completion.key, completion.index))(completion)
