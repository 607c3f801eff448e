"""Interruption of a worker process that the controller requests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from rlctl.runtime.workers.interrupts import INTERRUPTS

_POLL_S = 0.3


def listen(is_requested: Callable[[], bool], ended: threading.Event, num_processes: int) -> None:
    """Interrupt this worker process, in its main thread, once `is_requested` returns True.

    Polls in a thread until `ended`, more rarely if `num_processes` do. Call it in the main thread.
    """
    poll_s = _POLL_S * max(1, num_processes // 64)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        INTERRUPTS.request()

    def poll() -> None:
        while not ended.wait(poll_s):
            if is_requested():
                INTERRUPTS.requested = True
                # A signal also ends a wait of the main thread, such as `time.sleep`.
                main = threading.main_thread().ident
                assert main is not None, "the main thread has started"
                signal.pthread_kill(main, signal.SIGUSR2)
                return

    INTERRUPTS.is_open = INTERRUPTS.is_worker = True
    signal.signal(signal.SIGUSR2, on_signal)
    threading.Thread(target=poll, name="interrupts", daemon=True).start()
