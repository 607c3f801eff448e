"""First words of a command that imports torch, and the report of Ctrl-C before a run exists."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlctl.runtime.launch import OnEnd


def announce(doing: str) -> None:
    """Print `doing …` on stderr. Call it before the heavy imports, which take seconds."""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        print(f"{doing} …", file=sys.stderr, flush=True)


@contextmanager
def until_start() -> Iterator[OnEnd]:
    """Yield the `on_end` of a run; report Ctrl-C that comes before the run exists."""
    from rlctl.runs.run_dir import RunDir

    ended = False

    def on_end(run: RunDir, state: str, seconds: float) -> None:
        from rlctl.cli.views.run_end import print_end

        nonlocal ended
        ended = True
        print_end(run, state, seconds)

    try:
        yield on_end
    except KeyboardInterrupt:
        if not ended:
            print("interrupted before the start: nothing was written", file=sys.stderr)
        raise
