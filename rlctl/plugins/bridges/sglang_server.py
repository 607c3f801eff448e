"""HTTP client of an SGLang server, which it can start as a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlctl.errors import ResourceError
from rlctl.process import die_with_parent
from rlctl.runtime.rollout.http_server import HttpServer

_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_LOG_LINES = 20


@dataclass(frozen=True)
class SGLangServer(HttpServer):
    """Server at `url`, with `process` and `log` file if it was started here."""

    product: ClassVar[str] = "SGLang"

    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @classmethod
    def launch(
        cls, python: str, arguments: Sequence[str], on_cpu: bool, timeout_s: float
    ) -> SGLangServer:
        """Start `python -m sglang.launch_server` on a free local port and wait until it is ready.

        The server ends with this process. Raises ResourceError, with the last lines of the server's
        log, if it exits or is not ready after `timeout_s`.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = Path(tempfile.mkstemp(prefix="rlctl-sglang-", suffix=".log")[1])
        address = ["--host", "127.0.0.1", "--port", str(port)]
        command = [python, "-m", "sglang.launch_server", *address, *arguments]
        environment = dict(os.environ)
        if on_cpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                preexec_fn=die_with_parent,
            )
        server = cls(f"http://127.0.0.1:{port}", process, log)
        weakref.finalize(server, _end, process, log)
        try:
            server.wait_until_ready(timeout_s)
        except BaseException:
            server.close()
            raise
        return server

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until `/health_generate` succeeds. Raises ResourceError after `timeout_s`."""
        self.wait_for("/health_generate", timeout_s)

    def check_running(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            raise ResourceError(
                f"the SGLang server exited during startup with code {self.process.returncode}",
                hint=self.last_lines(),
            )

    def last_lines(self) -> str | None:
        """Return the end of the log for use as a hint; None unless the server was started here."""
        if self.log is None or not self.log.exists():
            return None
        lines = self.log.read_text(errors="replace", encoding="utf-8").splitlines()[-_LOG_LINES:]
        return f"last lines of its log {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def close(self) -> None:
        """End the server, with all its processes, and remove its log, if it was started here."""
        if self.process is not None:
            _end(self.process, self.log)


def _end(process: subprocess.Popen[bytes], log: Path | None) -> None:
    """Send SIGTERM, then SIGKILL, to the process group of the server, and remove its log."""
    if process.poll() is None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    if log is not None:
        log.unlink(missing_ok=True)
