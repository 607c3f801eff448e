"""Rows of data files in Arrow: a large file is converted once, cached, and mapped into memory.

The cache is below `RLCTL_CACHE` (`~/.cache/rlctl`) and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload
from weakref import WeakValueDictionary

import numpy as np

from rlctl.data_prep.agent_columns import episode_fields
from rlctl.data_prep.contract import Fault
from rlctl.data_prep.rows import PromptRow, decode, decode_prompts, existing_file, read_batches
from rlctl.files import replacing
from rlctl.recipes import schema
from rlctl.storage import cache_folder

LOG = logging.getLogger(__name__)

LARGE_BYTES = 16 * 2**20  # of a data file: from here on it is cached, below it is held in memory
_FORMAT = 4  # of cached files
_KIND = "rlctl.kind"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a complete Arrow stream

T = TypeVar("T")
_Keys = tuple[str, str, str]  # of prompt, data source and images


class Kind(NamedTuple):
    """Values of a row that the checks of a start depend on."""

    data_source: str
    agent_name: str
    episode_fields: tuple[str, ...]
    has_images: bool = False
    names_images: bool = False  # by paths
    fault: str = ""  # reason why the row is left out


class _Batch(NamedTuple):
    """Rows of one file that are next to each other."""

    columns: Any  # a RecordBatch
    keys: _Keys
    file: mmap.mmap | None  # that holds the columns; None: they are in memory
    path: Path  # of the data file
    start: int = 0  # number of the first row in it

    @property
    def num_rows(self) -> int:
        return self.columns.num_rows

    def rows(self, numbers: Sequence[int]) -> list[PromptRow]:
        rows = decode(self.columns, numbers, *self.keys)
        self.release()
        return rows

    def prompts(self, numbers: Sequence[int]) -> list[list[dict[str, str]]]:
        prompts = decode_prompts(self.columns, numbers, self.keys[0])
        self.release()
        return prompts

    def release(self) -> None:
        """Unmap the pages that were read; else the process would seem to hold the whole file."""
        if self.file is not None:
            self.file.madvise(mmap.MADV_DONTNEED)

    def row(self, number: int) -> PromptRow:
        (row,) = decode(self.columns.slice(number, 1), [0], *self.keys)
        self.release()  # the kernel maps 16 pages around each
        return row


class Rows(Sequence[PromptRow]):
    """Rows of data files, in their order; each is decoded when it is read.

    A row is the same object for as long as the caller holds it. `digest` identifies the content of
    the file if the rows are those of one cached file.
    """

    def __init__(
        self,
        batches: Sequence[_Batch],
        kinds: Sequence[Kind],
        kind_of: np.ndarray,
        digest: str | None = None,
    ) -> None:
        self._batches = batches
        self._kinds = kinds
        self._kind_of = kind_of
        self._stops = list(accumulate(batch.num_rows for batch in batches))
        # (N,) ascending, into the rows of all batches. A search with another type would copy it.
        self._index = np.arange(len(kind_of), dtype=np.min_scalar_type(len(kind_of)))
        self._alive: WeakValueDictionary[int, PromptRow] = WeakValueDictionary()
        self.digest = digest
        self.skipped: Counter[str] = Counter()  # rows of the file that are left out, by reason

    @classmethod
    def load(cls, path: str | Path, data: schema.Data, skip: bool = False) -> Rows:
        """Read a data file, or its copy in the cache. Raises ConfigError as `read_rows` does.

        With `skip`, rows that `read_rows` refuses are left out and counted.
        """
        path = existing_file(path)
        keys = (data.prompt_key, data.reward_fn_key, data.image_key)
        if path.stat().st_size < LARGE_BYTES:
            return cls._of(
                [_Batch(batch, keys, None, path) for batch in _with_kinds(path, keys, skip)]
            )
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        parts = [_FORMAT, content, path.suffix, keys, *(["skip"] if skip else ())]
        digest = hashlib.sha256(json.dumps(parts).encode())
        target = cache_folder() / "rows" / f"{digest.hexdigest()}.arrow"
        if target.exists():
            try:
                return cls._of(_mapped(target, keys, path), digest.hexdigest())
            except (ValueError, OSError, KeyError) as error:
                LOG.warning("the cached rows %s are damaged (%s): reading %s", target, error, path)
        LOG.info("reading %s for the first time", path)
        try:
            _write(target, path, keys, skip)
            return cls._of(_mapped(target, keys, path), digest.hexdigest())
        except OSError as error:
            LOG.warning("the rows of %s are not cached, but held in memory: %s", path, error)
            return cls._of(
                [_Batch(batch, keys, None, path) for batch in _with_kinds(path, keys, skip)]
            )

    @classmethod
    def _of(cls, batches: Sequence[_Batch], digest: str | None = None) -> Rows:
        """Build rows from batches that have a column of kinds."""
        numbers: dict[str, int] = {}
        parts = []
        starts = accumulate((batch.num_rows for batch in batches), initial=0)
        for batch in batches:
            kinds = batch.columns.column(_KIND)
            names = kinds.dictionary.to_pylist()
            codes = np.array([numbers.setdefault(kind, len(numbers)) for kind in names], np.int32)
            parts.append(codes[kinds.indices.to_numpy()])
            batch.release()
        found = [
            Kind(source, agent, tuple(fields), *images)
            for source, agent, fields, *images in map(json.loads, numbers)
        ]
        batches = [
            batch._replace(
                columns=batch.columns.select(batch.columns.schema.names[:-1]), start=start
            )
            for batch, start in zip(batches, starts, strict=False)
        ]
        rows = cls(batches, found, np.concatenate(parts), digest)
        faulty = np.array([bool(kind.fault) for kind in found], bool)
        return rows._without(faulty) if faulty.any() else rows

    @classmethod
    def concat(cls, parts: Sequence[Rows]) -> Rows:
        """Join rows of several files."""
        if len(parts) == 1:
            return parts[0]
        kinds = list(dict.fromkeys(kind for part in parts for kind in part._kinds))
        kind_of = []
        index = []
        start = 0
        for part in parts:
            codes = np.array([kinds.index(kind) for kind in part._kinds], np.int32)
            kind_of.append(codes[part._kind_of])
            index.append(part._index.astype(np.int64) + start)
            start += len(part._kind_of)
        joined = cls(
            [batch for part in parts for batch in part._batches], kinds, np.concatenate(kind_of)
        )
        joined._index = np.concatenate(index).astype(joined._index.dtype)
        for part in parts:
            joined.skipped.update(part.skipped)
        return joined

    def _without(self, faulty: np.ndarray) -> Rows:
        """Return the rows whose kind is not `faulty`, a mask of kinds, and count the others."""
        rows = self.select(~faulty[self._kind_of])
        numbers = np.bincount(self._kind_of, minlength=len(self._kinds)).tolist()
        for kind, count in zip(self._kinds, numbers, strict=True):
            rows.skipped[kind.fault] += count
        del rows.skipped[""]
        return rows

    def select(self, positions: np.ndarray | slice) -> Rows:
        """Return the rows at ascending `positions`, or where a mask is true."""
        chosen = Rows(self._batches, self._kinds, self._kind_of, self.digest)
        chosen._index = self._index[positions]
        chosen.skipped = self.skipped
        return chosen

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._index)

    @overload
    def __getitem__(self, position: int) -> PromptRow: ...
    @overload
    def __getitem__(self, position: slice) -> Rows: ...
    def __getitem__(self, position: int | slice) -> PromptRow | Rows:
        """Return a row, or the rows of a slice."""
        if isinstance(position, slice):
            return self.select(position)
        place = int(self._index[position])
        row = self._alive.get(place)
        if row is None:
            number = int(np.searchsorted(self._stops, place, side="right"))
            batch = self._batches[number]
            row = batch.row(place - self._stops[number] + batch.num_rows)
            self._alive[place] = row
        return row

    def __iter__(self) -> Iterator[PromptRow]:
        """Yield the rows; only those of one batch are in memory."""
        return self._decoded(_Batch.rows)

    def prompts(self) -> Iterator[list[dict[str, str]]]:
        """Yield the prompts of the rows; those of one batch are in memory, nothing else is read."""
        return self._decoded(_Batch.prompts)

    def _decoded(self, decode: Callable[[_Batch, Sequence[int]], Sequence[T]]) -> Iterator[T]:
        first = 0
        for batch, stop in zip(self._batches, self._stops, strict=True):
            last = int(self._index.searchsorted(self._index.dtype.type(stop)))
            if last > first:
                places = self._index[first:last].astype(np.int64) - (stop - batch.num_rows)
                yield from decode(batch, places.tolist())
            first = last

    def columns(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the Arrow columns of each batch, and the numbers (n,) of its rows that are here."""
        first = 0
        for batch, stop in zip(self._batches, self._stops, strict=True):
            last = int(self._index.searchsorted(self._index.dtype.type(stop)))
            yield batch.columns, self._index[first:last].astype(np.int64) - (stop - batch.num_rows)
            batch.release()
            first = last

    @property
    def paths(self) -> str:
        """Paths of the data files, as a text."""
        return ", ".join(dict.fromkeys(str(batch.path) for batch in self._batches))

    def place_of(self, position: int) -> str:
        """Return file and row number, or line, of a row."""
        place = int(self._index[position])
        number = int(np.searchsorted(self._stops, place, side="right"))
        batch = self._batches[number]
        from rlctl.data_prep.records import place_in

        return place_in(batch.path, batch.start + place - self._stops[number] + batch.num_rows)

    def count_sources(self) -> Counter[str]:
        """Return the number of rows of each data source."""
        counts: Counter[str] = Counter()
        numbers = np.bincount(self._kind_of[self._index], minlength=len(self._kinds)).tolist()
        for kind, count in zip(self._kinds, numbers, strict=True):
            counts[kind.data_source] += count
        return +counts  # without zeros

    def with_images(self) -> np.ndarray:
        """Return a mask (N,) of the rows that have images."""
        kinds = np.array([kind.has_images for kind in self._kinds], bool)
        return kinds[self._kind_of[self._index]]

    @property
    def names_images(self) -> bool:
        """True if rows name images by paths: then the digest does not identify all content."""
        return any(kind.names_images for kind in self._kinds)

    def first_of_each_kind(self, count: int) -> list[PromptRow]:
        """Return the first `count` rows of each kind, in the order of all rows.

        They are enough for checks that depend on the kind of rows and on a few of each data source.
        """
        kinds = self._kind_of[self._index]
        first = [np.flatnonzero(kinds == kind)[:count] for kind in np.unique(kinds)]
        if not first:
            return []
        return [self[int(place)] for place in np.sort(np.concatenate(first))]

    def positions_of(self, rows: Sequence[PromptRow]) -> list[int]:
        """Return the positions of rows that were read from here and are held since."""
        # Unlike `items`, `valuerefs` returns a list at once: another thread may read rows.
        place_of = {id(ref()): ref.key for ref in self._alive.valuerefs()}
        places = np.array([place_of[id(row)] for row in rows], self._index.dtype)
        return self._index.searchsorted(places).tolist()


