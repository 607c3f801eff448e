"""Digests of a run's files: small JSON values that the index caches until the file changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs.config_digest import config_digest
from rlctl.runs.labels import LABELS_FILE, read_labels
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.jsonl import METRICS_FILE

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
