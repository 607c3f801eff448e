"""Hashes of the files that a run reads, which detect changes between its attempts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from rlctl.data_prep.parquet_files import readable_parquet
from rlctl.data_prep.sources import TRAIN, VALIDATION, data_hashes, named_files
from rlctl.recipes import schema
from rlctl.recipes.role_table import ROLES
from rlctl.redaction import redact
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.rewards.specs import code_hashes
from rlctl.storage import local

Hashes = Mapping[str, Mapping[str, str]]

# README files, notes and weights in other formats are not loaded.
_LOADED = {".json", ".safetensors", ".model", ".txt", ".jinja", ".py"}
_WHOLE_BYTES = 64 * 2**20  # larger files are sampled: reading 100 GB takes minutes
_HEAD_BYTES = 2**20  # holds the header of a safetensors file: names, types and shapes
_BLOCK_BYTES = 16 * 2**10
_NUM_BLOCKS = 256


def input_hashes(config: schema.Config) -> Hashes:
    """Return the hashes of the files that a run reads, by field of its record."""
    data = config.data
    hashes: dict[str, str] = {}
    for files, split in ((data.train_paths, TRAIN), (data.val_files or (), VALIDATION)):
        hashes |= data_hashes(files, split) | image_hashes(files, split, data)
    return {
        "data": hashes,
        "reward_code": code_hashes(config.reward),
        "models": model_hashes(role.model(config) for role in ROLES),
    }


def image_hashes(files: Sequence[str], split: str, data: schema.Data) -> dict[str, str]:
    """Return one SHA-256 of all images that the rows of a file name by path, of files with any.

    Raises ConfigError for an image that cannot be read. Those in a file are part of its hash.
    """
    hashes = {}
    for name, path in named_files(files, split):
        if data.reader or not _may_have(path, data.image_key):
            continue
        rows = Rows.load(path, data, data.skip_invalid and split == TRAIN)
        if rows.names_images:
            from rlctl.data_prep.images import digest_of

            named = (image for row in rows for image in row.images if isinstance(image, str))
            found = hashlib.sha256("".join(map(digest_of, named)).encode())
            hashes[f"{name} (images)"] = found.hexdigest()
    return hashes


def _may_have(path: Path, key: str) -> bool:
    """Return False if no row of a file can have the column `key`, without decoding its rows."""
    if path.suffix == ".parquet":
        with readable_parquet(path) as table:
            return key in table.schema_arrow.names
    with path.open("rb") as file:
        return any(key.encode() in line for line in file)


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
