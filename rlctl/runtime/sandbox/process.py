"""The controller's handle of a guarded worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rlctl.runtime.sandbox.limits import allowed_environment

_STOP_S = 5.0  # a guard kills its worker and exits within milliseconds, unless it was stopped

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from importlib import import_module
import_module(sys.argv[2]).main(int(sys.argv[3]), int(sys.argv[4]))
"""


class GuardedProcess:
    """One worker and its guard `process`. Output goes to `log`, or to stderr.

    `worker` is the process ID of the worker, set once the worker has reported it.
    """

    def __init__(self, module: str, descriptor: int, log: Path | None, env: Sequence[str]) -> None:
        """Start the guard, which calls `main(descriptor, parent)` of `module`.

        `descriptor` is the worker's end of the connection; it is kept open here, too. `env` names
        environment variables that the process gets besides the usual ones.
        """
        self.log = log
        self.worker: int | None = None
        arguments = [json.dumps(sys.path), module, str(descriptor), str(os.getpid())]
        with ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("a+b", buffering=0))
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments],
                pass_fds=[descriptor],
                env=allowed_environment(os.environ, env),
                stdin=subprocess.DEVNULL,
                stdout=2 if file is None else file,  # stdout is reserved for results of commands
                stderr=file,
                start_new_session=True,  # Ctrl-C does not reach it
            )

    def terminate(self) -> None:
        """Begin to end the process; `kill` waits for it."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> int:
        """End the worker and all that it has started. Return the exit status."""
        self.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait()
        if status == -signal.SIGKILL and self.worker is not None:  # the guard had no time to
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.worker, signal.SIGKILL)
        return status
