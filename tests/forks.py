"""`rlctl` in forks of a process that has imported everything, which is faster than to start Python.

Tests of the start of the process itself need `python -m rlctl` (`process=True` in
`tests.e2e.command`).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from rlctl.runs.process import die_with_parent
from tests import warm_workers
from tests.progress import wait_until

WARM = "RLCTL_TEST_WARM"  # socket of the process that forks Ray workers

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "rlctl.runtime",
        "rlctl.cli.commands.train",
        "rlctl.cli.commands.resume",
        "rlctl.runtime.resume",
        "rlctl.runtime.cluster.engine_group",
        "rlctl.runtime.cluster.session",
        "rlctl.sweeps.launch",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.auto.tokenization_auto",
    ]
)


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
        if "--inline" not in arguments and not variables.get("RLCTL_TEST_MARKER"):
            variables[WARM] = warm_workers.address()
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
    os.chdir(cwd)
    if path := environment.pop(WARM, None):
        warm_workers.use(path)
    os.environ.clear()
    os.environ.update(environment)
    _redirect(0, Path(os.devnull), os.O_RDONLY)
    _redirect(1, out, os.O_WRONLY | os.O_APPEND)
    _redirect(2, err, os.O_WRONLY | os.O_APPEND)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import rlctl.__main__

    sys.argv = [str(rlctl.__main__.__file__), *arguments]
    sys.path[:0] = [str(cwd), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        sys.exit(rlctl.__main__.main(arguments))
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def _redirect(descriptor: int, path: Path, flags: int) -> None:
    file = os.open(path, flags)
    os.dup2(file, descriptor)
    os.close(file)
