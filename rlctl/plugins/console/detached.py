"""Commands that outlive the process which starts them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import IO


def start_detached(
    command: Sequence[str],
    log: IO[bytes],
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a new session without stdin; `log` receives its output."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
