"""`rlctl` in forks of a process that has imported everything, which is faster than to start Python.

Trials of their sweeps and attempts of `--retries` are forks as well. Tests of the start of the
process itself need `python -m rlctl` (`process=True` in `tests.e2e.command`).
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from rlctl.process import die_with_parent
from tests.progress import wait_until

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


# Environment variable of commands whose cluster is on this machine, whatever its address: their
# workers are forks, too. rlctl itself forks them for loopback addresses alone.
ONE_MACHINE = "RLCTL_TEST_ONE_MACHINE"
# That of a function `module:name`, which a command calls before it begins.
PRELUDE = "RLCTL_TEST_PRELUDE"


class Forked:
    """Running `rlctl` process in its own session, with part of the interface of `subprocess.Popen`.

    Its stdout and stderr are files. A write beyond `largest_file` bytes fails, as on a full disk.
    """

    def __init__(
        self,
        arguments: list[str],
        cwd: Path,
        environment: Mapping[str, str],
        largest_file: int | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rlctl-forked-")
        out, err = (Path(self._folder.name) / name for name in ("stdout", "stderr"))
        out.touch()
        err.touch()
        self.stdout, self.stderr = out.open(), err.open()
        variables = dict(environment)
        self._process = FORKS.Process(
            target=_child, args=(arguments, cwd, variables, out, err, largest_file)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal, or None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raise `subprocess.TimeoutExpired` if the process stalls.

        `timeout` is for compatibility with `Popen` and ignored: the deadline is by progress.
        """
        wait_until(lambda: self.returncode is not None, self.pid, "rlctl")
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return the text on stdout and stderr since the last call."""
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


def completed(
    arguments: list[str],
    cwd: Path,
    environment: Mapping[str, str],
    largest_file: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `rlctl` to its end and return the result. A stalled process is killed."""
    process = Forked(arguments, cwd, environment, largest_file)
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.wait(), out, err)


def _child(
    arguments: list[str],
    cwd: Path,
    environment: dict[str, str],
    out: Path,
    err: Path,
    largest_file: int | None,
) -> NoReturn:
    """Run `rlctl` as `python -m rlctl` would. Exits when the process of the tests exits."""
    die_with_parent()
    os.setsid()
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    _redirect(0, Path(os.devnull), os.O_RDONLY)
    _redirect(1, out, os.O_WRONLY | os.O_APPEND)
    _redirect(2, err, os.O_WRONLY | os.O_APPEND)
    if {"sweep", "resume", "--retries"} & {*arguments}:
        _fork_children()
    run_in_fork(arguments, cwd, environment)


def run_in_fork(arguments: list[str], cwd: Path, environment: dict[str, str]) -> NoReturn:
    """Be `python -m rlctl ARGUMENTS`, and exit."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if marker := environment.get("RLCTL_TEST_MARKER"):
        os.memfd_create(marker)  # not closed; /proc/PID/environ is that of the first process
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import rlctl.__main__
    from rlctl.runtime.cluster import fork_server

    if ONE_MACHINE in environment:
        fork_server.on_this_machine = lambda _: True
    if prelude := environment.get(PRELUDE):
        module, _, name = prelude.partition(":")
        getattr(importlib.import_module(module), name)()
    sys.argv = [str(rlctl.__main__.__file__), *arguments]
    sys.path[:0] = [str(cwd), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        sys.exit(rlctl.__main__.main(arguments))
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def read_ray_variables() -> None:
    """Let Ray read environment variables again that it reads only once, such as RAY_AUTH_MODE."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    importlib.reload(ray_constants)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _redirect(descriptor: int, path: Path, flags: int) -> None:
    file = os.open(path, flags)
    os.dup2(file, descriptor)
    os.close(file)


_LARGEST = 1 << 17  # message in bytes


class _Child:
    """Process that `_serve` has forked, with the part of `subprocess.Popen` that rlctl uses."""

    def __init__(self, server: socket.socket, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self._ask(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the exit code."""
        code = self._ask(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send the process a signal unless its exit code is known; also in handlers, in `wait`."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def _ask(self, options: int) -> int | None:
        if self.returncode is None:
            self._server.send(json.dumps([self.pid, options]).encode())
            self.returncode = json.loads(self._server.recv(_LARGEST))
        return self.returncode


def _fork_children() -> None:
    """Let the processes that this one starts with `start_rlctl` be forks of it as it is now.

    Later it has threads of Ray, with which no process can fork.
    """
    from rlctl.runs import stop
    from rlctl.sweeps import child

    server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        server.close()
        _serve(theirs)
    theirs.close()

    def start(
        words: Sequence[str],
        log: IO[bytes] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> _Child:
        asked = [*words], cwd or os.getcwd(), dict(os.environ if env is None else env)
        files = [] if log is None else [log.fileno()]
        socket.send_fds(server, [json.dumps(asked).encode()], files)
        return _Child(server, json.loads(server.recv(_LARGEST)))

    child.start_rlctl = start
    stop.start_rlctl = start


def _serve(client: socket.socket) -> NoReturn:
    """Fork the processes that `client` asks for and reply with process IDs and exit codes.

    A request is `[words, cwd, environment]`, with the descriptor of a log if there is one, or
    `[process ID, options of waitpid]`. The processes receive SIGTERM when this one is terminated,
    which it is when its parent exits.
    """
    os.setsid()
    die_with_parent()
    while True:
        data, files, _, _ = socket.recv_fds(client, _LARGEST, 1)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if len(request) == 2:
            pid, status = os.waitpid(*request)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        elif (reply := os.fork()) == 0:
            client.close()
            die_with_parent()
            if files:
                os.setsid()
                os.dup2(files[0], 1)
                os.dup2(files[0], 2)
            else:
                os.setpgid(0, 0)
            words, cwd, environment = request
            run_in_fork(words, Path(cwd), environment)
        for file in files:
            os.close(file)
        client.send(json.dumps(reply).encode())
