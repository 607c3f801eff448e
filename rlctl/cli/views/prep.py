"""Summary of `rlctl prep`, on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlctl.cli.console import stderr, table
from rlctl.monitoring.text import plural

if TYPE_CHECKING:
    from rlctl.data_prep.lengths import Lengths

_BAR_WIDTH = 40


def print_summary(
    summary: Mapping[str, Mapping[str, Any]],
    lengths: Mapping[str, Lengths],
    max_prompt_length: int | None,
) -> None:
    """Print one line per written file, and the histogram of prompt lengths where counted."""
    for split, entry in summary.items():
        dropped = f", {entry['num_dropped']} longer than {max_prompt_length} tokens dropped"
        stderr().print(
            f"{entry['file']}: {plural(entry['num_rows'], 'row')}"
            f"{dropped if max_prompt_length else ''}, sha256 {entry['sha256'][:12]}",
            markup=False,
        )
        if split in lengths:
            _print_histogram(lengths[split])


def _print_histogram(lengths: Lengths) -> None:
    bins = lengths.histogram()
    most = max(count for *_, count in bins)
    rows = [
        (f"  {first}-{last}", str(count), "█" * round(_BAR_WIDTH * count / most))
        for first, last, count in bins
    ]
    stderr().print(table(["  prompt tokens", "rows", ""], rows, right=["rows"]))
