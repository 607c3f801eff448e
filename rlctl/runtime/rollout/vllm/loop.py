"""Batching of concurrent `generate` calls in one vLLM engine.

Prompts of several threads join the running batch, and each caller returns as soon as its responses
are complete. vLLM's asynchronous front end `AsyncLLM` does this from another process; this steps
the same scheduler in this process: see docs/decisions.md.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams


@dataclass(eq=False)
class _Call:
    """One call of `generate`."""

    prompts: list[Any]
    params: list[VLLMSamplingParams]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # by row
    result: Future[list[RequestOutput]] = field(default_factory=Future)


class VLLMLoop:
    """Thread that steps `llm`, on `num_threads` cores, while any call is in progress.

    Only this thread may use `llm` meanwhile; weights may be changed only while `idle`.
    """

    def __init__(self, llm: LLM, num_threads: int) -> None:
        self.llm = llm
        self._num_threads = num_threads
        self._open: set[_Call] = set()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """True if no call is in progress, so that `llm` may be used."""
        return not self._open

    def generate(self, prompts: list[Any], params: list[VLLMSamplingParams]) -> list[RequestOutput]:
        """Run `LLM.generate` from any thread.

        Raises any error that vLLM has raised in the loop, also for another call or earlier.
        """
        call = _Call(prompts, params)
        self._open.add(call)
        self._queue.put(call)
        return call.result.result()

    def close(self) -> None:
        """End the thread. No call may be in progress."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # OpenMP's setting is per thread
        try:
            self._serve()
        except Exception as error:
            for call in list(self._open):
                call.result.set_exception(error)
            while (call := self._queue.get()) is not None:
                if not call.result.done():
                    call.result.set_exception(error)

    def _serve(self) -> None:
        held: dict[str, tuple[_Call, int]] = {}  # request id -> call and row
        while True:
            while not held or not self._queue.empty():
                call = self._queue.get()
                if call is None:
                    return
                names = self.llm.enqueue(call.prompts, call.params, use_tqdm=False)
                # Outputs carry the id without its random suffix.
                held |= {name.partition("-")[0]: (call, row) for row, name in enumerate(names)}
            for output in cast("list[RequestOutput]", self.llm.llm_engine.step()):
                if output.finished:
                    call, row = held.pop(output.request_id)
                    call.outputs[row] = output
                    if len(call.outputs) == len(call.prompts):
                        self._open.discard(call)
                        call.result.set_result(
                            [call.outputs[each] for each in range(len(call.prompts))]
                        )
