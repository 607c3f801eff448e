"""The pool's handle of one worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from multiprocessing.connection import Pipe
from pathlib import Path

from rlctl.errors import ResourceError, RlctlError
from rlctl.runtime.rewards.worker import Setup

# Startup timeout: a reward file may import heavy libraries.
START_S = 120.0

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlctl.runtime.rewards.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class WorkerProcess:
    """One worker process and the connection to it. The output goes to `log`, or to stderr."""

    def __init__(self, log: Path | None) -> None:
        """Start the process; `load` waits until it is ready."""
        self.log = log
        self.connection, remote = Pipe()
        arguments = [json.dumps(sys.path), str(remote.fileno()), str(os.getpid())]
        with ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("ab"))
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2 if file is None else file,  # stdout is reserved for results of commands
                stderr=file,
                # Ctrl-C does not reach the worker, and `kill` also ends its child processes.
                start_new_session=True,
            )
        remote.close()

    def load(self, setup: Setup) -> None:
        """Send the functions and wait until the worker has loaded them.

        Raises the worker's error, or ResourceError if it exits or exceeds `START_S`.
        """
        problem: RlctlError | None = None
        try:
            self.connection.send(setup)
            if not self.connection.poll(START_S):
                raise ResourceError(f"a reward worker did not start within {START_S:g} s")
            problem = self.connection.recv()
        except (EOFError, OSError) as error:
            status = self.process.wait()
            raise ResourceError(
                f"a reward worker exited while starting (exit status {status})"
            ) from error
        if problem:
            raise problem

    def kill(self) -> int:
        """Kill the worker and the processes that it has started. Return its exit status."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()
