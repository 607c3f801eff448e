"""The pool's handle of one worker process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError, ResourceError
from rlctl.runtime.rewards.functions import RewardSpec, Traits, is_user_code
from rlctl.runtime.rewards.messages import MAX_MESSAGE
from rlctl.runtime.rewards.worker import Setup
from rlctl.runtime.sandbox.errors import error_from_json
from rlctl.runtime.sandbox.limits import withheld_variable
from rlctl.runtime.sandbox.process import GuardedProcess

# Startup timeout of a process, and of functions that are known to load: a reward file may import
# heavy libraries.
START_S = 120.0
# Time beyond a deadline before the process is killed. The worker's own alarm must come first, also
# on a busy machine.
GRACE_S = 2.0


class WorkerProcess(GuardedProcess):
    """One worker, its guard `process`, and the connection."""

    def __init__(self, log: Path | None, env: Sequence[str]) -> None:
        """Start the process; `load` waits until it is ready.

        `env` names environment variables that it gets besides the usual ones.
        """
        self.traits: list[Traits] = []  # of the functions, once they are loaded
        self._env = env
        self.connection, remote = Pipe()
        super().__init__("rlctl.runtime.rewards.worker", remote.fileno(), log, env)
        remote.close()

    def load(self, setup: Setup) -> None:
        """Send the functions and wait until the worker has loaded them; `begin` must follow.

        Raises the worker's error, ConfigError if the import of a user's code exceeds
        `setup.import_s` and cannot be interrupted, and ResourceError if the process exits or does
        not start in time.
        """
        try:
            if not self.connection.poll(START_S):
                raise ResourceError(f"a reward worker did not start within {START_S:g} s")
            self.worker = int(self.receive())
            self.connection.send(setup)
            self.traits = [self._wait_for(spec, setup.import_s) for spec in setup.specs]
        except (EOFError, OSError) as error:
            status = self.process.wait()
            raise ResourceError(
                f"a reward worker exited while starting (exit status {status})"
            ) from error

    def begin(self, mode: str) -> None:
        """Send how functions are called: `SYNC` or `ASYNC`."""
        with suppress(OSError):  # it has exited since: its connection is found closed
            self.connection.send(mode)

    def receive(self) -> Any:
        """Return the next message. Raises EOFError or OSError if the worker has exited."""
        return json.loads(self.connection.recv_bytes(MAX_MESSAGE))

    def kill(self) -> int:
        """End the worker and all that it has started. Return the exit status."""
        status = super().kill()
        self.connection.close()
        return status

    def _wait_for(self, spec: RewardSpec, import_s: float) -> Traits:
        """Wait until `spec` is loaded. Raises the worker's error, or ConfigError."""
        limit = import_s + GRACE_S if is_user_code(spec.function) else START_S
        if not self.connection.poll(limit):
            raise ConfigError(
                f"the import of the reward function {spec.function!r} took longer than "
                f"{import_s:g} s and could not be interrupted",
                hint="reward.timeout_s=N allows more time",
            )
        reply = self.receive()
        if "error" in reply:
            error = error_from_json(reply["error"])
            if name := withheld_variable(str(error), self._env):
                first = replace(error.problems[0], hint=f"reward.env=[{name}] passes it on")
                raise ConfigError(first)
            raise error
        return Traits(*reply["traits"])
