"""Tool that runs Python programs, each in a separate process without network.

The process may write to a temporary folder only, which is removed afterwards, and it has limits of
time, memory, processes and output, which hold for all that it starts. It can read the files of the
user. `isolation.missing_isolation` names what a machine does not keep it from.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.python_process import CANNOT_DENY, CANNOT_PROTECT
from rlctl.plugins.agents.environments.tool import StatelessTool, ToolResult
from rlctl.runtime.sandbox.isolation import bubblewrap, bubblewrap_advice, has_bubblewrap
from rlctl.runtime.sandbox.program_usage import children, usage
from rlctl.runtime.serving.chat import to_schema

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlctl.plugins.agents.environments.python_process import main; main()"
)
_MIB = 2**20
_MAX_PROCESSES = 64  # of a program
_GUARDS = 2  # processes of rlctl or bubblewrap that are above it
_WATCH_S = 0.1  # between two looks at the processes of a program
_END_S = 30.0  # all processes of a program end within milliseconds, but on a busy machine


class PythonParams(plugins.Params):
    """Settings of the Python tool."""

    time_limit_s: float = Field(10.0, gt=0, description="time limit of a program in seconds")
    memory_mb: int = Field(1024, ge=64, description="memory of a program in MiB")
    file_mb: int = Field(64, ge=0, description="size of the files that it writes, in MiB")
    output_chars: int = Field(10_000, ge=1, description="characters of output that are kept")
    allow_network: bool = Field(False, description="let programs use the network")
    allow_writes: bool = Field(
        False, description="run programs where nothing keeps them from writing to your files"
    )


class PythonTool(StatelessTool):
    """Run a Python program in a sandbox without network and return what it prints."""

    Params = PythonParams
    schema = to_schema(
        "python",
        "Run a Python program. Returns what it prints, and the value of its last expression. Each "
        "program starts afresh.",
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    )

    def __init__(self, params: PythonParams) -> None:
        """Run an empty program. Raises ConfigError if network or files cannot be denied."""
        self._params = params
        with tempfile.TemporaryDirectory(prefix="rlctl-python-") as folder:
            done = subprocess.run(
                self._command(folder), input=b"", env=_environment(folder), check=False
            )
        if done.returncode == CANNOT_DENY:
            raise ConfigError(
                "programs of the python tool cannot be kept from the network: this system has "
                "neither user namespaces nor seccomp",
                hint="tool_params.python.allow_network=true runs them with the network",
            )
        if done.returncode == CANNOT_PROTECT:
            hint = "tool_params.python.allow_writes=true runs them all the same"
            if advice := bubblewrap_advice():
                hint = f"{advice}, or {hint}"
            raise ConfigError(
                "programs of the python tool cannot be kept from writing to your files: this "
                "system has neither bubblewrap nor Landlock (Linux 5.13)",
                hint=hint,
            )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a program. Raises TimeoutError with the output so far."""
        output = bytearray()
        with tempfile.TemporaryDirectory(
            prefix="rlctl-python-", ignore_cleanup_errors=True
        ) as folder:
            process = await asyncio.create_subprocess_exec(
                *self._command(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
            )
            excess = asyncio.create_task(self._excess(process))
            try:
                async with asyncio.timeout(self._params.time_limit_s):
                    await self._communicate(process, str(arguments["code"]), output)
                    status = await process.wait()
            except TimeoutError:
                limit = self._params.time_limit_s
                raise TimeoutError(f"timed out after {limit:g} s\n{self._text(output)}") from None
            finally:
                await _end(process)
                excess.cancel()  # has returned if it has killed the program
        text = self._text(output)
        reason = None if status in (0, 1) else f"exit status {status}"
        if excess.done():
            reason = excess.result() or reason
        if reason is None:
            return ToolResult(text)
        return ToolResult(f"{text}\n{reason}".lstrip())

    def _command(self, folder: str) -> list[str]:
        options = {
            "folder": folder,
            "deny_network": not self._params.allow_network,
            "allow_writes": self._params.allow_writes,
            "memory": self._params.memory_mb * _MIB,
            "file_size": self._params.file_mb * _MIB,
            "has_bubblewrap": has_bubblewrap(),
        }
        python = [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(options)]
        if not has_bubblewrap():
            return python
        network = self._params.allow_network
        return [*bubblewrap(folder, options["file_size"], network=network), *python]

    async def _excess(self, process: asyncio.subprocess.Process) -> str | None:
        """Kill a program that exceeds a limit of all its processes together; return which."""
        limit = self._params.memory_mb * _MIB
        most = _MAX_PROCESSES + _GUARDS
        while process.returncode is None:
            number, size = await asyncio.to_thread(usage, process.pid, most)
            if number > most:
                _kill(process)
                return f"killed: more than {_MAX_PROCESSES} processes"
            if size > limit:
                _kill(process)
                return f"killed: more than {self._params.memory_mb} MiB of memory (MemoryError)"
            await asyncio.sleep(_WATCH_S)
        return None

    async def _communicate(
        self, process: asyncio.subprocess.Process, source: str, output: bytearray
    ) -> None:
        """Send the program and collect its output; what exceeds the limit is read and dropped."""
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        with suppress(ConnectionError):
            process.stdin.write(source.encode(errors="surrogatepass"))
            await process.stdin.drain()
        process.stdin.close()
        limit = 4 * self._params.output_chars  # bytes of a character
        while data := await process.stdout.read(2**16):
            output += data[: max(0, limit - len(output))]

    def _text(self, output: bytearray) -> str:
        text = output.decode(errors="replace")
        limit = self._params.output_chars
        if len(text) > limit:
            return text[:limit] + "...(truncated)"
        return text.rstrip("\n")


def _kill(process: asyncio.subprocess.Process) -> None:
    """Begin to end a program and all that it started.

    The kernel does so when the first process of bubblewrap's namespace ends; else the guard does,
    which the program cannot reach.
    """
    with suppress(ProcessLookupError):
        first = children(Path(f"/proc/{process.pid}")) if has_bubblewrap() else []
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        if not first:
            process.terminate()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program, and wait until its output has no writer. Raises RuntimeError if it has."""
    assert process.stdout is not None, "a pipe"
    _kill(process)
    try:
        async with asyncio.timeout(_END_S):
            while await process.stdout.read(2**16):
                pass
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise RuntimeError(f"the program could not be ended within {_END_S:g} s") from None


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of a program: nothing of the user's but where programs are."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {**kept, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
