"""Files of a model: where its weights are, and what their headers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache

from rlctl.recipes import schema
from rlctl.storage import local

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def weight_folder(model: schema.Model) -> Path | None:
    """Return the folder with the weights; None without one, or for random weights."""
    folder = Path(local(model.path)).expanduser()
    if model.init != "auto":
        return None
    if folder.is_dir():
        return folder
    cached = (try_to_load_from_cache(model.path, name) for name in (SINGLE_FILE, INDEX))
    return next((Path(path).parent for path in cached if isinstance(path, str)), None)


def weight_files(model: schema.Model) -> list[Path]:
    """Return the paths of the weight files, of which some may be missing; empty without any.

    Raises an error that depends on the damage for an index that cannot be read.
    """
    folder = weight_folder(model)
    if folder is None:
        return []
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX).is_file():
        return []
    names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return [folder / name for name in sorted(names)]


def tensors_in(file: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a safetensors header by the tensor's name."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def stored_dtype(files: list[Path]) -> torch.dtype | None:
    """Return the dtype that holds all weights of the files without rounding.

    None if they have weights that are no floating-point numbers of 16 bits or more.
    """
    names = {entry["dtype"] for file in files for entry in tensors_in(file).values()}
    if not names or not names <= _DTYPES.keys():
        return None
    import torch

    first, *others = (getattr(torch, _DTYPES[name]) for name in sorted(names))
    for other in others:
        first = torch.promote_types(first, other)
    return first
