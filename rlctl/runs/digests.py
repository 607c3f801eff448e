"""Digests of a run's files: small JSON values that the index caches until the file changes.

That of the configuration is fast for thousands of runs that differ in a few values. Parsing YAML
takes milliseconds: the text is split into its sections, as `yaml.safe_dump` writes them, and
sections with the same text are parsed once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import RlctlError
from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs.labels import LABELS_FILE, read_labels
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.jsonl import METRICS_FILE

_NEXT_KEY = [re.compile(rf"^(?={'  ' * depth}[A-Za-z_])", re.MULTILINE) for depth in range(12)]
_HEAD = re.compile(r" *(\w+):\n(?= )")
_MAX_SECTIONS = 2048  # a section that differs in every run is not worth keeping


def config_digest(path: Path) -> dict[str, Any]:
    """Return the composed config as dotted key -> value; empty for an unreadable file."""
    try:
        text = path.read_text(encoding="utf-8")
        try:
            return _parse_sections(text)
        except (yaml.YAMLError, _NotSplitError):  # a reference, or not written by rlctl
            return _parse(text)
    except (OSError, ValueError, yaml.YAMLError, _NotSplitError):
        return {}


class _NotSplitError(Exception):
    """The text is not a mapping whose keys are at the beginning of lines."""


def _parse_sections(text: str, prefix: str = "") -> dict[str, Any]:
    """Return the values of the mapping at `prefix` by dotted key.

    Raises an error where it cannot be split.
    """
    before, *sections = _NEXT_KEY[prefix.count(".")].split(text)
    names = {section.partition(":")[0] for section in sections}
    if before or len(names) < len(sections):
        raise _NotSplitError
    values: dict[str, Any] = {}
    for section in sections:
        values |= _parse_section(section, prefix)
    return values


@functools.lru_cache(_MAX_SECTIONS)
def _parse_section(text: str, prefix: str) -> dict[str, Any]:
    """Return the values of one key and of what is below it, by dotted key."""
    head = _HEAD.match(text)
    deepest = prefix.count(".") + 1 == len(_NEXT_KEY)
    if head is None or deepest or text[head.end() :].lstrip()[:1] in "-#'\"":
        return _parse(text, prefix)
    return _parse_sections(text[head.end() :], f"{prefix}{head[1]}.")


def _parse(text: str, prefix: str = "") -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    container = yaml.load(text, loader)
    if not isinstance(container, dict):
        raise _NotSplitError
    return dict(_flat(container, prefix))


def _flat(section: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Order of a metric's values in the digest of the metrics.
SERIES = ("first", "last", "min", "max", "count")


@dataclass(frozen=True)
class Part:
    """File of a run's folder, the function that digests it, and the digest of a missing file.

    `digest` receives the path, and for a file that `grows` the digest of its earlier content. The
    index keeps `small` digests in memory, too.
    """

    file: str
    digest: Callable[..., Any]
    absent: Any
    grows: bool = False
    small: bool = False


def _metrics_digest(path: Path, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    from rlctl.runs.metrics_digest import metrics_digest  # imports numpy

    return metrics_digest(path, earlier)


def _record_digest(path: Path) -> dict[str, Any]:
    try:
        record = RunRecord.read(path)
        fields = vars(record) | {"process": vars(record.process)}  # `asdict` would copy all values
        return {"record": fields, "problem": None}
    except RlctlError as error:
        return {"record": None, "problem": str(error)}


RECORD = Part(RECORD_FILE, _record_digest, None, small=True)
LABELS = Part(
    LABELS_FILE, lambda path: dataclasses.asdict(read_labels(path.parent)), None, small=True
)
NO_METRICS = {
    "summary": dataclasses.asdict(RunSummary()),
    "series": {},
    "curves": {},
    "problem": None,
    "read": None,
}
METRICS = Part(METRICS_FILE, _metrics_digest, NO_METRICS, grows=True)
CONFIG = Part("config.yaml", config_digest, {})
PARTS = (RECORD, LABELS, METRICS, CONFIG)
