"""Record of a run: `metrics.jsonl` (the source of truth), `summary.json` and `generations/`.

Each step writes one line without buffering, so a killed process loses at most the line that it was
writing. Readers skip such an incomplete last line.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError
from rlctl.files import replacing, step_name
from rlctl.json_values import finite, finite_number
from rlctl.tracking.json_lines import (
    METRICS_FILE,
    OnBroken,
    drop_torn_tail,
    is_metrics,
    read_lines,
)
from rlctl.tracking.summary import write_summary
from rlctl.tracking.tracker import RunInfo, Sample

MAX_PENDING = 20_000  # samples of a kind kept in memory: about 40 MB of 2 kB each

# Folders of samples.
VALIDATED = "generations"
TRAINED = "generations_train"
RESPONSES = "rollouts"
_NAMES = {VALIDATED: "validation samples", RESPONSES: "training responses"}
_MAX_TRAINED = 1000  # steps whose training samples are kept


def generations_file(folder: Path, step: int, kind: str = VALIDATED) -> Path:
    """Return the file of the validation or training samples of `step` in a run's folder."""
    return folder / kind / f"{step_name(step)}.jsonl"


log = logging.getLogger(__name__)


class JsonlTracker:
    """Tracker that writes `metrics.jsonl`, `summary.json` and `generations/`.

    Floats read back as the same bits; NaN and infinities are written as null. A row that cannot be
    written stays in memory, leaves no partial line in the file, and is written with the next row;
    so do validation samples and training responses, up to `MAX_PENDING` of each.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self.file: FileIO | None = None
        self.end = 0  # end of the last complete row in the file, in bytes
        self.pending = b""
        self.last_row = b""
        self.pending_samples: dict[tuple[str, int], Sequence[Sample]] = {}
        self.lost: dict[tuple[str, int], str] = {}  # kind and step of samples, and the reason
        self.trained: tuple[int, Sequence[Sample]] | None = None  # written with the step's row

    def start(self, run: RunInfo) -> None:
        """Open `metrics.jsonl` for appending, without an incomplete last line."""
        self.folder = run.folder
        path = run.folder / METRICS_FILE
        drop_torn_tail(path)
        self.file = path.open("ab", buffering=0)
        self.end = self.file.tell()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step as one row; raise OSError if the disk refuses."""
        row = {"step": step} | {name: finite_number(value) for name, value in metrics.items()}
        self.last_row = json.dumps(row, allow_nan=False).encode() + b"\n"
        self.pending += self.last_row
        self._write()
        with suppress(OSError):  # readers complete the summary from the row
            write_summary(self.folder)
        self._write_samples()
        self._write_trained()

    def trained_on(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep some of the responses that a step learns from, until its row is written."""
        self.trained = step, samples

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Write all validation samples of a step to `generations/step_N.jsonl`.

        Raises OSError if the disk refuses, also when older samples are dropped from memory.
        """
        self.pending_samples[VALIDATED, step] = samples
        self._write_samples()

    def responses(self, step: int, samples: Sequence[Sample]) -> None:
        """Write all training responses of a step to `rollouts/step_N.jsonl`, as `generations`."""
        self.pending_samples[RESPONSES, step] = samples
        self._write_samples()

    @property
    def not_certain(self) -> bytes:
        """Rows that are in memory alone, or else the last row, which a power failure may cut."""
        return self.pending or self.last_row

    def finish(self, state: str) -> None:  # noqa: ARG002
        """Write pending rows and samples, and close the file."""
        if self.file is not None:
            try:
                self._write()
                self._write_samples()
                self._write_trained()
            except OSError as error:
                self.lost |= dict.fromkeys(self.pending_samples, str(error))
                raise
            finally:
                self.file.close()

    def _write_samples(self) -> None:
        failure: OSError | None = None
        for (kind, step), samples in list(self.pending_samples.items()):
            try:
                write_samples(generations_file(self.folder, step, kind), samples)
            except OSError as error:
                failure = failure or error
                continue
            except (TypeError, ValueError) as error:  # they will never be JSON
                log.warning("the %s of step %d are not written: %s", _NAMES[kind], step, error)
            del self.pending_samples[kind, step]
        if failure is not None:
            self._drop_oldest_samples()
            raise failure

    def _write_trained(self) -> None:
        """Write the training samples of the step; those of an old one make room for them."""
        if self.trained is None:
            return
        step, samples = self.trained
        self.trained = None
        try:
            write_samples(generations_file(self.folder, step, TRAINED), samples, sync=False)
            generations_file(self.folder, step - _MAX_TRAINED, TRAINED).unlink(missing_ok=True)
        except (OSError, TypeError, ValueError) as error:
            log.warning("the training samples of step %d are not written: %s", step, error)

    def _drop_oldest_samples(self) -> None:
        """Keep at most `MAX_PENDING` samples of a kind, but always those of its last step."""
        for kind, name in _NAMES.items():
            waiting = [key for key in self.pending_samples if key[0] == kind]
            while (
                len(waiting) > 1
                and sum(len(self.pending_samples[key]) for key in waiting) > MAX_PENDING
            ):
                oldest = waiting.pop(0)
                del self.pending_samples[oldest]
                self.lost[oldest] = "too many wait for a full disk"
                log.warning("the disk is full: the %s of step %d are lost", name, oldest[1])

    def _write(self) -> None:
        """Write pending rows after the last complete one, over any partial row; raise OSError."""
        assert self.file is not None
        self.file.truncate(self.end)
        written = self.file.write(self.pending)
        if written < len(self.pending):
            self.file.truncate(self.end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), METRICS_FILE)
        self.end += written
        self.pending = b""


def write_samples(path: Path, samples: Sequence[Sample], sync: bool = True) -> None:
    """Write one JSON line per sample; the file appears only when it is complete.

    With `sync` it outlasts a power failure.
    """
    path.parent.mkdir(exist_ok=True)
    with replacing(path, sync=sync) as aside, aside.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(
                json.dumps(
                    _plain(dataclasses.asdict(sample)),
                    ensure_ascii=False,
                    allow_nan=False,
                    default=str,
                )
                + "\n"
            )


def metric_rows(path: Path, on_broken: OnBroken | None = None) -> Iterator[dict[str, float]]:
    """Yield the rows of a `metrics.jsonl`, oldest first, null as NaN; nothing without a file.

    A broken line is no object of numbers with `step`; see `read_lines`.
    """
    for row in read_lines(path, on_broken, is_metrics):
        yield {name: math.nan if value is None else value for name, value in row.items()}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all `metric_rows`."""
    return list(metric_rows(path))


def read_generations(path: Path) -> list[Sample]:
    """Return the samples of a `generations/step_N.jsonl`; empty if there is no file.

    Raises ConfigError for missing or unknown fields.
    """
    try:
        return [_sample(row) for row in read_lines(path)]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"a line is not a sample: {error}", where=str(path)) from error


def _sample(row: Mapping[str, Any]) -> Sample:
    images = tuple(map(str, row.get("images", ())))
    if episode := row.get("episode"):
        from rlctl.episodes import Episode

        episode = Episode.from_dict(episode)
    return Sample(**{**row, "episode": episode or None, "images": images})


def _plain(sample: dict[str, Any]) -> dict[str, Any]:
    components = {name: finite_number(value) for name, value in sample["components"].items()}
    plain = sample | {"score": finite_number(sample["score"]), "components": components}
    plain |= {name: finite(sample[name]) for name in ("ground_truth", "episode")}
    return {name: value for name, value in plain.items() if value or name != "images"}
