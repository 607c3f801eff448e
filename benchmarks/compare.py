"""Comparison of two files of `make bench`.

    python -m benchmarks.compare OLD.json NEW.json [--allowed 10]

Prints each ratio of both files and its change. The exit code is 1 if one lost more than the allowed
percentage, or is missing in the new file although its benchmark ran or failed there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import Row, show

Ratios = dict[str, tuple[float, str]]  # by name: ratio, and whether "higher" or "lower" is better


def ratios_of(report: dict[str, Any]) -> Ratios:
    """Return the ratios of a file of `make bench`."""
    return {
        f"{benchmark}: {each['name']}": (each["ratio"], each["better"])
        for benchmark, found in report["benchmarks"].items()
        for each in found["ratios"]
    }


def gain(old: float, new: float, better: str) -> float:
    """Return the change in percent; positive is better."""
    return 100 * ((new / old if better == "higher" else old / new) - 1)


def compare(
    old: dict[str, Any], new: dict[str, Any], allowed: float
) -> tuple[list[Row], list[str]]:
    """Return a row per ratio that both have, and what is worse by more than `allowed` percent."""
    before, after = ratios_of(old), ratios_of(new)
    rows: list[Row] = []
    worse: list[str] = []
    for name, (ratio, better) in before.items():
        if name not in after:
            if name.split(":")[0] in new["benchmarks"]:
                worse.append(f"{name}: missing, was {ratio:.3g}")
            continue
        change = gain(ratio, after[name][0], better)
        rows.append(
            {"ratio": name, "old": ratio, "new": after[name][0], "better": better, "gain %": change}
        )
        if change < -allowed:
            worse.append(f"{name}: {ratio:.3g} → {after[name][0]:.3g} ({change:+.0f} %)")
    return rows, worse


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--allowed", type=float, default=10.0, help="loss in percent")
    given = parser.parse_args(arguments)
    rows, worse = compare(
        json.loads(given.old.read_text()), json.loads(given.new.read_text()), given.allowed
    )
    if rows:
        show(f"{given.old} and {given.new}", rows, as_json=False)
    else:
        print("the files have no ratio in common")
    for each in worse:
        print(f"WORSE {each}")
    return 1 if worse or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
