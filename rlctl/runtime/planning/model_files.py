"""Check that the weight files of a model are complete, by sizes and headers only."""

from __future__ import annotations

import json
from pathlib import Path

from rlctl.errors import Problem
from rlctl.recipes import schema
from rlctl.storage import local

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def check_weights(model: schema.Model, key: str) -> list[Problem]:
    """Return a problem for missing weights, missing shards of an index, or truncated files.

    `key` is the config key of the model. Hub names and models with random weights are not checked.
    """
    folder = Path(local(model.path)).expanduser()
    if model.init != "auto" or not folder.is_dir():
        return []
    again = "copy or download the model again"
    files = [folder / name for name in _SINGLE_FILES if (folder / name).is_file()][:1]
    index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
    if not files and index is not None:
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            return [Problem(f"{index} cannot be read as an index of weights: {error}", key, again)]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            return [
                Problem(
                    f"{len(missing)} of {len(names)} weight files are missing in {folder}: "
                    f"{', '.join(missing)}",
                    key,
                    again,
                )
            ]
        files = [folder / name for name in names]
    if not files:
        hint = (
            "a folder with *.safetensors, or actor_rollout_ref.model.init=random for random weights"
        )
        return [
            Problem(
                f"{folder} holds no weights: neither {' nor '.join(_SINGLE_FILES)} "
                "nor an index of shards",
                key,
                hint,
            )
        ]
    damaged = {file: _damage(file) for file in files if file.suffix == ".safetensors"}
    return [
        Problem(f"{file} is damaged: {problem}", key, again)
        for file, problem in damaged.items()
        if problem
    ]


def _damage(file: Path) -> str | None:
    """Return what is wrong with a safetensors file, or None.

    It has eight bytes with the length of the header, the header in JSON, and the data it lists.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length:
            return f"its header should take {length} bytes, and the file has {size}"
        try:
            header = json.loads(stream.read(length))
            end = max(
                (
                    entry["data_offsets"][1]
                    for name, entry in header.items()
                    if name != "__metadata__"
                ),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return "its header is not that of a safetensors file"
    return None if size == 8 + length + end else f"{size} bytes long instead of {8 + length + end}"
