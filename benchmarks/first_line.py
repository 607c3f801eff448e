"""Time from Enter to the first line of `rlctl train ppo`, on a pseudo-terminal. Target: 1 s.

python -m benchmarks.first_line [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time

import pexpect


def first_line_s() -> float:
    """Return the seconds until the first line; the command is interrupted then."""
    began = time.monotonic()
    child = pexpect.spawn(sys.executable, ["-m", "rlctl", "train", "ppo", "--dry-run"], timeout=60)
    child.expect_exact("checking the configuration")
    seconds = time.monotonic() - began
    child.close(force=True)
    return seconds


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    times = [first_line_s() for _ in range(rounds)]
    print(f"first line: median {statistics.median(times):.2f} s, longest {max(times):.2f} s")


if __name__ == "__main__":
    main()
