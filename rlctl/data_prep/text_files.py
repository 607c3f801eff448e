"""Text files of other programs: encoding, field separator and records of CSV."""

from __future__ import annotations

import codecs
import csv
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from rlctl.data_prep.datasets import option
from rlctl.errors import ConfigError, UsageError
from rlctl.plugins import Params

LOG = logging.getLogger(__name__)

UTF_8 = "utf-8-sig"  # "-sig": Windows and Excel write a mark first
_MARKS = {  # the longer one first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_UNDEFINED = bytes((0x81, 0x8D, 0x8F, 0x90, 0x9D))  # bytes that cp1252 does not define
_BLOCK = 2**20  # bytes that are looked at in one go
_SAMPLE = 2**16  # characters that show the separator
_SAMPLE_RECORDS = 20
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "|"}
_MAX_FIELD = 2**30  # characters of a CSV field


@dataclass(frozen=True)
class TextForm:
    """Encoding and separator that the user names; None is found in each file."""

    encoding: str | None = None
    delimiter: str | None = None


class TextParams(Params):
    """Options `--encoding` and `--delimiter` of data sets."""

    encoding: str | None = option(
        None, "NAME", "Encoding of text files, such as cp1252; by default found in each file."
    )
    delimiter: str | None = option(
        None, "CHAR", "Separator of CSV fields, or `tab`; by default found in each file."
    )

    def form(self) -> TextForm:
        """Return the form of the files. Raises UsageError for an unknown encoding or separator."""
        return text_form(self.encoding, self.delimiter)


def text_form(encoding: str | None, delimiter: str | None) -> TextForm:
    """Return the form that options name. Raises UsageError for unusable ones."""
    if encoding is not None:
        try:
            codecs.lookup(encoding)
        except LookupError:
            raise UsageError(
                f"no encoding {encoding!r}",
                where="--encoding",
                hint="such as utf-8, cp1252 (Western Europe), cp1250, mac-roman or utf-16",
            ) from None
    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter or "", delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise UsageError(
            f"{delimiter!r} cannot separate fields",
            where="--delimiter",
            hint="one character, such as ';', or tab",
        )
    return TextForm(encoding, delimiter)


@contextmanager
def opened(path: Path, form: TextForm, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file in its encoding. Raises ConfigError if it cannot be read."""
    encoding = form.encoding or UTF_8
    try:
        encoding = form.encoding or encoding_of(path)
        with path.open(encoding=encoding, newline=newline) as file:
            yield file
    except UnicodeError as error:
        reason = str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = error.reason
        raise ConfigError(
            f"not text in {_name(encoding)}: {reason}",
            where=_line_of(path, encoding),
            hint="--encoding NAME reads another one, such as cp1252 or mac-roman",
        ) from error
    except OSError as error:
        raise ConfigError(f"not a readable text file: {error}", where=str(path)) from error


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file, by its mark or its bytes, and say another than UTF-8.

    Bytes that are mostly no UTF-8 are cp1252; a few of them are damage, which reading reports.
    """
    status = path.stat()
    return _encoding_of(path, status.st_size, status.st_mtime_ns)


@cache
def _encoding_of(path: Path, _size: int, _changed: int) -> str:
    """Return the encoding of a file in this state; reading it once is enough."""
    with path.open("rb") as file:
        head = file.read(4096)
        found = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
        if found is None and b"\0" in head:
            found = "utf-16-le"
            if head.startswith(b"\0"):
                found = "utf-16-be"
        if found is None:
            file.seek(0)
            found = _eight_bits(file)
    if found != UTF_8:
        LOG.info("%s: read as %s; --encoding names another", path, _name(found))
    return found


def _eight_bits(file: Any) -> str:
    """Return UTF-8, cp1252 or Latin-1 for an open file of bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    valid = wrong = 0
    has_undefined = False
    while block := file.read(_BLOCK):
        text = decoder.decode(block)
        if text.isascii():
            continue
        has_undefined = has_undefined or any(byte in block for byte in _UNDEFINED)
        wrong_here = text.count("\ufffd")
        wrong += wrong_here
        valid += len(text) - len(text.encode("ascii", "ignore")) - wrong_here
    wrong += decoder.decode(b"", final=True).count("\ufffd")
    if wrong <= valid:
        return UTF_8
    if has_undefined:
        return "latin-1"
    return "cp1252"


def _name(encoding: str) -> str:
    return encoding.removesuffix("-sig").upper().replace("CP", "cp").replace("LATIN", "Latin")


def _line_of(path: Path, encoding: str) -> str:
    """Return the place of the first line that cannot be decoded, or of the file."""
    if encoding.lower().startswith(("utf-16", "utf-32")):
        return str(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode(encoding)
            except UnicodeError:
                return f"{path}:{number}"
    return str(path)


def csv_records(path: Path, form: TextForm) -> Iterator[tuple[str, Any]]:
    """Yield position and record of each line with a field; a ValueError for a wrong one.

    An empty field is None.
    """
    csv.field_size_limit(_MAX_FIELD)
    with opened(path, form, newline="") as file:
        delimiter = form.delimiter or _delimiter_of(path, file)
        reader = csv.DictReader(file, delimiter=delimiter)
        try:
            names = list(reader.fieldnames or ())
            if twice := next((name for name in names if name and names.count(name) > 1), None):
                raise ConfigError(f"two columns are named {twice!r}", where=f"{path}:1")
            for record in reader:
                where = f"{path}:{reader.line_num}"
                if None in record or None in record.values():  # too many fields, or too few
                    yield (
                        where,
                        ValueError(
                            f"the line does not have the fields {', '.join(names)}, "
                            f"separated by {_DELIMITERS.get(delimiter, delimiter)} (--delimiter)"
                        ),
                    )
                elif any(text.strip() for text in record.values()):
                    yield (
                        where,
                        {name: text if text.strip() else None for name, text in record.items()},
                    )
        except csv.Error as error:
            raise ConfigError(f"not CSV: {error}", where=f"{path}:{reader.line_num}") from error


def _delimiter_of(path: Path, file: TextIO) -> str:
    """Return the separator in the first records of an open file, and say an unusual one."""
    sample = file.read(_SAMPLE)
    file.seek(0)
    usual = ","
    if path.suffix.lower() == ".tsv":
        usual = "\t"
    order = sorted(_DELIMITERS, key=lambda delimiter: delimiter != usual)
    found = max(order, key=lambda delimiter: _fit(sample, delimiter))
    if found != usual:
        _say_delimiter(path, found)
    return found


def _fit(sample: str, delimiter: str) -> tuple[float, int]:
    """Return which share of the records has as many fields as the first, and that number."""
    try:
        lines = list(csv.reader(StringIO(sample, newline=""), delimiter=delimiter))
    except csv.Error:
        return 0.0, 0
    records = [record for record in lines if record]
    if len(sample) == _SAMPLE:
        records = records[:-1] or records
    records = records[:_SAMPLE_RECORDS]
    if not records or len(records[0]) < 2:
        return 0.0, 0
    return _share(records), len(records[0])


def _share(records: Sequence[Sequence[str]]) -> float:
    return sum(len(record) == len(records[0]) for record in records) / len(records)


@cache
def _say_delimiter(path: Path, delimiter: str) -> None:
    LOG.info("%s: fields separated by %s; --delimiter names others", path, _DELIMITERS[delimiter])
