"""vLLM for callers in several threads: what they ask joins what is being answered, and each has its answers as soon as they are there.

vLLM's own asynchronous front end, `AsyncLLM`, does this from another process. This is the same scheduler, stepped in this one: see
docs/decisions.md.
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
    """Rows that are wanted together."""

    prompts: list[Any]
    params: list[VLLMSamplingParams]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # by row
    answer: Future[list[RequestOutput]] = field(default_factory=Future)


class VLLMLoop:
    """Steps `llm` in a thread of its own, on `num_threads` cores, as long as anything is to be answered.

    Nothing but this thread may touch `llm` meanwhile: who wants to change its weights waits for the answers first.
    """

    def __init__(self, llm: LLM, num_threads: int) -> None:
        self.llm = llm
        self._num_threads = num_threads
        self._open: set[_Call] = set()
        self._asked: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all is answered, so that `llm` may be touched."""
        return not self._open

    def generate(self, prompts: list[Any], params: list[VLLMSamplingParams]) -> list[RequestOutput]:
        """As `LLM.generate`, from any thread. Raises what vLLM raised, for whomever, now or before."""
        call = _Call(prompts, params)
        self._open.add(call)
        self._asked.put(call)
        return call.answer.result()

    def close(self) -> None:
        """End the thread. Nobody may be waiting."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # OpenMP keeps the number for each thread
        try:
            self._serve()
        except Exception as error:
            for call in list(self._open):
                call.answer.set_exception(error)
            while (call := self._asked.get()) is not None:
                if not call.answer.done():
                    call.answer.set_exception(error)

    def _serve(self) -> None:
        held: dict[
            str, tuple[_Call, int]
        ] = {}  # by vLLM's number: whose it is, and which of its rows
        while True:
            while not held or not self._asked.empty():
                call = self._asked.get()
                if call is None:
                    return
                names = self.llm.enqueue(call.prompts, call.params, use_tqdm=False)
                held |= {
                    name.partition("-")[0]: (call, row) for row, name in enumerate(names)
                }  # the rest is random
            for output in cast("list[RequestOutput]", self.llm.llm_engine.step()):
                if output.finished:
                    call, row = held.pop(output.request_id)
                    call.outputs[row] = output
                    if len(call.outputs) == len(call.prompts):
                        self._open.discard(call)
                        call.answer.set_result(
                            [call.outputs[each] for each in range(len(call.prompts))]
                        )
