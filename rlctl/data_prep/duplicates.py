"""Equal records of a source, which a split must not divide between training and validation."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable

from rlctl.data_prep.images import digest_of
from rlctl.data_prep.rows import PromptRow
from rlctl.text import plural

LOG = logging.getLogger(__name__)


def keep_equal_together(rows: Iterable[PromptRow], chosen: frozenset[int]) -> frozenset[int]:
    """Return the indices `chosen` for validation, changed so that no equal rows are divided.

    Equal rows go where the first of them is; `chosen` is returned if that would empty a split.
    """
    first: dict[bytes, int] = {}
    together = set(chosen)
    count = 0
    for index, row in enumerate(rows):
        count += 1
        owner = first.setdefault(_digest(row), index)
        if owner in chosen:
            together.add(index)
        else:
            together.discard(index)
    if not 0 < len(together) < count:
        return chosen
    if len(first) < count:
        LOG.warning(
            "%s equal to an earlier one: equal records are on one side of the split",
            plural(count - len(first), "record"),
        )
    return frozenset(together)


def _digest(row: PromptRow) -> bytes:
    """Return a digest of what makes a problem: prompt, images and truth, or all without a truth."""
    parts = [row.prompt, row.ground_truth or row.extra_info | {"index": 0, "split": ""}]
    text = json.dumps([*parts, *map(digest_of, row.images)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
