"""The pool's handle of one worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError, MissingExtraError, Problem, ResourceError
from rlctl.runtime.rewards.functions import RewardSpec, is_user_code
from rlctl.runtime.rewards.sandbox import allowed_environment
from rlctl.runtime.rewards.worker import MAX_MESSAGE, Setup

# Startup timeout of a process, and of functions that are known to load: a reward file may import
# heavy libraries.
START_S = 120.0
# Time beyond a deadline before the process is killed. The worker's own alarm must come first, also
# on a busy machine.
GRACE_S = 2.0
_STOP_S = 5.0  # a guard kills its worker and exits within milliseconds, unless it was stopped

_ERRORS = {each.__name__: each for each in (ConfigError, MissingExtraError, ResourceError)}

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlctl.runtime.rewards.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class WorkerProcess:
    """One worker, its guard `process`, and the connection. Output goes to `log`, or to stderr."""

    def __init__(self, log: Path | None, env: Sequence[str]) -> None:
        """Start the process; `load` waits until it is ready.

        `env` names environment variables that it gets besides the usual ones.
        """
        self.log = log
        self.connection, remote = Pipe()
        self._worker: int | None = None
        arguments = [json.dumps(sys.path), str(remote.fileno()), str(os.getpid())]
        with ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("ab"))
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments],
                pass_fds=[remote.fileno()],
                env=allowed_environment(os.environ, env),
                stdin=subprocess.DEVNULL,
                stdout=2 if file is None else file,  # stdout is reserved for results of commands
                stderr=file,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        remote.close()

    def load(self, setup: Setup) -> None:
        """Send the functions and wait until the worker has loaded them.

        Raises the worker's error, ConfigError if the import of a user's code exceeds
        `setup.import_s` and cannot be interrupted, and ResourceError if the process exits or does
        not start in time.
        """
        try:
            if not self.connection.poll(START_S):
                raise ResourceError(f"a reward worker did not start within {START_S:g} s")
            self._worker = int(self.receive())
            self.connection.send(setup)
            for spec in setup.specs:
                self._wait_for(spec, setup.import_s)
        except (EOFError, OSError) as error:
            status = self.process.wait()
            raise ResourceError(
                f"a reward worker exited while starting (exit status {status})"
            ) from error

    def receive(self) -> Any:
        """Return the next message. Raises EOFError or OSError if the worker has exited."""
        return json.loads(self.connection.recv_bytes(MAX_MESSAGE))

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
        if status == -signal.SIGKILL and self._worker is not None:  # the guard had no time to
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._worker, signal.SIGKILL)
        self.connection.close()
        return status

    def _wait_for(self, spec: RewardSpec, import_s: float) -> None:
        """Wait until `spec` is loaded. Raises the worker's error, or ConfigError."""
        limit = import_s + GRACE_S if is_user_code(spec.function) else START_S
        if not self.connection.poll(limit):
            raise ConfigError(
                f"the import of the reward function {spec.function!r} took longer than "
                f"{import_s:g} s and could not be interrupted",
                hint="reward.timeout_s=N allows more time",
            )
        error = self.receive()
        if error is not None:
            kind, problems = error
            raise _ERRORS.get(kind, ConfigError)(*(Problem(*each) for each in problems))
