"""Time to compose a shipped recipe relative to Hydra composing the same files without checks.

    python benchmarks/compose.py [ROUNDS]

Both alternate in one process with everything imported; the ratio is that of the medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from benchmarks.results import record
from rlctl.recipes.compose import compose
from rlctl.recipes.search_path import LIBRARY, library_recipes


def seconds(call: Callable[[str], object], name: str) -> float:
    """Return the wall-clock time of `call(name)`."""
    start = time.perf_counter()
    call(name)
    return time.perf_counter() - start


def measure(name: str, rounds: int) -> tuple[float, float]:
    """Return the median seconds of (Hydra, rlctl) over `rounds` alternations, after a warm-up."""
    with initialize_config_dir(str(LIBRARY), version_base="1.3"):
        times = [(seconds(hydra_compose, name), seconds(compose, name)) for _ in range(rounds + 1)][
            1:
        ]
    return statistics.median(pair[0] for pair in times), statistics.median(
        pair[1] for pair in times
    )


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for name in library_recipes():
        if not name.endswith("_trainer"):
            hydra, rlctl = measure(name, rounds)
            record(f"{name} over hydra", rlctl / hydra, "lower")
            print(
                f"{name:18} hydra {hydra * 1e3:5.0f} ms   rlctl {rlctl * 1e3:5.0f} ms "
                f"(target: at most 600)   ratio {rlctl / hydra:5.2f}"
            )


if __name__ == "__main__":
    main()
