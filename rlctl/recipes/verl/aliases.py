"""Names that verl has for a key: the tables of renamed keys, read in the other direction."""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.recipes.verl.renamed import MOVED, PLUGIN_SETTINGS, SFT_MOVED
from rlctl.recipes.verl.rules import alternatives, compiled


def aliases(key: str) -> list[str]:
    """Return verl's names of `key` that differ from it; those of its SFT trainer come last."""
    found = [
        alias
        for table in (PLUGIN_SETTINGS, MOVED, SFT_MOVED)
        for pattern, new in table
        for alias in _aliases(key, pattern, new)
    ]
    return [alias for alias in dict.fromkeys(found) if alias != key]


def _aliases(key: str, pattern: str, new: str) -> Iterator[str]:
    """Yield the names that `pattern` renames to `key`."""
    for old in alternatives(pattern):
        match = compiled(pattern).match(old)
        target = match.expand(new) if match else ""
        if target == key:
            yield old
        elif target.endswith("*") and key.startswith(head := target[:-1]):
            rest = key.removeprefix(head)
            if head.endswith(".") or rest.startswith((".", "_")) or not rest:
                yield old[:-1] + rest
