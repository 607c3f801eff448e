"""Files of a model: where its weights are, what their headers say, and their hashes.

The hashes detect changed weights between the attempts of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from rlctl.recipes import schema
from rlctl.redaction import redact
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


# README files, notes and weights in other formats are not loaded.
_LOADED = {".json", ".safetensors", ".model", ".txt", ".jinja", ".py"}
_WHOLE_BYTES = 64 * 2**20  # larger files are sampled: reading 100 GB takes minutes
_HEAD_BYTES = 2**20  # holds the header of a safetensors file: names, types and shapes
_BLOCK_BYTES = 16 * 2**10
_NUM_BLOCKS = 256


def model_hashes(models: Iterable[schema.Model]) -> dict[str, str]:
    """Return a hash of the files of each model, tokenizer and chat template.

    They are named by path, hub name or URL. Files of more than 64 MiB are sampled, so a change of a
    few bytes in them may stay unnoticed; training changes almost every byte. A model of the hub has
    the name of its commit. Leaves out what is not on this machine.
    """
    given = (
        path
        for model in models
        for path in (model.path, model.tokenizer_path, model.chat_template_file)
    )
    hashes = {redact(path): _model_hash(path) for path in dict.fromkeys(given) if path is not None}
    return {path: digest for path, digest in hashes.items() if digest is not None}


def _model_hash(path: str) -> str | None:
    folder = Path(local(path)).expanduser()
    if folder.is_dir():
        return _folder_hash(folder)
    if folder.is_file():
        return _file_hash(folder)
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # no name of the hub
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def _folder_hash(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in _LOADED and file.is_file():
            total.update(f"{file.name}\0{file.stat().st_size}\0{_file_hash(file)}\n".encode())
    return total.hexdigest()


def _file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or of its head and evenly spaced blocks if it is large."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        total = hashlib.sha256(os.pread(file.fileno(), _HEAD_BYTES, 0))
        for number in range(1, _NUM_BLOCKS + 1):
            start = (size - _BLOCK_BYTES) * number // _NUM_BLOCKS
            total.update(os.pread(file.fileno(), _BLOCK_BYTES, start))
        return total.hexdigest()
