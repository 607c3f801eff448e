"""Loading of distributed checkpoints without running code that their files contain.

torch.distributed.checkpoint (DCP) reads its `.metadata` file and every saved object that is not a
tensor with an unrestricted unpickler. A manifest does not help: who changes a file can write a
manifest that fits. So both are read with a list of allowed classes here.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from rlctl.errors import ConfigError, RlctlError


def _member(kind: Any, name: str) -> Any:
    """Return a member of an allowed enumeration; Python 3.11.2 pickles it as a `getattr`."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it refers to builtins.getattr")
    return kind[name]


_CLASSES: dict[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each
    for each in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
    )
} | {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # The folder of older checkpoints, unused. Python 3.13 has another name for its class.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("builtins", "getattr"): _member,
}
_HINT = "rlctl never writes this; nothing of the checkpoint was run. Use another checkpoint"
_UNREADABLE = (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError)


class _Unpickler(pickle.Unpickler):
    """Unpickler of DCP's metadata that knows its classes and no other ones."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return an allowed class or a dtype. Raises UnpicklingError for anything else."""
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}") from None


class _Reader(FileSystemReader):
    """Reader of DCP files with a restricted `.metadata`."""

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`, or that of `rank`. Raises ConfigError for a damaged file."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
        except (pickle.UnpicklingError, *_UNREADABLE) as error:
            raise _damaged(path, error) from error
        if not isinstance(found, Metadata):
            raise _damaged(path, TypeError(f"it contains a {type(found).__name__}"))
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    """Planner that loads objects, such as the settings of an optimizer, as weights."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one object of plain values and tensors. Raises UnpicklingError for other ones."""
        trusted = io.BytesIO()  # DCP's method would run what the file contains
        torch.save(torch.load(value, weights_only=True), trusted)
        trusted.seek(0)
        super().load_bytes(read_item, trusted)


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of the DCP files in `folder`. Raises ConfigError for a damaged file."""
    return _Reader(folder).read_metadata()


def load_into(state: dict[str, Any], folder: Path, *, no_dist: bool) -> None:
    """Load the DCP files in `folder` into the tensors of `state`. Collective unless `no_dist`.

    Raises ConfigError for damaged files, also for those that contain other classes than tensors
    and plain values.
    """
    try:
        load(state, storage_reader=_Reader(folder), planner=_Planner(), no_dist=no_dist)
    except (CheckpointException, pickle.UnpicklingError) as error:
        causes = [inner for inner, _ in getattr(error, "failures", {}).values()] or [error]
        cause = min(causes, key=lambda each: isinstance(each, Exception))  # Ctrl-C before others
        if isinstance(cause, RlctlError | KeyboardInterrupt | SystemExit):
            raise cause from error
        raise _damaged(folder, cause) from error


def _damaged(path: Path, error: BaseException) -> ConfigError:
    unsafe = isinstance(error, pickle.UnpicklingError)
    text = str(error).strip()
    if named := re.search(r"GLOBAL (\S+)", text):  # torch's text proposes to load it all the same
        reason = f"it refers to {named[1]}"
    elif "weights_only" in text:
        reason = "it does not consist of tensors and plain values"
    else:
        reason, *_ = text.splitlines() or [type(error).__name__]
    return ConfigError(
        f"a damaged checkpoint: {path.name} cannot be read: {reason}",
        where=str(path),
        hint=_HINT if unsafe else "use another checkpoint",
    )
