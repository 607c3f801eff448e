"""HTTP client of an SGLang server, which it can start as a child process."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlctl.errors import ConfigError, ResourceError, RlctlError

_POLL_S = 0.2
_HEALTH_S = 10.0
_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_LOG_LINES = 20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SGLangServer:
    """Server at `url`, with `process` and `log` file if it was started here."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(
                f"{self.url!r} is not the address of a server",
                where="engine_kwargs.url",
                hint="use an address such as http://127.0.0.1:30000",
            )

    @classmethod
    def launch(cls, arguments: Sequence[str], timeout_s: float) -> SGLangServer:
        """Start `python -m sglang.launch_server` on a free local port and wait until it is ready.

        The server ends with this process. Raises ResourceError, with the last lines of the server's
        log, if it exits or is not ready after `timeout_s`.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = Path(tempfile.mkstemp(prefix="rlctl-sglang-", suffix=".log")[1])
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *arguments,
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
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
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.call(
                    "GET",
                    "/health_generate",
                    None,
                    min(_HEALTH_S, max(0.1, deadline - time.monotonic())),
                )
                return
            except RlctlError as error:
                last = error.problems[0].message
            if self.process is not None and self.process.poll() is not None:
                raise ResourceError(
                    f"the SGLang server exited during startup with code {self.process.returncode}",
                    hint=self.last_lines(),
                )
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"the SGLang server is not ready after {timeout_s:g} s: {last}",
                    where=self.url,
                    hint=self.last_lines() or "set a larger engine_kwargs.start_timeout_s",
                )
            time.sleep(_POLL_S)

    def call(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        """Send a request and return the reply, decoded from JSON if possible.

        Raises RlctlError, naming `path`, for any failure, or if the reply is not complete after
        `timeout_s`.
        """
        connection = _connection(self.url, timeout_s)
        deadline = time.monotonic() + timeout_s
        parts: list[bytes] = []
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(
                method,
                urlsplit(self.url).path.rstrip("/") + path,
                data,
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            while part := response.read1():
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError
        except TimeoutError as error:
            raise RlctlError(
                f"SGLang did not reply to {path} within {timeout_s:g} s",
                where=self.url,
                hint=self.last_lines(),
            ) from error
        except (OSError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"
            raise RlctlError(
                f"lost the connection to the SGLang server during {path} ({why})",
                where=self.url,
                hint=self.last_lines(),
            ) from error
        finally:
            connection.close()
        text = b"".join(parts).decode(errors="replace")
        if response.status >= 400:
            raise RlctlError(
                f"SGLang replied {response.status} to {path}: {text[:1000]}",
                where=self.url,
                hint=self.last_lines(),
            )
        try:
            return json.loads(text)
        except ValueError:
            return text

    def last_lines(self) -> str | None:
        """Return the end of the log for use as a hint; None unless the server was started here."""
        if self.log is None or not self.log.exists():
            return None
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"last lines of its log {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def close(self) -> None:
        """End the server, with all its processes, and remove its log, if it was started here."""
        if self.process is not None:
            _end(self.process, self.log)


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Create an HTTP or HTTPS connection, according to `url`."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent; called in the child before exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
