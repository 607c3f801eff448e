"""Other processes of a test: their output, which have ended, and which can be signalled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_python(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with `words` to its end and return its output."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def gone(pid: int) -> bool:
    """Return True if the process has ended. A zombie has."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            == "Z"
        )
    except (FileNotFoundError, ProcessLookupError):  # it may end between open and read
        return True


def words_of(pid: int) -> list[str]:
    """Return the command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def scopes_signals() -> bool:
    """Return True if a process without relation to this one cannot signal it after `restrict`."""
    code = (
        "import os, sys\nfrom rlctl.runtime.sandbox.process_limits import restrict\n"
        "from rlctl.runtime.sandbox.worker_settings import Limits\n"
        "restrict(Limits())\n"
        "try: os.kill(int(sys.argv[1]), 0)\nexcept PermissionError: sys.exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(os.getpid())], check=False)
    return done.returncode == 9