def _kind(row: PromptRow | Fault) -> Kind:
    if isinstance(row, Fault):
        return Kind("", "", (), fault=row.reason)
    names_images = any(isinstance(image, str) for image in row.images)
    fields = episode_fields(row)
    return Kind(row.data_source, row.agent_name, fields, bool(row.images), names_images)


def _with_kinds(path: Path, keys: _Keys, skip: bool) -> Iterator[Any]:
    """Yield the batches of a file with a last column: the kinds of the rows, as JSON text."""
    import pyarrow as pa

    texts: dict[Kind, str] = {}
    for batch, rows in read_batches(path, *keys, skip):
        kinds = [_kind(row) for row in rows]
        if len(rows) == batch.num_rows:  # else the file has faults, which are raised at its end
            column = [texts.get(kind) or texts.setdefault(kind, json.dumps(kind)) for kind in kinds]
            yield batch.append_column(_KIND, pa.array(column, pa.string()).dictionary_encode())


def _write(target: Path, path: Path, keys: _Keys, skip: bool) -> None:
    """Write the batches of a file into the cache. Raises OSError if that fails."""
    import pyarrow as pa

    target.parent.mkdir(parents=True, exist_ok=True)
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # the default one keeps 40 MB more
    try:
        with replacing(target) as aside, pa.OSFile(str(aside), "wb") as sink:
            batches = _with_kinds(path, keys, skip)
            first = next(batches)
            with pa.ipc.new_stream(sink, first.schema) as stream:
                stream.write_batch(first)
                for batch in batches:
                    stream.write_batch(batch)
    finally:
        pa.set_memory_pool(pool)


def _mapped(target: Path, keys: _Keys, path: Path) -> list[_Batch]:
    """Map a cached file into memory. Raises ValueError or OSError if it is damaged."""
    import pyarrow as pa

    with target.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if mapped[-len(_END) :] != _END:
        raise ValueError("the file is incomplete")
    batches: list[_Batch] = []
    for batch in pa.ipc.open_stream(pa.py_buffer(mapped)):
        batch.validate()
        batches.append(_Batch(batch, keys, mapped, path))
        batches[-1].release()
    return batches
