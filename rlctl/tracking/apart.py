"""Thread for the calls of a tracker that may block for long, such as uploads of tables."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue

from rlctl.tracking.delivery import Call, Delivery

_POLL_S = 0.05


@dataclass(eq=False)
class Apart(Delivery):
    """Delivery of these calls; they are disabled alone if one of them takes `limit_s` seconds."""

    limit_s: float
    _began: float | None = field(default=None, init=False)  # of the current call
    _waiting: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._queue: SimpleQueue[Call] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"tracker {self.name}, tables", daemon=True
        )
        self._thread.start()

    def put(self, call: Call) -> None:
        """Queue a call, or count it as undelivered."""
        self.undelivered.add((call.step, call.method))
        self.check_time()
        if self.disabled_reason is None:
            self._waiting += 1
            self._queue.put(call)

    def drain(self, seconds: float) -> None:
        """Wait until all calls are made; then, or after so many seconds, make no more."""
        deadline = time.monotonic() + seconds
        while self._waiting and self.disabled_reason is None:
            time.sleep(_POLL_S)
            self.check_time()
            if time.monotonic() > deadline:
                self.disable("tables were not sent before the end of the run")

    def check_time(self) -> None:
        """Disable these calls if the current one takes too long."""
        began = self._began
        if began is not None and time.monotonic() - began >= self.limit_s:
            self.disable(f"a table took longer than {self.limit_s:g} s (trainer.tracking.call_s)")

    @property
    def is_stuck(self) -> bool:
        """True if these calls were disabled during one that has not returned."""
        return self.disabled_reason is not None and self._began is not None

    def _run(self) -> None:
        while self.disabled_reason is None:
            call = self._queue.get()
            self._began = time.monotonic()
            self.send(call)
            self._began = None
            self._waiting -= 1
